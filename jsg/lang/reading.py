"""What a state can be asked: of a program that is interpreted, that is traced, or that ran as a graph.

Each question has a form for threads, which blocks, and one for tasks, which is awaited. Both raise the error that kept
the answer from being known.
"""

import abc
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from typing import Any, Literal

from jsg.errors import ProgramError, UnknownVariableError
from jsg.lang.messages import messages_of
from jsg.lang.streams.variables import Variable

What = Literal["nothing", "text", "turns"]


class Readable(abc.ABC):
    """A state whose variables and text can be read; every state is one."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """The value of a variable.

        Raises:
            UnknownVariableError: The program does not set it.
            JsgError: What kept it from being known.
        """
        return self._wait(self._find(name))

    def text(self) -> str:
        """All text that was appended so far, what the model wrote included."""
        return self._wait(self._read("text"))

    def sync(self) -> None:
        """Waits until all that was appended so far is done. Raises nothing of what failed: see `error`."""
        done = self._read("nothing")
        try:
            self._wait(done)
        except Exception:
            if not done.is_done:  # it was not even waited for
                raise

    async def aget(self, name: str) -> Any:
        """As `get_var`, for tasks."""
        return await (await self._find_async(name)).get()

    async def atext(self) -> str:
        """As `text`, for tasks."""
        return await self._read("text").get()

    async def settle(self) -> None:
        """As `sync`, for tasks."""
        with contextlib.suppress(Exception):
            await self._read("nothing").get()

    def _find(self, name: str, timeout: float | None = None) -> Variable:
        if (variable := self._known(name)) is not None:
            return variable
        with self._expected(name) as expected:
            return self._wait(expected, timeout)

    async def _find_async(self, name: str) -> Variable:
        if (variable := self._known(name)) is not None:
            return variable
        with self._expected(name) as expected:
            return await expected.get()

    @abc.abstractmethod
    def _known(self, name: str) -> Variable | None:
        """The variable of a name that is set."""

    @abc.abstractmethod
    def _expected(self, name: str) -> AbstractContextManager[Variable]:
        """Will hold the variable of a name that is not set. Raises where nothing will set it."""

    @abc.abstractmethod
    def _read(self, what: What) -> Variable:
        """Something that is known when all is done that was appended so far."""

    @abc.abstractmethod
    def _wait(self, variable: Variable, timeout: float | None = None) -> Any:
        """The value of a variable; blocks the thread. Raises TimeoutError."""


class RunState(Readable):
    """A state of a program that runs, or ran."""

    __slots__ = ()

    @abc.abstractmethod
    def cancel(self) -> None:
        """Aborts what is under way."""

    def messages(self) -> list[dict[str, Any]]:
        """The turns so far: `role`, and `content`: text, or a list of parts in order where there are pictures, videos.

        With `separate_reasoning` the reasoning of a turn is its `reasoning_content`.
        """
        return messages_of(self._wait(self._read("turns")))

    def error(self) -> BaseException | None:
        """Waits as `sync`; gives what ended this state or the program early, or None."""
        self.sync()
        return self._failure()

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any]:
        """What the backend reported of the call that set a variable.

        Raises:
            TimeoutError: It was not known within `timeout` seconds.
            UnknownVariableError: No call set it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        variable = self._find(name, timeout)
        for awaited in (variable, self._reported(variable)):
            self._wait(awaited, None if deadline is None else max(0.0, deadline - time.monotonic()))
        return _meta(name, variable)

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Text as it comes, of a variable or of everything; ends with that. Inside the program: up to here.

        Raises:
            JsgError: What kept the rest from coming.
        """
        self._check_may_block()
        try:
            if var_name is not None:
                variable = self._find(var_name)
                yield from variable.follow()
                _check_text(var_name, variable)
            else:
                log, end = self._log()
                yield from log.follow(end)
        except KeyboardInterrupt:
            self._interrupt()
            raise

    async def amessages(self) -> list[dict[str, Any]]:
        """As `messages`, for tasks."""
        return messages_of(await self._read("turns").get())

    async def aerror(self) -> BaseException | None:
        """As `error`, for tasks."""
        await self.settle()
        return self._failure()

    async def aget_meta_info(self, name: str) -> dict[str, Any]:
        """As `get_meta_info`, for tasks."""
        variable = await self._find_async(name)
        await variable.get()
        await self._reported(variable).get()
        return _meta(name, variable)

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As `text_iter`, for tasks.

        Args:
            var_name: Which variable; everything where None.
            return_meta_data: Gives pairs of text and what `get_meta_info` gives: empty until the last pair.
        """
        if var_name is None:
            if return_meta_data:
                raise ProgramError("return_meta_data needs the name of a variable")
            log, end = self._log()
            async for piece in log.follow_async(end):
                yield piece
            return
        variable = await self._find_async(var_name)
        async for piece in variable.follow_async():
            yield (piece, {}) if return_meta_data else piece
        _check_text(var_name, variable)
        if return_meta_data:
            await self._reported(variable).get()
            yield "", variable.meta or {}

    def _wait(self, variable: Variable, timeout: float | None = None) -> Any:
        if not variable.is_done:
            self._check_may_block()
        try:
            return variable.wait(timeout)
        except KeyboardInterrupt:
            self._interrupt()
            raise

    @abc.abstractmethod
    def _check_may_block(self) -> None:
        """Raises ProgramError where a wait would keep the event loop from what is waited for."""

    @abc.abstractmethod
    def _interrupt(self) -> None:
        """Aborts the whole run, as whoever waited for a part of it was interrupted."""

    @abc.abstractmethod
    def _log(self) -> tuple[Variable, Variable | None]:
        """All text as it grows, and what tells where reading it ends; None at its end."""

    @abc.abstractmethod
    def _failure(self) -> BaseException | None:
        """What ended it early, as far as that has happened."""

    @abc.abstractmethod
    def _reported(self, variable: Variable) -> Variable:
        """What is done when all is known that is reported of a variable that is done."""


def _check_text(name: str, variable: Variable) -> None:
    """Raises ProgramError for what had no text to give: a value that is none."""
    if not variable.num_pieces and not isinstance(variable.now(), str):
        raise ProgramError(f"only text can be iterated, but {name!r} is a {type(variable.now()).__name__}")


def _meta(name: str, variable: Variable) -> dict[str, Any]:
    if variable.meta is None:
        raise UnknownVariableError(f"{name!r} was not set by a call of the model, so nothing is reported about it")
    return variable.meta
