"""The two places where a graph runs: this process, and a server that is sent the whole."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from jsg.errors import AbortedError, BackendError, UnknownVariableError
from jsg.lang.executor.execution import Execution
from jsg.lang.executor.posted import usage
from jsg.lang.executor.reading import after
from jsg.lang.graphs.graph import Graph
from jsg.lang.http.errors import failure_in_stream
from jsg.lang.reading import What
from jsg.lang.streams.loop import Loop
from jsg.lang.streams.variables import Variable


class GraphBackend(Protocol):
    """A backend that runs graphs itself."""

    def run_graph(
        self,
        graph: Mapping[str, Any],
        arguments: Mapping[str, Any],
        *,
        stream: bool = False,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[dict[str, Any]]:
        """Sends a graph and runs it there; closing it early cancels the program.

        Yields:
            With `stream` {"variable": name, "delta": text}; last {"result": what `ProgramRun.result` gives}.
        """
        ...


class LocalRun:
    """A run in this process; the `Readings` of its state."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self.variables = execution.outputs
        self.returned = execution.returned
        self.log = execution.stream.log

    def read(self, what: What) -> Variable:
        """Of the program's prompt, at the end; "nothing" is the end of all that it started."""
        execution = self._execution
        return execution.ended if what == "nothing" else after(execution.submitted, lambda: execution.stream.read(what))

    def reported(self, variable: Variable) -> Variable:
        """A variable brings what is reported of it."""
        return variable

    def failure(self) -> BaseException | None:
        """What ended the program's own stream early, or kept it from returning."""
        execution = self._execution
        return execution.stream.runner.failure or execution.returned.error

    def usage(self) -> dict[str, int]:
        """Calls and tokens."""
        return usage(self._execution)

    def cancel(self) -> None:
        """Aborts what is under way."""
        self._execution.cancel()


class RemoteRun:
    """A run on a server that was sent the whole; the `Readings` of its state."""

    def __init__(self, graph: Graph, loop: Loop) -> None:
        self._loop = loop
        self._started: asyncio.Task[None] | None = None  # kept here, for the loop itself holds tasks weakly
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._failure: BaseException | None = None
        self._usage: dict[str, int] = {}
        self._read: dict[What, Variable] = {"text": Variable(), "turns": Variable(), "nothing": Variable()}
        self.variables = {name: Variable() for name, _ in graph.block.outputs}
        self.returned = Variable()
        self.log = Variable()

    def start(
        self,
        backend: GraphBackend,
        graph: Mapping[str, Any],
        arguments: Mapping[str, Any],
        sampling_params: Mapping[str, Any],
        *,
        stream: bool,
    ) -> None:
        """Sends it and takes in what comes, as a task; must be called on the loop."""
        answers = backend.run_graph(graph, arguments, stream=stream, sampling_params=sampling_params)
        self._started = asyncio.get_running_loop().create_task(self._run(answers))

    async def _run(self, answers: AsyncGenerator[dict[str, Any]]) -> None:
        self._task = asyncio.current_task()  # not before it runs: a task that is cancelled sooner has no `finally`
        try:
            if self._is_cancelled:
                raise AbortedError("the program was cancelled")
            async with contextlib.aclosing(answers) as events:
                async for event in events:
                    self._take(event)
            if not self.returned.is_done:
                raise BackendError("the server ended its answer without the program's result")
        except asyncio.CancelledError:
            self._fail(AbortedError("the program was cancelled"))
        except Exception as error:
            self._fail(error)
        finally:
            self._read["nothing"].finish(None)

    def _take(self, event: Mapping[str, Any]) -> None:
        variable = self.variables.get(event.get("variable", ""))
        if variable is not None and "delta" in event:
            variable.add(event["delta"])
        elif variable is not None and variable.num_pieces and not event.get("failed"):
            variable.finish("".join(variable.pieces_between(0)))  # what is reported of it comes with the result
        if (result := event.get("result")) is not None:
            self._finish(result)

    def _finish(self, result: Mapping[str, Any]) -> None:
        errors = [_error(error) for error in result["errors"]]
        failed = result["failed"]
        self._usage = dict(result["usage"])
        for name, variable in self.variables.items():
            if name in failed["variables"]:
                variable.fail(errors[failed["variables"][name]])
                continue
            value = result["variables"][name]
            if isinstance(value, str) and not variable.num_pieces:
                variable.add(value)
            variable.finish(value)
            variable.meta = result["meta_info"].get(name)
        if failed["text"] is not None:
            error = self._failure = errors[failed["text"]]
            for variable in (self._read["text"], self._read["turns"], self.log):
                variable.fail(error)
        else:
            self._read["text"].finish(result["text"])
            self._read["turns"].finish(result["messages"])
            self.log.add(result["text"])
            self.log.finish(None)
        if failed["return_value"] is not None:
            self._failure = self._failure or errors[failed["return_value"]]
            self.returned.fail(errors[failed["return_value"]])
        else:
            self.returned.finish(result["return_value"])

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for variable in (*self.variables.values(), self.returned, self._read["text"], self._read["turns"], self.log):
            variable.fail(error)

    def read(self, what: What) -> Variable:
        """As the server gave it; the turns are messages already."""
        return self._read[what]

    def reported(self, variable: Variable) -> Variable:
        """A server tells it at the end, of a variable that grew."""
        return variable if variable.meta is not None else self._read["nothing"]

    def failure(self) -> BaseException | None:
        """What ended the program early."""
        return self._failure

    def usage(self) -> dict[str, int]:
        """Calls and tokens, as the server counted them."""
        return self._usage

    def cancel(self) -> None:
        """Has the server abort it, by closing the connection."""
        self._loop.post(self._cancel)

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None and not self._read["nothing"].is_done:
            self._task.cancel()


def _error(failure: Mapping[str, Any]) -> BaseException:
    if failure["type"] == UnknownVariableError.__name__:
        error: BaseException = UnknownVariableError(failure["message"])
    else:
        error = failure_in_stream(failure)
    error.add_note(f"in the program: {failure['file']}:{failure['line']}")
    return error
