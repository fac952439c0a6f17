"""What is new of the answers of a generation, from the engine's client to the one reader."""

import asyncio
from collections.abc import Callable
from typing import Self, final

from jsg.speech.answers.answer_stream import AnswerDelta

Send = Callable[[AnswerDelta], bool]
"""Sends a delta, or gives False where the reader has to."""


@final
class NextTurn:
    """Calls functions in the next turn of the event loop, all in one go, which costs less than a task for each."""

    def __init__(self) -> None:
        """Nothing is to be called."""
        self._due: list[Callable[[], None]] = []

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function then, which must not raise."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(function)

    def _run(self) -> None:
        due, self._due = self._due, []
        for function in due:
            function()


@final
class Deltas:
    """What is new of answers, for one reader: (index of an answer, all that is new of it), each up to its finish.

    A reader that is slower than the engine gets larger deltas, not more of them: each delta brings its answer up to
    date. The reader gets an error once it has read what came before.

    Deltas need not wake the reader while it waits: `senders` are tried first, in the next turn of the event loop.

    Attributes:
        senders: Index of an answer → what sends its deltas without the reader. The reader puts it there.

    Raises:
        TimeLimitError: An answer did not come in time.
        JsgError: What the sink of `EngineClient.begin` gets, or the engine failed an answer.
    """

    def __init__(self, num_open: int, next_turn: NextTurn) -> None:
        """Nothing is new of so many answers."""
        self.senders: dict[int, Send] = {}
        self._num_open = num_open
        self._next_turn = next_turn
        self._waiting: dict[int, list[AnswerDelta]] = {}
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    def put(self, index: int, delta: AnswerDelta) -> None:
        """Adds a delta of an answer."""
        waiting = self._waiting.get(index)
        if self._failure is not None:
            return
        if waiting is None:
            self._waiting[index] = [delta]
            if index in self.senders and self._reader is not None:
                self._next_turn.call(self._send)
            else:
                self._wake()
        else:
            waiting.append(delta)

    def fail(self, error: Exception) -> None:
        """The first error counts."""
        self._failure = self._failure or error
        self._wake()

    def close(self) -> None:
        """Forgets what nobody reads."""
        self._waiting.clear()
        self._failure = None  # it has a traceback, whose frames have the generation

    def _send(self) -> None:
        """Sends what waits, unless the reader is at work. Wakes it for the rest."""
        if self._reader is None or self._reader.done():
            return
        try:
            while self._waiting:
                index, waiting = next(iter(self._waiting.items()))
                send, delta = self.senders.get(index), AnswerDelta.join(waiting)
                self._waiting[index] = [delta]
                if send is None or not send(delta):
                    self._wake()
                    return
                del self._waiting[index]
        except Exception as error:
            self.fail(error)

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, AnswerDelta]:
        while not self._waiting:
            if self._failure is not None:
                raise self._take_failure()
            if not self._num_open:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        index = next(iter(self._waiting))
        delta = AnswerDelta.join(self._waiting.pop(index))
        self._num_open -= delta.finish is not None
        return index, delta

    def _take_failure(self) -> Exception:
        failure, self._failure = self._failure, None
        assert failure is not None
        return failure
