"""The state of a run of a compiled program, wherever the program runs."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, final

from jsg.errors import ProgramError, UnknownVariableError
from jsg.lang.graphs.graph import Graph
from jsg.lang.program.reading import RunState, What, check_may_block
from jsg.lang.program.run import is_async_body_here
from jsg.lang.streams.history import History, usage_of
from jsg.lang.streams.loop import shared_loop
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable, gather


class GraphState(RunState):
    """A run of a compiled program. Reads give the values that the program has at its end.

    Attributes:
        variables: The variables that the program leaves, by name, from the beginning of the run on.
        returned: What the program returns.
        log: The text as it grows.
        ended: Is done at the end of the run.
    """

    def __init__(
        self,
        variables: dict[str, Variable],
        returned: Variable,
        log: Variable,
        ended: Variable,
        history: History,
        graph: Graph | None = None,
    ) -> None:
        self.variables = variables
        self.returned = returned
        self.log = log
        self.ended = ended
        self._noted = history
        self._graph = graph

    @property
    def ret_value(self) -> Any:
        """What the program returned.

        Raises:
            ProgramError: It is the state of a called program, of which a graph keeps only text and variables.
            JsgError: The error that kept the value from being known.
        """
        return self._wait(self.returned)

    async def aret_value(self) -> Any:
        """Gives the same as `ret_value`, for tasks."""
        return await self._get(self.returned)

    def keys(self) -> list[str]:
        """Gives the names of the variables that the run sets. Waits for those that only one side of a `cond` sets."""
        for name in self._graph.perhaps_unset() if self._graph is not None else ():
            self._wait_done(self.variables[name])
        return super().keys()

    def _expected(self, name: str) -> AbstractContextManager[Variable]:
        names = ", ".join(map(repr, self.variables)) or "none"
        raise UnknownVariableError(f"the program does not set a variable {name!r}; at its end it has {names}")

    def _log(self) -> tuple[Variable, Variable | None]:
        return self.log, None

    def _at_end(self) -> Variable:
        """Gives a variable that is done at the end of the run. It fails where the run has failed."""
        read = Variable()

        def end() -> None:
            error = self._failure()
            read.finish(None) if error is None else read.fail(error)

        self.ended.when_done(end)
        return read

    def _history(self) -> History:
        return self._noted

    def _everything(self) -> Variable:
        return self.ended

    def _known(self, name: str) -> Variable | None:
        return self.variables.get(name)

    def _variables(self) -> Mapping[str, Variable]:
        """Leaves out those that the run did not set on its way."""
        kept = self.variables.items()
        return {name: variable for name, variable in kept if not isinstance(variable.error, UnknownVariableError)}

    def _text_log(self) -> Variable:
        return self.log

    def _check_may_block(self) -> None:
        check_may_block(shared_loop().loop, is_async_body=is_async_body_here())

    def _interrupt(self) -> None:
        self.cancel()


@final
class CalledState(GraphState):
    """The state of a program that the graph's program called, as a value of the graph.

    Attributes:
        stream: The stream of the called program.
    """

    def __init__(self, stream: Stream, variables: dict[str, Variable]) -> None:
        returned = Variable()
        returned.fail(
            ProgramError(
                "of a called program's state a compiled program keeps the text and the variables, not what it "
                "returned, so there is no ret_value; keep or return the state's .ret_value itself, or beside it"
            )
        )
        super().__init__(variables, returned, stream.log, stream.ended, stream.history)
        self.stream = stream

    def cancel(self) -> None:
        """Aborts what the called program has under way."""
        self.stream.cancel()

    def _read(self, what: What) -> Variable:
        return self.stream.read(what)

    def _failure(self) -> BaseException | None:
        return self.stream.runner.failure

    def _everything(self) -> Variable:
        return gather([self.ended, *self.variables.values()])  # the usage is read from the reports of the variables

    def _usage(self) -> dict[str, int]:
        return usage_of(variable.meta for variable in self.variables.values())
