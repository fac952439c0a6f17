"""The two places where a graph runs: this process, and a server that is sent the whole graph."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, Protocol, final

from jsg.errors import AbortedError, BackendError, UnknownVariableError
from jsg.lang.executor.execution import Execution
from jsg.lang.executor.reading import GraphState
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import TextValue
from jsg.lang.http.errors import failure_in_stream
from jsg.lang.program.reading import What
from jsg.lang.streams.history import History
from jsg.lang.streams.loop import Loop
from jsg.lang.streams.variables import Variable


class GraphBackend(Protocol):
    """A backend that runs whole graphs."""

    def run_graph(
        self,
        graph: Mapping[str, Any],
        arguments: Mapping[str, Any],
        *,
        stream: bool = False,
        sampling_params: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[dict[str, Any]]:
        """Sends a graph, which the server runs. Closing the iterator early cancels the program.

        Yields:
            With `stream` {"variable": name, "delta": text} and {"text": text}; at the end {"result": what
            `ProgramRun.result` gives}.
        """
        ...


@final
class LocalState(GraphState):
    """A run in this process."""

    def __init__(self, execution: Execution) -> None:
        log, history = execution.stream.log, execution.stream.history
        super().__init__(execution.outputs, execution.returned, log, execution.ended, history, execution.graph)
        self._execution = execution

    def cancel(self) -> None:
        """Aborts what is under way."""
        self._execution.cancel()

    def _read(self, what: What) -> Variable:
        """Reads the prompt at the program's end; for "nothing" waits for all that the program started."""
        execution = self._execution
        if what == "nothing":
            return self._at_end()
        read = Variable()
        execution.submitted.when_done(lambda: read.finish_as(execution.stream.read(what)))
        return read

    def _failure(self) -> BaseException | None:
        return self._execution.stream.runner.failure or self.returned.error

    def _usage(self) -> dict[str, int]:
        return self._execution.usage()


@final
class RemoteState(GraphState):
    """A run on a server that was sent the whole graph."""

    def __init__(self, graph: Graph, loop: Loop) -> None:
        variables = {name: Variable() for name, _ in graph.block.outputs}
        super().__init__(variables, Variable(), Variable(), Variable(), History(), graph)
        self._texts = {name for name, value in graph.block.outputs if isinstance(value, TextValue)}
        self._loop = loop
        self._started: asyncio.Task[None] | None = None  # the loop itself references tasks weakly
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._leave: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._counts: dict[str, int] = {}
        self._calls: list[dict[str, Any]] = []
        self._answers: dict[What, Variable] = {"text": Variable(), "turns": Variable()}

    def start(
        self,
        backend: GraphBackend,
        graph: Mapping[str, Any],
        arguments: Mapping[str, Any],
        sampling_params: Mapping[str, Any],
        *,
        stream: bool,
    ) -> None:
        """Sends the graph and reads the answer, as a task. Must be called on the loop."""
        answers = backend.run_graph(graph, arguments, stream=stream, sampling_params=sampling_params)
        self._started = asyncio.get_running_loop().create_task(self._run(answers))

    def join_post(self, leave: Callable[[], None]) -> None:
        """Is called in place of `start` where one post has many runs. `leave` is called when this one is cancelled."""
        self._leave = leave

    def end_with(self, event: Mapping[str, Any] | BaseException) -> None:
        """Ends a run of many by its {"result": ...} or {"failure": ...}, or by an error. A second call does nothing."""
        if self.ended.is_done:
            return
        try:
            if isinstance(event, BaseException):
                raise event
            if "failure" in event:
                raise failure_in_stream(event["failure"])
            self._finish(event["result"])
        except Exception as error:
            self._fail(error)
        self.ended.finish(None)

    async def _run(self, answers: AsyncGenerator[dict[str, Any]]) -> None:
        self._task = asyncio.current_task()  # here: a task that is cancelled before it begins runs no `finally`
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
            self.ended.finish(None)

    def _take(self, event: Mapping[str, Any]) -> None:
        variable = self.variables.get(event.get("variable", ""))
        if variable is not None and "delta" in event:
            variable.add(event["delta"])
        elif variable is not None and variable.num_pieces and not event.get("failed"):
            if event["variable"] not in self._texts:
                return  # only the result says whether it is the text that has grown
            variable.finish("".join(variable.pieces()))  # its report comes with the result
        elif "text" in event:
            self.log.add(event["text"])
        if (result := event.get("result")) is not None:
            self._finish(result)

    def _finish(self, result: Mapping[str, Any]) -> None:
        _make_tuples(result)
        errors = [_error(error) for error in result["errors"]]
        failed = result["failed"]
        ended_by = (failed["text"], failed["return_value"])
        for number, error in enumerate(errors):
            # A variable that only the other side of a `cond` sets is no failure of the run.
            if number in ended_by or not isinstance(error, UnknownVariableError):
                self._fails_with(error)
        self._counts = dict(result["usage"])
        self._calls = list(result.get("timeline", ()))  # servers of earlier versions send none
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
            error = self._error = errors[failed["text"]]
            for variable in (self._answers["text"], self._answers["turns"], self.log):
                variable.fail(error)
        else:
            self._answers["text"].finish(result["text"])
            self._answers["turns"].finish(result["messages"])
            if not self.log.num_pieces:
                self.log.add(result["text"])
            self.log.finish(None)
        if failed["return_value"] is not None:
            self._error = self._error or errors[failed["return_value"]]
            self.returned.fail(errors[failed["return_value"]])
        else:
            self.returned.finish(result["return_value"])

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._fails_with(error)
        for variable in (
            *self.variables.values(),
            self.returned,
            self._answers["text"],
            self._answers["turns"],
            self.log,
        ):
            variable.fail(error)

    def cancel(self) -> None:
        """Has the server abort the run, by closing the connection."""
        self._loop.post(self._cancel)

    def _fails_with(self, error: BaseException) -> None:
        self._history().failed(error)

    def _read(self, what: What) -> Variable:
        return self._at_end() if what == "nothing" else self._answers[what]

    def _reported(self, variable: Variable) -> Variable:
        """A server sends the report of a variable that grew at the end of the run."""
        return variable if variable.meta is not None else self.ended

    def _failure(self) -> BaseException | None:
        return self._error

    def _usage(self) -> dict[str, int]:
        return self._counts

    def _timeline(self) -> list[dict[str, Any]]:
        return self._calls

    def _cancel(self) -> None:
        self._is_cancelled = True
        if self._task is not None and not self.ended.is_done:
            self._task.cancel()
        if self._leave is not None:
            self.end_with(AbortedError("the program was cancelled"))
            self._leave()


def _make_tuples(result: Mapping[str, Any]) -> None:
    """Makes tuples of the lists in an answer that are tuples in the program; JSON has none."""
    for *path, last in sorted(result.get("tuples", ()), key=len, reverse=True):
        holder: Any = result
        for step in path:
            holder = holder[step]
        holder[last] = tuple(holder[last])


def _error(failure: Mapping[str, Any]) -> BaseException:
    if failure["type"] == UnknownVariableError.__name__:
        error: BaseException = UnknownVariableError(failure["message"])
    else:
        error = failure_in_stream(failure)
    error.add_note(f"in the program: {failure['file']}:{failure['line']}")
    return error
