"""The state of a program, which its body extends, reads and forks."""

import asyncio
import contextlib
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, Self, final

from jsg.lang.program.branches import Extendable, ProgramStateGroup
from jsg.lang.program.reading import RunState, What
from jsg.lang.program.run import Run
from jsg.lang.streams.history import History
from jsg.lang.streams.places import program_place
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable, known
from jsg.lang.words.ir import Expr


@final
class ProgramState(RunState, Extendable):
    """A prompt and its variables.

    Appending returns at once. Reading waits for the value, and raises the error that kept it from being known. `[...]`,
    `text` and the like block the thread; async programs read with `aget`, `atext` and the like. In an async program,
    `await program(...)` gives the state of a called program at its end.
    """

    def __init__(self, stream: Stream, run: Run, *, is_callers: bool = False):
        """With `is_callers` it is the state of whoever runs the program, who reads it as it is at its end."""
        self._stream = stream
        self._run = run
        self._is_callers = is_callers
        if stream is not run.stream:
            # A fork that nobody references needs its prefix no longer. The program's own stream ends with its body.
            weakref.finalize(self, stream.release).atexit = False

    # Appending.

    def extend(self, value: "Expr | str") -> Self:
        """Appends text or an expression; does the same as `+=`."""
        self._stream.append(value, program_place())
        return self

    __iadd__ = extend

    def set_var(self, name: str, value: Any) -> None:
        """Sets a variable to a value; the prompt does not change."""
        self._stream.set(name, value)

    def fork(
        self, size: int = 1, position_ids_offset: Sequence[int] | None = None
    ) -> "ProgramStateGroup[ProgramState]":
        """Makes states that begin as this one is now and run side by side. Waits for nothing."""
        children = self._stream.fork(size, position_ids_offset, program_place())
        states = [ProgramState(child, self._run) for child in children]
        return ProgramStateGroup(states, lambda mode: self._stream.join(children, mode, program_place()))

    # Reading.

    @property
    def ret_value(self) -> Any:
        """What the program returned; waits for it. None inside the program itself.

        Raises:
            Exception: The body raised it.
        """
        return None if self._run.is_in_body() else self._wait(self._run.returned)

    async def aret_value(self) -> Any:
        """Gives the same as `ret_value`, for tasks."""
        return None if self._run.is_in_body() else await self._get(self._run.returned)

    def __await__(self) -> Generator[Any, None, Self]:
        return self._at_end().__await__()

    async def _at_end(self) -> Self:
        try:
            await self._run.ended.done()
            await self._run.settle()
        except asyncio.CancelledError:
            self._run.cancel()
            raise
        if self._run.body_error is not None:
            self._told(self._run.body_error)
            raise self._run.body_error
        return self

    def cancel(self) -> None:
        """Aborts what this state and its forks have under way; of the program's own state, the whole program."""
        if self._stream is self._run.stream:
            self._run.cancel()
        else:
            self._stream.cancel()

    @contextlib.contextmanager
    def _expected(self, name: str) -> Iterator[Variable]:
        if self._run.is_in_body():  # nothing else can set it while the body waits
            yield known(self._stream.variable(name))
            return
        expected = self._stream.expect(name, self._run.body_error)
        try:
            yield expected
        finally:
            self._stream.forget(expected)

    def _read(self, what: What) -> Variable:
        if not self._is_callers:
            return self._stream.read(what)
        read = Variable()
        ended = self._run.all_done() if what == "nothing" else self._run.ended
        ended.when_done(lambda: read.finish_as(self._stream.read(what)))
        return read

    def _log(self) -> tuple[Variable, Variable | None]:
        return self._stream.log, self._stream.read("size") if self._run.is_in_body() else None

    def _failure(self) -> BaseException | None:
        return self._stream.runner.failure or self._run.body_error

    def _everything(self) -> Variable:
        return self._stream.read("nothing") if self._run.is_in_body() else self._run.all_ended()

    def _variables(self) -> Mapping[str, Variable]:
        return self._stream.variables

    def _text_log(self) -> Variable:
        return self._stream.log

    def _history(self) -> History:
        return self._run.history

    def _check_may_block(self) -> None:
        self._run.check_may_block()

    def _interrupt(self) -> None:
        self._run.cancel()
