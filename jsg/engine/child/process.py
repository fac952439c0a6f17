"""The engine process: `python -m jsg.engine.child.process JSON`. Only `front/children.py` starts it.

Its loop reads everything that the front has sent, takes some of the requests (`intake.py`), runs one step and sends the
outputs of that step. It empties the inbox before each step, so an abort never waits behind requests. The process ends
when the front tells it to, when its parent is gone, or with a stack trace when a step raises. If a request cannot be
added or a call cannot be answered, only that one fails.
"""

import dataclasses
import gc
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast, final

import msgspec
import zmq

from jsg.cache.radix import RadixCache
from jsg.config import EngineConfig
from jsg.engine.child.free_memory import IdleTrim, collect_seldom
from jsg.engine.child.heartbeat import HeartbeatSender, LoopClock
from jsg.engine.child.intake import Intake, Taker
from jsg.engine.child.log import log_to_stderr
from jsg.engine.child.parent import die_with_parent, end_at_once
from jsg.engine.child.passing import Passing
from jsg.engine.child.protocol import (
    Call,
    EngineStart,
    Failure,
    FromEngine,
    KvEvents,
    ModelInfo,
    Progress,
    Refusal,
    Reply,
)
from jsg.engine.child.wire import Arrived, MessageDecoder
from jsg.errors import JsgError
from jsg.types import RequestOutput
from jsg.waits import WaitReason, stat_of

if TYPE_CHECKING:
    from jsg.engine.child.kv_events import KvEventPublisher

logger = logging.getLogger(__name__)

IDLE_POLL_MS = 250  # an idle loop wakes up this often, so that it does not look stuck or outlive its parent
START_FLUSH_MS = 30_000  # how long the message of a failed start waits for a front that is still importing
END_FLUSH_MS = 1000
LOOKS = {"stats": "counters", "watch_cache": "prefix cache"}  # calls that change no state, and what they return


class Core(Taker, Protocol):
    """What this loop needs of `jsg.engine.core.EngineCore` or of a scripted core in tests.

    Attributes:
        info: The loaded model.
        has_work: Whether a step would do something.
        is_settled: Whether all loading and compiling in the background is finished.
    """

    info: ModelInfo
    has_work: bool
    is_settled: bool

    def step(self) -> list[RequestOutput]:
        """Runs one step."""
        ...

    def refuse_overdue(self) -> list[Refusal]:
        """Removes the requests that have waited longer than `--queue-timeout` for their first step."""
        ...

    def answer(self, call: Call) -> bool | dict[str, Any]:
        """Answers a call between two steps. Raises JsgError where it cannot be answered."""
        ...

    def close(self, *, waits: bool = True) -> None:
        """Frees what the core holds. Without `waits` threads in the background may go on until the process ends."""
        ...


class CacheOwner(Protocol):
    """A core with a prefix cache. Scripted cores of tests have none."""

    @property
    def cache(self) -> RadixCache:
        """The cache."""
        ...


CoreFactory = Callable[..., Core]


@final
class FrontLink:
    """The engine's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)  # the front bounds what it sends, and a step must never wait for it
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = MessageDecoder()

    def send(self, message: FromEngine) -> None:
        """Queues a message; never blocks."""
        self._socket.send(self._encoder.encode(message))

    def receive_all(self, *, wait: bool) -> list[Arrived]:
        """All messages that have arrived, oldest first; `wait` blocks up to `IDLE_POLL_MS` for the first one."""
        messages: list[Arrived] = []
        timeout_ms = IDLE_POLL_MS if wait else 0
        while self._socket.poll(timeout_ms):
            frames = self._socket.recv_multipart(copy=False)
            messages.append(self._decoder.decode([frame.buffer for frame in frames]))
            timeout_ms = 0
        return messages

    def close(self, flush_ms: int) -> None:
        """Closes the socket. Queued messages have up to `flush_ms` to be sent."""
        self._socket.close(linger=flush_ms)
        self._context.term()


def serve(
    core: Core,
    link: FrontLink,
    parent_pid: int,
    clock: LoopClock,
    on_settled: Callable[[], None] = lambda: None,
    on_idle: Callable[[], None] = lambda: None,
    on_turn: Callable[[], None] = lambda: None,
) -> None:
    """Steps the core until the front says stop or is gone.

    Args:
        core: The engine.
        link: Its end of the socket.
        parent_pid: The front's process.
        clock: It counts the turns.
        on_settled: Called once, when the core has settled.
        on_idle: Called whenever there is no work.
        on_turn: Called at the end of each turn.
    """
    end = time.monotonic()
    takes_grammars = is_settled = False
    intake, passing = Intake(), Passing()
    while os.getppid() == parent_pid:
        if not takes_grammars and core.grammars.are_loaded:
            takes_grammars = True
            link.send(FromEngine(takes_grammars=True))
        if not is_settled and core.is_settled:
            is_settled = True
            on_settled()
        start, is_idle = end, not core.has_work and not intake
        if is_idle:
            on_idle()
        messages = link.receive_all(wait=is_idle)
        woken = time.monotonic() if is_idle else start
        refusals = core.refuse_overdue()
        for arrived in messages:
            if arrived.message.stop:
                return
            intake.put(arrived, core)
            passing.forget(arrived.message.aborts)
        refusals += intake.take(core)
        replies = [_answer(core, call, clock, intake) for each in messages for call in each.message.calls]
        outputs, passed = passing.divide(core.step()) if core.has_work else ([], [])
        if outputs or passed or refusals or replies:
            link.send(FromEngine(outputs=outputs, passed=passed, refusals=refusals, replies=replies))
        on_turn()
        end = time.monotonic()
        clock.add(idle_s=woken - start, busy_s=end - woken)


def _answer(core: Core, call: Call, clock: LoopClock, intake: Intake) -> Reply:
    if call.name == "flush_cache" and intake:
        return Reply(call.number, value=False)  # requests wait
    try:
        value = core.answer(call)
    except JsgError as error:
        return Reply(call.number, failure=Failure.of(error))
    except Exception:
        if call.name not in LOOKS:
            raise  # the call may have changed part of the state before it failed
        message = f"the engine could not give its {LOOKS[call.name]}; the server's log has the cause"
        logger.exception(message)
        return Reply(call.number, failure=Failure(JsgError.__name__, message))
    if call.name == "stats" and isinstance(value, dict):
        value |= dataclasses.asdict(clock)
        for name in ("num_waiting", stat_of(WaitReason.NEXT_STEP)):
            value[name] = value.get(name, 0) + len(intake)
    return Reply(call.number, value)


def run(start: EngineStart) -> int:
    """Loads the core and serves. Returns the exit status: 0 after a stop, 2 if the core could not start."""
    link = FrontLink(start.address)
    clock = LoopClock()
    heartbeat = HeartbeatSender(start.heartbeat_fd, clock)

    def report(progress: Progress) -> None:
        link.send(FromEngine(progress=progress))

    publisher = None
    try:
        if start.kv_events is not None:
            publisher = _publisher(start.kv_events)  # first: its addresses may not be free
        core = _load_core(start.core, start.config, report)
        if publisher is not None:
            publisher.observe(cast(CacheOwner, core).cache)
    except JsgError as error:
        link.send(FromEngine(failure=Failure.of(error)))
        link.close(START_FLUSH_MS)
        return 2
    collect_seldom()
    link.send(FromEngine(ready=core.info))
    idle = IdleTrim()

    def settle() -> None:
        gc.freeze()  # settling has made 100 000 more objects that stay
        idle.note_settled()

    try:
        publish = publisher.publish if publisher is not None else lambda: None
        serve(core, link, start.parent_pid, clock, on_settled=settle, on_idle=idle, on_turn=publish)
    finally:
        if publisher is not None:
            publisher.close()
        core.close(waits=not ends_at_once(start))
        heartbeat.stop()
        link.close(END_FLUSH_MS)
    return 0


def ends_at_once(start: EngineStart) -> bool:
    """Whether the process need not end as Python does. JAX says goodbye to other hosts at Python's end."""
    return start.config.nnodes == 1


def _publisher(where: KvEvents) -> "KvEventPublisher":
    from jsg.engine.child.kv_events import KvEventPublisher  # here: most engines publish nothing

    return KvEventPublisher(where)


def _load_core(name: str, config: EngineConfig, report: Callable[[Progress], None]) -> Core:
    module_name, _, attribute = name.partition(":")
    factory: CoreFactory = getattr(importlib.import_module(module_name), attribute)
    return factory(config, report=report)


def main(argument: str) -> int:
    """Runs the engine process described by the JSON argument."""
    gc.disable()  # until the engine is ready: a start frees few objects, and collections would take a tenth of its time
    start = msgspec.json.decode(argument, type=EngineStart)
    log_to_stderr(start.name)
    die_with_parent(start.parent_pid)  # where the kernel cannot do that, `serve` notices that the parent is gone
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a service manager sends the signal to both processes; the front then stops this one
        signal.signal(number, signal.SIG_IGN)
    status = run(start)
    if ends_at_once(start):
        end_at_once(status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
