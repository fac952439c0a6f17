"""What a run of a compiled program can be asked: as `ProgramState`, as far as reading goes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

from jsg.errors import ProgramError, UnknownVariableError
from jsg.lang.streams.loop import shared_loop
from jsg.lang.streams.variables import Variable


class Readings(Protocol):
    """Where a run keeps what came of it; all may be read from any thread."""

    variables: dict[str, Variable]
    """By name, from the beginning on."""
    returned: Variable
    log: Variable
    """Text as it grows."""
    ended: Variable

    def text(self) -> Variable:
        """All text, at the end."""
        ...

    def messages(self) -> Variable:
        """The turns as messages, at the end."""
        ...

    def shown(self, value: Any) -> Any:
        """A variable's value as readers get it."""
        ...

    def failure(self) -> BaseException | None:
        """What ended the program early; known when it has ended."""
        ...

    def usage(self) -> dict[str, int]:
        """Calls and tokens; known when it has ended."""
        ...

    def cancel(self) -> None:
        """Aborts what is under way."""
        ...


class GraphState:
    """A run of a compiled program.

    Reading waits for what is read, and raises the error that kept it from being known.
    """

    def __init__(self, readings: Readings) -> None:
        self._readings = readings

    # In threads.

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def __contains__(self, name: object) -> bool:
        return name in self._readings.variables

    def get_var(self, name: str) -> Any:
        """The value that a variable has at the program's end.

        Raises:
            UnknownVariableError: The program does not set it.
            JsgError: What kept it from being known.
        """
        return self._readings.shown(self._wait(self._find(name)))

    def text(self) -> str:
        """All text of the program's prompt, what the model wrote included."""
        return self._wait(self._readings.text())

    def messages(self) -> list[dict[str, Any]]:
        """The turns of the program's prompt, as `ProgramState.messages` gives them."""
        return self._wait(self._readings.messages())

    @property
    def ret_value(self) -> Any:
        """What the program returned.

        Raises:
            ProgramError: It is the state of a called program, of which a graph keeps only text and variables.
            JsgError: What kept it from being known.
        """
        return self._wait(self._readings.returned)

    def sync(self) -> None:
        """Waits for the end. Raises nothing of what failed: see `error`."""
        self._wait(self._readings.ended)

    def error(self) -> BaseException | None:
        """Waits for the end; gives what ended the program early, or None."""
        self.sync()
        return self._readings.failure()

    def usage(self) -> dict[str, int]:
        """Waits for the end; gives `calls`, `prompt_tokens`, `completion_tokens` and `cached_tokens` of all calls."""
        self.sync()
        return self._readings.usage()

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any]:
        """What the backend reported of the call that set a variable.

        Raises:
            TimeoutError: It was not known within `timeout` seconds.
            UnknownVariableError: No call set it.
        """
        variable = self._find(name)
        self._wait(variable, timeout)
        if variable.meta is None:  # a server reports at the end
            self._wait(self._readings.ended, timeout)
        return _meta(name, variable)

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Text as it comes, of a variable or of the program's prompt."""
        variable = self._readings.log if var_name is None else self._find(var_name)
        self._check_may_block(variable)
        yield from variable.follow()

    # In tasks of any event loop.

    async def aget(self, name: str) -> Any:
        """As `get_var`, for tasks."""
        return self._readings.shown(await self._find(name).get())

    async def atext(self) -> str:
        """As `text`, for tasks."""
        return await self._readings.text().get()

    async def amessages(self) -> list[dict[str, Any]]:
        """As `messages`, for tasks."""
        return await self._readings.messages().get()

    async def aret_value(self) -> Any:
        """As `ret_value`, for tasks."""
        return await self._readings.returned.get()

    async def settle(self) -> None:
        """As `sync`, for tasks."""
        await self._readings.ended.get()

    async def aerror(self) -> BaseException | None:
        """As `error`, for tasks."""
        await self.settle()
        return self._readings.failure()

    async def aget_meta_info(self, name: str) -> dict[str, Any]:
        """As `get_meta_info`, for tasks."""
        variable = self._find(name)
        await variable.get()
        if variable.meta is None:
            await self._readings.ended.get()
        return _meta(name, variable)

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As `text_iter`, for tasks.

        Args:
            var_name: Which variable; the program's prompt where None.
            return_meta_data: Gives pairs of text and what `get_meta_info` gives: empty until the last pair.
        """
        if var_name is None and return_meta_data:
            raise ProgramError("return_meta_data needs the name of a variable")
        variable = self._readings.log if var_name is None else self._find(var_name)
        async for piece in variable.follow_async():
            yield (piece, {}) if return_meta_data else piece
        if return_meta_data:
            if variable.meta is None:
                await self._readings.ended.get()
            yield "", variable.meta or {}

    def cancel(self) -> None:
        """Aborts what is under way."""
        self._readings.cancel()

    def _find(self, name: str) -> Variable:
        variable = self._readings.variables.get(name)
        if variable is None:
            names = ", ".join(map(repr, self._readings.variables)) or "none"
            raise UnknownVariableError(f"the program does not set a variable {name!r}; at its end it has {names}")
        return variable

    def _wait(self, variable: Variable, timeout: float | None = None) -> Any:
        self._check_may_block(variable)
        try:
            return variable.wait(timeout)
        except KeyboardInterrupt:
            self.cancel()
            raise

    def _check_may_block(self, variable: Variable) -> None:
        if not variable.is_done and asyncio._get_running_loop() is shared_loop().loop:
            raise ProgramError(
                "reading waits, and would stop the event loop on which programs run: use `aget`, `atext`"
            )


def mapped(source: Variable, change: Callable[[Any], Any]) -> Variable:
    """A variable that holds what `change` makes of another one's value."""
    made = Variable(source.want)

    def fill() -> None:
        if source.error is not None:
            made.fail(source.error)
        else:
            made.finish(change(source.now()), source.meta)

    source.when_done(fill)
    return made


def after(first: Variable, make: Callable[[], Variable]) -> Variable:
    """What another variable, made when `first` is done, holds."""
    made = Variable()

    def fill(second: Variable) -> None:
        if second.error is not None:
            made.fail(second.error)
        else:
            made.finish(second.now(), second.meta)

    def begin() -> None:
        second = make()
        second.when_done(lambda: fill(second))

    first.when_done(begin)
    return made


def _meta(name: str, variable: Variable) -> dict[str, Any]:
    if variable.meta is None:
        raise UnknownVariableError(f"{name!r} was not set by a call of the model, so nothing is reported about it")
    return variable.meta
