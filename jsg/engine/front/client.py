"""The front's side of the engine process: requests go down and outputs come back, one message each way per step.

Everything happens on one event loop; only the wait for the child's end has a thread.

On the wire a request has a number in place of its name. A client may use a name again as soon as its stream is closed,
and a late output of the old request must not reach the new one. Owners exist on this side only: the engine sees
numbers, and namespaces that keep the owners' prefixes apart.
"""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import itertools
import logging
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, final

import msgspec

from jsg.config import EngineConfig
from jsg.engine.child.heartbeat import HeartbeatMonitor
from jsg.engine.child.protocol import Call, FromEngine, GrammarTables, ModelInfo, Progress, ToEngine
from jsg.engine.child.wire import MessageEncoder
from jsg.engine.front.channel import Channel
from jsg.engine.front.children import EngineChild
from jsg.engine.front.grammar_compiler import GrammarCompiler
from jsg.engine.front.places import Places
from jsg.engine.front.routing import Reason
from jsg.engine.front.sent_grammars import SentGrammars
from jsg.engine.front.streams import Sink, Stream, Streams
from jsg.engine.front.tree_feed import TreeFeed
from jsg.errors import EngineDeadError, JsgError, RequestError, queue_full, waited_too_long
from jsg.types import FinishReason, FinishType, GrammarSpec, Request, RequestOutput, altered
from jsg.waits import WaitReason, stat_of

logger = logging.getLogger(__name__)

STOP_GRACE_S = 3.0  # for the engine to close by itself
LAST_WORDS_S = 0.1  # for the last messages of an engine that has ended
START_LAST_WORDS_S = 2.0  # where it ended before it was ready: a message should say why
ENGINE_GRAMMAR_BYTES = 64 * 2**20  # tables that the engine keeps for later requests; those that run keep their own
WATCH_S = 1.0  # how often the heartbeat is looked at
LONG_BYTES = 2**16  # after a message of so many the event loop has its turn
MAX_MESSAGES = 16  # that are taken at once, so that the event loop has its turn even behind a very fast engine


@dataclasses.dataclass(slots=True)
class _Outbox:
    """What goes into the next message to the engine: see `ToEngine`."""

    aborts: list[str] = dataclasses.field(default_factory=list)
    grammars: list[GrammarTables] = dataclasses.field(default_factory=list)
    requests: dict[str, Request] = dataclasses.field(default_factory=dict)
    forgotten_grammars: list[str] = dataclasses.field(default_factory=list)
    calls: list[Call] = dataclasses.field(default_factory=list)
    stop: bool = False

    def add_grammar(self, grammar: GrammarTables) -> None:
        """Sends a grammar, or lets the engine keep it where the same message would make it forget it."""
        if grammar.key in self.forgotten_grammars:
            self.forgotten_grammars.remove(grammar.key)
        else:
            self.grammars.append(grammar)

    def message(self) -> ToEngine:
        fields: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["requests"] = list(self.requests.values())
        return ToEngine(**fields)


@final
class EngineClient:
    """An engine process and the requests that are live in it.

    A request has an owner: the tenant whose key it came with. Owners share the engine and see nothing of each other.

    Invariant: a request has a stream from its `begin` until its last output, its abort or its end. No
    stream outlives the engine.

    Attributes:
        grammars: Compiles the grammars of requests.
    """

    def __init__(
        self,
        child: EngineChild,
        config: EngineConfig,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """Listens for the child. Must run on the event loop that will use the client.

        Args:
            child: The engine process.
            config: Its options.
            on_progress: Called with the progress of its start.
            grammars: The compiler of grammars that several clients share, which are closed together; None makes one.
        """
        self._child = child
        self._config = config
        self._on_progress = on_progress
        self._channel = Channel(child.address, listens=True)
        self._streams = Streams()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._outbox: _Outbox | None = None
        self._encoder = MessageEncoder()
        self.grammars = grammars or GrammarCompiler()
        self._sent_grammars = SentGrammars(ENGINE_GRAMMAR_BYTES)
        self._takes_grammars = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[ModelInfo] = loop.create_future()
        self._death: asyncio.Future[str] = loop.create_future()
        self._heartbeat = HeartbeatMonitor(child.heartbeat_fd)
        loop.add_reader(self._heartbeat.fileno(), self._take_beats)
        self._running = loop.create_task(self._run())

    async def ready(self) -> ModelInfo:
        """Waits for the end of the warm-up. Raises what the engine's start raised, or EngineDeadError."""
        return await asyncio.shield(self._ready)

    def take_turns(self) -> None:
        """From now on owners take turns, as `Places` says. Only after `ready`, and where there are several."""
        self._streams.places = Places(self.info.max_running_requests)

    def pass_on(self, take: Callable[[str, bytes], None]) -> None:
        """From now on `take` gets the name of a worker and the outputs that are for it: see `Passing`."""
        self._streams.pass_on = take

    async def death(self) -> EngineDeadError:
        """Waits for the engine's end; returns an error that describes it."""
        return EngineDeadError(await asyncio.shield(self._death))

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Only after `ready`."""
        return self._ready.result()

    @property
    def is_alive(self) -> bool:
        """Whether the engine is ready and has not ended."""
        return not self._death.done() and self._ready.done() and self._ready.exception() is None

    @property
    def is_stalled(self) -> bool:
        """Whether the engine process has given no sign of life for some seconds. It may still go on."""
        return not self._death.done() and self._heartbeat.is_stalled

    @property
    def most_requests(self) -> int:
        """How many requests may run and wait."""
        return self._config.max_queued_requests + self.info.max_running_requests

    @property
    def num_under_way(self) -> int:
        """How many requests run and wait."""
        return len(self._streams)

    @property
    def is_full(self) -> bool:
        """Whether no further request may run or wait."""
        return self.num_under_way >= self.most_requests

    @property
    def takes_grammars(self) -> bool:
        """Whether the engine has tried to load what grammars need, so that a request with one does not wait for it."""
        return self._takes_grammars.is_set()

    @property
    def engines(self) -> "tuple[EngineClient, ...]":
        """This engine alone; `fleet.py` has several."""
        return (self,)

    @property
    def routed(self) -> Mapping[tuple[int, Reason], int]:
        """Empty, because one engine leaves no choice."""
        return {}

    def begin(
        self,
        request: Request,
        owner: str,
        sink: Sink,
        *,
        is_streamed: bool = True,
        grammar_turns: asyncio.Semaphore | None = None,
        name: str | None = None,
    ) -> Callable[[], None]:
        """Begins a request. Returns a function that ends it, and does nothing where it has ended.

        Args:
            request: The request.
            owner: Its owner.
            sink: Takes its outputs. The errors that it may get: RequestError, the engine refused the request;
                GrammarError, its grammar is wrong or not supported; QueueFullError, too many requests wait, or as
                QueueTimeoutError it waited longer than `--queue-timeout`; EngineDeadError, the engine ended; and the
                error that `abort_all` was given.
            is_streamed: False where nobody reads its outputs as they come: see `Request`.
            grammar_turns: Its grammar is not asked for before it has one of these.
            name: Its name on the wire, of a request of a worker: see `Passing`.

        Raises:
            RequestError: Its rid is that of a live request of this owner, or it cannot be sent.
            QueueFullError, EngineDeadError: As above.
        """
        stream, grammar = self._open(request, owner, sink, name), request.sampling.grammar
        if isinstance(grammar, GrammarSpec) and grammar.key not in self._sent_grammars:
            turns = grammar_turns or asyncio.Semaphore()
            compiling = self._compile_and_send(stream, grammar, turns, request, is_streamed=is_streamed)
            stream.compiling = asyncio.ensure_future(compiling)
        else:
            self._send(stream, request, is_streamed=is_streamed)
        return functools.partial(self._abort, stream)

    def abort(self, rid: str, owner: str = "") -> bool:
        """Ends a live request of the owner; its stream gets a last output. False when there is none of that rid."""
        stream = self._streams.find(owner, rid)
        if stream is not None:
            self._end(stream, None)
        return stream is not None

    def abort_all(self, owner: str | None = None, error: JsgError | None = None) -> int:
        """Ends every live request of the owner, of everybody for None, and says how many.

        Their streams get a last output that says "aborted", or raise `error` if one is given.
        """
        streams = self._streams.all_of(owner)
        for stream in streams:
            self._end(stream, error)
        return len(streams)

    def live_rids(self, owner: str) -> list[str]:
        """Names of the owner's live requests, oldest first."""
        return [stream.rid for stream in self._streams.all_of(owner)]

    async def flush_cache(self) -> bool:
        """Empties the prefix cache; False when requests run or wait. Raises EngineDeadError."""
        return await self._call("flush_cache")

    async def stats(self) -> dict[str, int | float]:
        """Counters and gauges: see `protocol.CORE_STATS` and `LOOP_STATS`.

        Raises EngineDeadError, or JsgError where the engine fails to count them.
        """
        stats, waits = await self._call("stats"), self._streams.waits
        num_waiting = stats["num_waiting"] + waits[WaitReason.KEY_SHARE]
        return stats | {stat_of(reason): count for reason, count in waits.items()} | {"num_waiting": num_waiting}

    async def watch_cache(self, cursor: int, *, with_tokens: bool = False) -> dict[str, Any]:
        """The news of the prefix cache as `TreeLog.look` gives them, and the pool.

        Raises EngineDeadError, or JsgError where the engine fails to give them.
        """
        return await self._call("watch_cache", cursor, with_tokens=with_tokens)

    @functools.cached_property
    def tree(self) -> TreeFeed:
        """The prefix cache, for those who look at it."""
        return TreeFeed(self.watch_cache)

    async def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stops the engine process, by force after `grace_s`, and ends every stream with EngineDeadError."""
        if self.is_alive:
            self._post().stop = True
            self._flush()
        else:
            grace_s = 0.0
            self._fail_start(EngineDeadError("the engine was closed while it started"))
        await self.grammars.close()
        await asyncio.to_thread(self._child.end, grace_s)
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        self._channel.close()

    def _open(self, request: Request, owner: str, sink: Sink, name: str | None) -> Stream:
        if self._death.done():
            raise EngineDeadError(self._death.result())
        try:
            request.namespace.encode()
        except UnicodeEncodeError:  # UTF-8 has no lone surrogates, and a whole message would be lost
            raise RequestError(
                "namespace must be Unicode text, but has a lone surrogate; leave it out", param="namespace"
            ) from None
        if self.is_full:
            raise queue_full(self.most_requests)
        return self._streams.open(owner, request.rid, sink, name)

    def _send(self, stream: Stream, request: Request, *, is_streamed: bool) -> None:
        # The front makes the text, so it finds the stop strings, and the engine has no use for them. The engine has the
        # tables of a grammar and needs no more than its key.
        key = request.sampling.grammar_key
        if key is not None:
            self._sent_grammars.use(key)
        sampling = altered(request.sampling, stop=(), grammar=key)
        is_streamed = request.is_streamed and is_streamed
        points = {} if self.info.caches_states else {"snapshot_at": (), "turn_end": 0}
        sent = altered(request, rid=stream.wire_name, sampling=sampling, is_streamed=is_streamed, **points)
        if self._streams.places is None or request.hold:  # a hold takes no row
            self._post().requests[stream.wire_name] = sent
        else:
            self._streams.places.add(stream.owner, sent)
            self._fill_places()

    def _fill_places(self) -> None:
        for request, waited_s in self._streams.places.take() if self._streams.places is not None else ():
            if stream := self._streams.on_wire(request.rid):
                stream.waited_s = waited_s
            self._post().requests[request.rid] = request

    def _close(self, stream: Stream) -> bool:
        """Forgets a stream, whose place another request gets. Returns whether the engine may have the request."""
        if not self._streams.close(stream):
            return False
        if self._streams.places is None:
            return True
        is_unknown = self._streams.places.leave(stream.owner, stream.wire_name)
        self._fill_places()
        return not is_unknown

    async def _compile_and_send(
        self, stream: Stream, grammar: GrammarSpec, turns: asyncio.Semaphore, request: Request, *, is_streamed: bool
    ) -> None:
        """Sends a grammar unless the engine has it by now, and its request at once, or when there is a place."""
        try:
            tables = await self._tables(grammar, stream, turns)
            if (key := grammar.key) not in self._sent_grammars:
                outbox = self._post()
                outbox.add_grammar(GrammarTables(key, tables))
                waiting = set() if self._streams.places is None else self._streams.places.grammars()
                outbox.forgotten_grammars += self._sent_grammars.add(key, len(tables), waiting)
            self._send(stream, request, is_streamed=is_streamed)
        except Exception as error:
            stream.compiling = None  # to close the stream cancels it
            self._close(stream)
            stream.sink(error)

    async def _tables(self, grammar: GrammarSpec, stream: Stream, turns: asyncio.Semaphore) -> bytes:
        """The tables of a grammar, as soon as the engine takes requests that have grammars."""
        with stream.clock.on(WaitReason.GRAMMAR):
            async with turns:
                tables = await self.grammars.tables(grammar, stream.owner)
        with stream.clock.on(WaitReason.LOADING):
            await self._takes_grammars.wait()
        return tables

    def _end(self, stream: Stream, error: JsgError | None) -> None:
        """Aborts a live request and ends its stream."""
        self._abort(stream)
        if error is None:
            stream.take(RequestOutput(rid=stream.rid, finish=FinishReason(FinishType.ABORT, message="aborted")))
        else:
            stream.sink(copy.copy(error))  # each stream has its own, because raising an error writes to it

    def _abort(self, stream: Stream) -> None:
        """Forgets a stream and tells the engine; does nothing where the stream has ended."""
        if not self._close(stream):
            return
        outbox = self._post()
        if outbox.requests.pop(stream.wire_name, None) is None:
            outbox.aborts.append(stream.wire_name)

    async def _call(
        self, name: Literal["flush_cache", "stats", "watch_cache"], cursor: int = 0, *, with_tokens: bool = False
    ) -> Any:
        if self._death.done():
            raise EngineDeadError(self._death.result())
        number = max(self._calls, default=0) + 1
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[number] = reply
        self._post().calls.append(Call(number, name, cursor, with_tokens))
        return await reply

    def _post(self) -> _Outbox:
        """The open outbox. It is sent after the event loop has run what is ready, so a burst becomes one message."""
        if self._outbox is None:
            self._outbox = _Outbox()
            asyncio.get_running_loop().call_soon(self._flush)
        return self._outbox

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            self._channel.send(self._encoder.encode(outbox.message()))

    async def _run(self) -> None:
        """Reads until the child ends, then reads its last messages, then ends all streams and calls."""
        reading, watching = asyncio.create_task(self._read()), asyncio.create_task(self._watch())
        exited = self._exit_of_child()
        await asyncio.wait({reading, exited}, return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            logger.error("a message of the engine could not be read", exc_info=reading.exception())
            self._child.kill()
        status = await exited
        reading.cancel()
        watching.cancel()
        await asyncio.wait({reading})
        decoder = msgspec.msgpack.Decoder(FromEngine)
        try:
            with contextlib.suppress(msgspec.MsgspecError):
                limit_s = LAST_WORDS_S if self._ready.done() else START_LAST_WORDS_S
                while words := await self._channel.receive_within(limit_s):
                    self._take(decoder.decode(words[0]))
        finally:
            self._die(f"the engine process ended (exit status {status}); {_remedy(status)}")

    def _exit_of_child(self) -> asyncio.Future[int]:
        loop = asyncio.get_running_loop()
        exited: asyncio.Future[int] = loop.create_future()

        def wait() -> None:
            status = self._child.wait()
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody waits any more
                loop.call_soon_threadsafe(exited.set_result, status)

        threading.Thread(target=wait, name="jsg-engine-exit", daemon=True).start()
        return exited

    async def _watch(self) -> None:
        """Ends an engine whose step loop has stood still for too long, so that its streams end."""
        await asyncio.wait({self._ready})
        if not self.is_alive:
            return
        limit_s = self._config.watchdog_timeout
        self._heartbeat.start_watch()
        while self._heartbeat.stuck_s <= limit_s:
            await asyncio.sleep(min(WATCH_S, limit_s / 4))
            self._refuse_overdue()
        logger.error("the engine's step loop has not turned for %g s (--watchdog-timeout); it is ended", limit_s)
        self._child.kill()

    def _refuse_overdue(self) -> None:
        """Ends the requests that have waited for a place too long; the engine ends those that it knows."""
        limit_s = self._config.queue_timeout
        if self._streams.places is None or limit_s is None:
            return
        for name in self._streams.places.overdue(limit_s):
            if stream := self._streams.on_wire(name):
                self._end(stream, waited_too_long(limit_s))

    def _take_beats(self) -> None:
        if not self._heartbeat.read():
            asyncio.get_running_loop().remove_reader(self._heartbeat.fileno())

    async def _read(self) -> None:
        """Takes messages as they come, up to `MAX_MESSAGES` in a turn of the event loop.

        Where the engine is faster than the front, each stream then sends the tokens of several steps in one event. If
        each step were taken by itself, steps would pile up in the socket, and every stream would be late by all of
        them.
        """
        decoder = msgspec.msgpack.Decoder(FromEngine)
        for count in itertools.count(1):
            [message] = await self._channel.receive()
            self._take(decoder.decode(message))
            if len(message) > LONG_BYTES or not count % MAX_MESSAGES:
                await asyncio.sleep(0)

    def _take(self, message: FromEngine) -> None:
        for output in message.outputs:
            stream = self._streams.on_wire(output.rid)
            if stream is None:
                continue  # the request was aborted while this output was under way
            if output.finish is not None:
                self._close(stream)
            stream.take(output)
        for worker, outputs in message.passed:
            self._streams.pass_on(worker, outputs)
        for refusal in message.refusals:
            if stream := self._streams.on_wire(refusal.rid):
                self._close(stream)
                stream.sink(refusal.failure.to_error())
        for reply in message.replies:
            waiting = self._calls.pop(reply.number)
            if waiting.done():
                continue
            if reply.failure is None:
                waiting.set_result(reply.value)
            else:
                waiting.set_exception(reply.failure.to_error())
        self._take_start(message)

    def _take_start(self, message: FromEngine) -> None:
        if message.progress is not None and self._on_progress is not None:
            self._on_progress(message.progress)
        if message.ready is not None and not self._ready.done():
            self._child.remove_directory()
            self._ready.set_result(message.ready)
        if message.takes_grammars:
            self._takes_grammars.set()
        if message.failure is not None:
            self._fail_start(message.failure.to_error())

    def _fail_start(self, error: JsgError) -> None:
        """Ends the wait for the start, unless the start is over."""
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # asyncio warns of an error that nobody has read

    def _die(self, reason: str) -> None:
        self._death.set_result(reason)
        asyncio.get_running_loop().remove_reader(self._heartbeat.fileno())
        self._heartbeat.close()
        self._fail_start(EngineDeadError(reason))
        self._streams.places = None
        for stream in self._streams.all_of(None):
            self._streams.close(stream)
            stream.sink(EngineDeadError(reason))
        for waiting in self._calls.values():
            if not waiting.done():
                waiting.set_exception(EngineDeadError(reason))
        self._calls.clear()


def _remedy(status: int) -> str:
    """What to do about an engine process that ended with this status."""
    if status == -signal.SIGKILL:
        return "if the system's log says that memory ran out, lower --max-total-tokens; restart the server"
    return "restart the server, its log says why"
