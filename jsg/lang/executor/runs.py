"""The two places where a graph runs: this process, and a server that is sent the whole."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from jsg.errors import AbortedError, BackendError, ProgramError, UnknownVariableError
from jsg.lang.executor.execution import Execution
from jsg.lang.executor.frames import CalledState
from jsg.lang.executor.posted import failures, usage
from jsg.lang.executor.reading import GraphState, after, mapped
from jsg.lang.graphs.graph import Graph
from jsg.lang.http.errors import failure_in_stream
from jsg.lang.state import messages_of
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
        self.returned = mapped(execution.returned, readable)
        self.log = execution.stream.log
        self.ended = execution.ended

    def text(self) -> Variable:
        """All text, at the end."""
        return after(self._execution.submitted, lambda: self._execution.stream.read("text"))

    def messages(self) -> Variable:
        """The turns as messages, at the end."""
        return mapped(after(self._execution.submitted, lambda: self._execution.stream.read("turns")), messages_of)

    def shown(self, value: Any) -> Any:
        """States of called programs as states that can be read."""
        return readable(value)

    def failure(self) -> BaseException | None:
        """What ended the program's own stream early, or kept it from returning."""
        execution = self._execution
        return execution.stream.runner.failure or execution.returned.error

    def usage(self) -> dict[str, int]:
        """Calls and tokens."""
        return usage(self._execution)

    def num_failures(self) -> int:
        """Errors, each counted once, those of branches included."""
        return len(failures(self._execution))

    def cancel(self) -> None:
        """Aborts what is under way."""
        self._execution.cancel()


class CalledRun:
    """The part of a run that belongs to a program which the graph's program called; the `Readings` of its state."""

    def __init__(self, state: CalledState) -> None:
        self._stream = state.stream
        self.variables = state.variables
        self.returned = Variable()
        self.returned.fail(
            ProgramError(
                "of a called program's state a compiled program keeps the text and the variables, not what it "
                "returned, so there is no ret_value; keep or return the state's .ret_value itself, or beside it"
            )
        )
        self.log = state.stream.log
        self.ended = state.stream.read("nothing")

    def text(self) -> Variable:
        """All text of its prompt."""
        return self._stream.read("text")

    def messages(self) -> Variable:
        """Its turns as messages."""
        return mapped(self._stream.read("turns"), messages_of)

    def shown(self, value: Any) -> Any:
        """States of called programs as states that can be read."""
        return readable(value)

    def failure(self) -> BaseException | None:
        """What ended it early."""
        return self._stream.runner.failure

    def usage(self) -> dict[str, int]:
        """What is known of the calls that set its variables."""
        metas = [variable.meta for variable in self.variables.values() if variable.meta is not None]
        names = ("prompt_tokens", "completion_tokens", "cached_tokens")
        return {"calls": len(metas)} | {name: sum(int(meta.get(name) or 0) for meta in metas) for name in names}

    def cancel(self) -> None:
        """Aborts what it has under way."""
        self._stream.cancel()


class RemoteRun:
    """A run on a server that was sent the whole; the `Readings` of its state."""

    def __init__(self, graph: Graph, loop: Loop) -> None:
        self._loop = loop
        self._started: asyncio.Task[None] | None = None  # kept here, for the loop itself holds tasks weakly
        self._task: asyncio.Task[None] | None = None
        self._is_cancelled = False
        self._failure: BaseException | None = None
        self._usage: dict[str, int] = {}
        self._text = Variable()
        self._messages = Variable()
        self.variables = {name: Variable() for name, _ in graph.block.outputs}
        self.returned = Variable()
        self.log = Variable()
        self.ended = Variable()

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
            self.ended.finish(None)

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
            for variable in (self._text, self._messages, self.log):
                variable.fail(error)
        else:
            self._text.finish(result["text"])
            self._messages.finish(result["messages"])
            self.log.add(result["text"])
            self.log.finish(None)
        if failed["return_value"] is not None:
            self._failure = self._failure or errors[failed["return_value"]]
            self.returned.fail(errors[failed["return_value"]])
        else:
            self.returned.finish(result["return_value"])

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        for variable in (*self.variables.values(), self.returned, self._text, self._messages, self.log):
            variable.fail(error)

    def text(self) -> Variable:
        """All text, at the end."""
        return self._text

    def messages(self) -> Variable:
        """The turns as messages, at the end."""
        return self._messages

    def shown(self, value: Any) -> Any:
        """As the server gave it."""
        return value

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
        if self._task is not None and not self.ended.is_done:
            self._task.cancel()


def readable(value: Any, made: dict[int, Any] | None = None) -> Any:
    """What a program returned, states of called programs as states that can be read.

    Args:
        value: The value.
        made: By id what was made of parts of it: what it names twice is one thing afterwards, too.
    """
    made = {} if made is None else made
    if id(value) not in made:
        match value:
            case CalledState():
                made[id(value)] = GraphState(CalledRun(value))
            case list():
                made[id(value)] = [readable(item, made) for item in value]
            case dict():
                made[id(value)] = {key: readable(item, made) for key, item in value.items()}
            case _:
                return value
    return made[id(value)]


def _error(failure: Mapping[str, Any]) -> BaseException:
    if failure["type"] == UnknownVariableError.__name__:
        error: BaseException = UnknownVariableError(failure["message"])
    else:
        error = failure_in_stream(failure)
    error.add_note(f"in the program: {failure['file']}:{failure['line']}")
    return error
