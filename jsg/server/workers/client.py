"""A worker's end of the hub: what answering a request needs of an engine and of the admission.

The hub has the engines, the limits and the grammar processes. So a request is let in, and takes its turn among others,
as if there were no workers.
"""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import final, override

import msgspec

from jsg.config import ServerConfig
from jsg.constrained.text_patterns import PatternSet, PatternTables
from jsg.engine.child.protocol import ModelInfo, ToEngine
from jsg.engine.child.wire import MessageEncoder
from jsg.engine.front.channel import Channel
from jsg.engine.front.client import LONG_BYTES, MAX_MESSAGES
from jsg.engine.front.streams import Sink, Stream, Streams
from jsg.server.limits import Admission
from jsg.server.workers.messages import Asked, Begun, Entry, FromHub, Moved, Report, ToHub
from jsg.types import Request, RequestOutput, altered

ENTRY: ContextVar[int] = ContextVar("jsg_entry")
"""The entry that the requests of a task belong to: `HubAdmission` sets it, and `HubClient.begin` reads it."""


@final
class HubClient:
    """The hub as an engine, with those methods of `EngineClient` that a worker needs.

    Attributes:
        grammars: Compiles patterns.
        has_stopped: Is set once this process shall end.
    """

    is_alive = True
    is_stalled = False

    def __init__(self, address: str, name: str, on_message: Callable[[FromHub], None]) -> None:
        """Connects. Must run on the event loop that will use the client.

        Args:
            address: The hub's.
            name: What names of requests begin with.
            on_message: It is shown each message.
        """
        self._channel = Channel(address, listens=False)
        self._on_message = on_message
        self._streams = Streams(f"{name}.")
        self._decode_outputs = msgspec.msgpack.Decoder(list[RequestOutput]).decode
        self._outbox: ToHub | None = None
        self._requests: dict[str, Request] = {}
        self._encoder = MessageEncoder()
        self._encode = msgspec.msgpack.Encoder().encode
        self._numbers = itertools.count()
        self._ready: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self.grammars = HubPatterns(self)
        self.has_stopped = asyncio.Event()
        self._reading = asyncio.create_task(self._read())

    async def ready(self) -> ModelInfo:
        """Waits for the model."""
        return await asyncio.shield(self._ready)

    def take_turns(self) -> None:
        """Does nothing, because owners take turns at the hub."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Only after `ready`."""
        return self._ready.result()

    @property
    def engines(self) -> "tuple[HubClient]":
        """The hub alone, whatever is behind it."""
        return (self,)

    @property
    def num_under_way(self) -> int:
        """How many requests of this worker run and wait."""
        return len(self._streams)

    def begin(
        self,
        request: Request,
        owner: str,
        sink: Sink,
        *,
        is_streamed: bool = True,
        grammar_turns: asyncio.Semaphore | None = None,
    ) -> Callable[[], None]:
        """As `EngineClient.begin`; what that raises about the engine comes to the sink.

        The hub has turns for the grammars of an entry, so `grammar_turns` are not taken.
        """
        stream = self._streams.open(owner, request.rid, sink)
        sampling = altered(request.sampling, stop=())
        is_streamed = request.is_streamed and is_streamed
        name = stream.wire_name
        self._requests[name] = altered(request, rid=name, sampling=sampling, is_streamed=is_streamed)
        self.post().begun.append(Begun(name, request.rid, owner, ENTRY.get()))
        return functools.partial(self._abort, stream)

    def enter(self, tenant: str, num_answers: int, *, is_hold: bool = False) -> int:
        """Asks the hub to let answers in. Gives the number of the entry; a refusal comes to their sinks."""
        number = next(self._numbers)
        self.post().entries.append(Entry(number, tenant, num_answers, is_hold))
        return number

    def leave(self, number: int) -> None:
        """Says that the generation of an entry has ended."""
        self.post().left.append(number)

    async def tables(self, patterns: PatternSet, owner: str) -> bytes:
        """The tables of patterns in msgpack. Raises as `GrammarCompiler.tables`."""
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        self.post().asked.append(Asked(number, patterns, owner))
        try:
            return await self._asked[number]
        finally:
            if not self._asked.pop(number).done():
                self.post().unasked.append(number)

    def give_back(self, slot: int, begin: bytes | None) -> None:
        """Gives a connection back: it is closed, or the hub answers the request that begins so."""
        if begin is None:
            self.post().closed.append(slot)
        else:
            self.post().moved.append(Moved(slot, begin))

    def report(self, report: Report) -> None:
        """Sends what was counted."""
        self.post().report = report

    def note_ready(self) -> None:
        """Says that this worker can answer requests."""
        self.post().is_ready = True

    def post(self) -> ToHub:
        """The open outbox. It is sent after the event loop has run what is ready, so a burst becomes one message."""
        if self._outbox is None:
            self._outbox = ToHub()
            asyncio.get_running_loop().call_soon(self._flush)
        return self._outbox

    async def close(self) -> None:
        """Sends what is left and closes the connection."""
        self._flush()
        self._reading.cancel()
        await asyncio.wait({self._reading})
        self._channel.close(flush_ms=1000)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, None
        requests, self._requests = self._requests, {}
        if outbox is None:
            return
        begun = [one for one in outbox.begun if one.name in requests]  # the others were aborted
        outbox.begun = begun
        sent = self._encoder.encode(ToEngine(requests=[requests[one.name] for one in begun])) if begun else []
        self._channel.send([self._encode(outbox), *sent])

    def _abort(self, stream: Stream) -> None:
        """Forgets a stream and tells the hub; does nothing where the stream has ended."""
        if self._streams.close(stream) and self._requests.pop(stream.wire_name, None) is None:
            self.post().aborts.append(stream.wire_name)

    async def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromHub)
        for count in itertools.count(1):
            [message] = await self._channel.receive()
            self._take(decoder.decode(message))
            if len(message) > LONG_BYTES or not count % MAX_MESSAGES:
                await asyncio.sleep(0)

    def _take(self, message: FromHub) -> None:
        for each in message.outputs:
            for output in self._decode_outputs(each) if isinstance(each, bytes) else (each,):
                if stream := self._streams.on_wire(output.rid):
                    if output.finish is not None:
                        self._streams.close(stream)
                    stream.take(output)
        for name, failure in message.failures:
            if stream := self._streams.on_wire(name):
                self._streams.close(stream)
                stream.sink(failure.to_error())
        for compiled in message.compiled:
            asked = self._asked.get(compiled.number)
            if asked is None or asked.done():
                continue  # nobody waits any more
            if compiled.failure is None:
                asked.set_result(compiled.tables)
            else:
                asked.set_exception(compiled.failure.to_error())
        if message.info is not None and not self._ready.done():
            self._ready.set_result(message.info)
        if message.stop:
            self.has_stopped.set()
        self._on_message(message)


@final
class HubPatterns:
    """Compiles the patterns of requests, as `GrammarCompiler` does, in the hub's processes."""

    def __init__(self, hub: HubClient) -> None:
        self._hub = hub

    async def patterns(self, patterns: PatternSet, owner: str = "") -> PatternTables:
        """As `GrammarCompiler.patterns`."""
        return msgspec.msgpack.decode(await self._hub.tables(patterns, owner), type=PatternTables)


class HubAdmission(Admission):
    """Lets everything in. The hub, which has the limits, refuses an entry when its first request begins."""

    def __init__(self, config: ServerConfig, hub: HubClient) -> None:
        super().__init__(config)
        self._hub = hub

    @override
    def check(self, tenant: str, num_answers: int, *, is_let_in: bool) -> None:
        """Does nothing."""

    @override
    @contextlib.contextmanager
    def enter(self, tenant: str, num_answers: int, *, is_let_in: bool = False) -> Iterator[Callable[[], None]]:
        """As `Admission.enter`. The hub sees for itself when an answer has ended."""
        with self._entered(self._hub.enter(tenant, num_answers)):
            yield lambda: None

    @override
    @contextlib.contextmanager
    def hold(self, tenant: str) -> Iterator[Callable[[Callable[[], None]], None]]:
        """As `Admission.hold`. The hub ends the hold when its time is over."""
        with self._entered(self._hub.enter(tenant, 1, is_hold=True)):
            yield lambda end: None

    @contextlib.contextmanager
    def _entered(self, number: int) -> Iterator[None]:
        ENTRY.set(number)
        try:
            yield
        finally:
            self._hub.leave(number)
