"""The hub's end of one worker: its requests become those of the hub, and outputs go back."""

import asyncio
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import final

import msgspec

from jsg.engine.child.protocol import Failure
from jsg.engine.child.wire import MessageDecoder, SentRequest
from jsg.engine.front.channel import Channel
from jsg.engine.front.grammar_queue import AT_ONCE
from jsg.engine.private_directory import temporary_directory
from jsg.errors import JsgError, QueueFullError
from jsg.server.front import Front
from jsg.server.http.failures import INTERNAL_ERROR
from jsg.server.workers.messages import Asked, Begun, Compiled, Entry, FromHub, ToHub
from jsg.types import FinishReason, FinishType, RequestOutput, altered

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, eq=False)
class _Inside:
    """An entry that was let in.

    Attributes:
        stack: Leaves the admission when it is closed.
        leave: One of its answers has ended.
        watch: Of a hold: takes what ends it.
        turns: Those of its grammars.
    """

    stack: contextlib.ExitStack
    leave: Callable[[], None]
    watch: Callable[[Callable[[], None]], None] | None
    turns: asyncio.Semaphore = dataclasses.field(default_factory=lambda: asyncio.Semaphore(AT_ONCE))
    is_open: bool = True

    def close(self, error: JsgError | None = None) -> None:
        """Leaves, with an error that the admission shall know."""
        if self.is_open:
            self.is_open = False
            self.stack.__exit__(None if error is None else type(error), error, None)


@final
class Guest:
    """One worker, as the hub sees it.

    Attributes:
        address: Where it connects.
        reading: Ends with an error where a message cannot be read.
    """

    def __init__(self, on_news: Callable[[ToHub], None]) -> None:
        """Listens for the worker. `on_news` is shown each of its messages."""
        self._directory = temporary_directory()
        self.address = f"ipc://{self._directory.name}/hub"
        self._channel = Channel(self.address, listens=True)
        self._on_news = on_news
        self._front: Front | None = None
        self._outbox: FromHub | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._entries: dict[int, _Inside | Failure] = {}
        self._ends: dict[str, Callable[[], None]] = {}
        self._compiling: dict[int, asyncio.Task[None]] = {}
        self.reading = asyncio.create_task(self._read())

    def open(self, front: Front) -> None:
        """The engine is ready, and requests may come."""
        self._front = front
        self.post().info = front.client.info

    def post(self) -> FromHub:
        """The open outbox. It is sent after the event loop has run what is ready."""
        if self._outbox is None:
            self._outbox = FromHub()
            asyncio.get_running_loop().call_soon(self._flush)
        return self._outbox

    def close(self) -> None:
        """The worker has ended, so its requests end."""
        self._flush()
        for task in (self.reading, *self._compiling.values()):
            task.cancel()
        while self._ends:
            self._ends.popitem()[1]()
        for entry in self._entries.values():
            if isinstance(entry, _Inside):
                entry.close()
        self._entries.clear()
        self._channel.close()
        self._directory.cleanup()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, None
        if outbox is not None:
            self._channel.send([self._encode(outbox)])

    async def _read(self) -> None:
        decoder, requests = msgspec.msgpack.Decoder(ToHub), MessageDecoder()
        while True:
            head, *frames = await self._channel.receive()
            sent = requests.decode([*map(memoryview, frames)]).requests if frames else ()
            message = decoder.decode(head)
            for entry in message.entries:
                self._enter(entry)
            for begun, request in zip(message.begun, sent, strict=True):
                self._begin(begun, request)
            for name in message.aborts:
                self._abort(name)
            for number in message.left:
                entry = self._entries.pop(number)
                if isinstance(entry, _Inside):
                    entry.close()
            for asked in message.asked:
                compiling = self._compiling[asked.number] = asyncio.create_task(self._compile(asked))
                compiling.add_done_callback(lambda _, number=asked.number: self._compiling.pop(number))
            for number in message.unasked:
                if task := self._compiling.get(number):
                    task.cancel()
            self._on_news(message)
            await asyncio.sleep(0)  # `recv` does not wait while there are messages, and other tasks need their turn

    @property
    def _opened(self) -> Front:
        assert self._front is not None, "a worker sends no request before it has the model"
        return self._front

    def _enter(self, entry: Entry) -> None:
        admission, stack = self._opened.generator.admission, contextlib.ExitStack()
        try:
            if entry.is_hold:
                inside = _Inside(stack, _nothing, stack.enter_context(admission.hold(entry.tenant)))
            else:
                leave = stack.enter_context(admission.enter(entry.tenant, entry.num_answers))
                inside = _Inside(stack, leave, None)
        except JsgError as error:
            self._entries[entry.number] = Failure.of(error)
        else:
            self._entries[entry.number] = inside

    def _begin(self, begun: Begun, sent: SentRequest) -> None:
        entry = self._entries[begun.entry]
        if isinstance(entry, Failure):
            self.post().failures.append((begun.name, entry))
            return
        try:
            request = altered(sent.make(), rid=begun.rid)
            take = functools.partial(self._take, begun.name, entry)
            self._ends[begun.name] = _nothing  # a refusal may come before `begin` returns
            end = self._opened.client.begin(request, begun.owner, take, grammar_turns=entry.turns, name=begun.name)
            if begun.name in self._ends:
                self._ends[begun.name] = functools.partial(_end, end, entry)
        except Exception as error:
            self._fail(begun.name, entry, error)

    def _take(self, name: str, entry: _Inside, output: RequestOutput | Exception) -> None:
        """The sink of a request: see `streams.Sink`."""
        if isinstance(output, Exception):
            self._fail(name, entry, output)
            return
        output.rid = name
        self.post().outputs.append(output)
        if output.finish is not None:
            if self._ends.pop(name, None) is not None and entry.is_open:
                entry.leave()
        elif entry.watch is not None:
            watch, entry.watch = entry.watch, None
            watch(functools.partial(self._release, name))

    def _release(self, name: str) -> None:
        """Ends a hold whose time is over."""
        if name in self._ends:
            self._abort(name)
            self.post().outputs.append(RequestOutput(rid=name, finish=FinishReason(FinishType.STOP)))

    def _abort(self, name: str) -> None:
        if end := self._ends.pop(name, None):
            end()

    def _fail(self, name: str, entry: _Inside, error: Exception) -> None:
        self._ends.pop(name, None)
        if isinstance(error, QueueFullError):
            entry.close(error)  # which says when it may be tried again
        self.post().failures.append((name, _failure(error)))

    async def _compile(self, asked: Asked) -> None:
        front = self._opened
        try:
            front.generator.admission.check(asked.owner, 1, is_let_in=False)
            tables = await front.client.grammars.tables(asked.patterns, asked.owner)
            self.post().compiled.append(Compiled(asked.number, tables))
        except Exception as error:
            self.post().compiled.append(Compiled(asked.number, failure=_failure(error)))


def _failure(error: Exception) -> Failure:
    """What a worker is told. Of an error that nobody foresaw the log has the cause."""
    if isinstance(error, JsgError):
        return Failure.of(error)
    logger.error("a request of a worker failed", exc_info=error)
    return Failure.of(JsgError(INTERNAL_ERROR))


def _end(end: Callable[[], None], entry: _Inside) -> None:
    end()
    if entry.is_open:
        entry.leave()


def _nothing() -> None:
    """Does nothing."""
