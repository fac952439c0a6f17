"""The state of a run of a compiled program, wherever that runs."""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, final

from jsg.errors import ProgramError, UnknownVariableError
from jsg.lang.reading import RunState, What
from jsg.lang.streams.loop import shared_loop
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable


class Readings(Protocol):
    """Where a run keeps what came of it; all may be read from any thread."""

    variables: dict[str, Variable]
    """By name, from the beginning on."""
    returned: Variable
    log: Variable
    """Text as it grows."""

    def read(self, what: What) -> Variable:
        """Something that is known at the end."""
        ...

    def reported(self, variable: Variable) -> Variable:
        """What is done when all is known that is reported of a variable that is done."""
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


@final
class GraphState(RunState):
    """A run of a compiled program. What is read has the values of the program's end.

    Attributes:
        readings: Where the run keeps them.
    """

    def __init__(self, readings: Readings) -> None:
        self.readings = readings

    def __contains__(self, name: object) -> bool:
        return name in self.readings.variables

    @property
    def ret_value(self) -> Any:
        """What the program returned.

        Raises:
            ProgramError: It is the state of a called program, of which a graph keeps only text and variables.
            JsgError: What kept it from being known.
        """
        return self._wait(self.readings.returned)

    async def aret_value(self) -> Any:
        """As `ret_value`, for tasks."""
        return await self.readings.returned.get()

    def usage(self) -> dict[str, int]:
        """Waits for the end; gives `calls`, `prompt_tokens`, `completion_tokens` and `cached_tokens` of all calls."""
        self.sync()
        return self.readings.usage()

    def cancel(self) -> None:
        """Aborts what is under way."""
        self.readings.cancel()

    def _known(self, name: str) -> Variable | None:
        return self.readings.variables.get(name)

    def _expected(self, name: str) -> AbstractContextManager[Variable]:
        names = ", ".join(map(repr, self.readings.variables)) or "none"
        raise UnknownVariableError(f"the program does not set a variable {name!r}; at its end it has {names}")

    def _read(self, what: What) -> Variable:
        return self.readings.read(what)

    def _log(self) -> tuple[Variable, Variable | None]:
        return self.readings.log, None

    def _reported(self, variable: Variable) -> Variable:
        return self.readings.reported(variable)

    def _failure(self) -> BaseException | None:
        return self.readings.failure()

    def _check_may_block(self) -> None:
        if asyncio._get_running_loop() is shared_loop().loop:
            raise ProgramError(
                "reading waits, and would stop the event loop on which programs run: use `aget`, `atext`"
            )

    def _interrupt(self) -> None:
        self.cancel()


class CalledRun:
    """The part of a run that belongs to a program which the graph's program called; the `Readings` of its state.

    Attributes:
        stream: The called program's own.
    """

    def __init__(self, stream: Stream, variables: dict[str, Variable]) -> None:
        self.stream = stream
        self.variables = variables
        self.returned = Variable()
        self.returned.fail(
            ProgramError(
                "of a called program's state a compiled program keeps the text and the variables, not what it "
                "returned, so there is no ret_value; keep or return the state's .ret_value itself, or beside it"
            )
        )
        self.log = stream.log

    def read(self, what: What) -> Variable:
        """Of its prompt."""
        return self.stream.read(what)

    def reported(self, variable: Variable) -> Variable:
        """A variable brings what is reported of it."""
        return variable

    def failure(self) -> BaseException | None:
        """What ended it early."""
        return self.stream.runner.failure

    def usage(self) -> dict[str, int]:
        """What is known of the calls that set its variables."""
        metas = [variable.meta for variable in self.variables.values() if variable.meta is not None]
        names = ("prompt_tokens", "completion_tokens", "cached_tokens")
        return {"calls": len(metas)} | {name: sum(int(meta.get(name) or 0) for meta in metas) for name in names}

    def cancel(self) -> None:
        """Aborts what it has under way."""
        self.stream.cancel()


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
