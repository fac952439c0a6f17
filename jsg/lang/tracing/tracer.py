"""Traces a program: runs its body once with symbols for the values of a run, and records what it appends.

All else that a body does happens once, during the trace, and never when the graph runs.
"""

import inspect
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from types import CoroutineType
from typing import Any

from jsg.errors import JsgError, ProgramError, TraceError
from jsg.lang.graphs.check import check_graph
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import MAIN_STREAM, AnyNode, Argument, ArgumentRef, Block, Open, Piece
from jsg.lang.tracing import scope
from jsg.lang.tracing.recorder import Recorder
from jsg.lang.tracing.symbols import ADVICE, program_line
from jsg.lang.tracing.traced_state import TracedState, value_of
from jsg.lang.words.ir import SamplingArgs


def trace(program: Any, constants: Mapping[str, Any] | None = None) -> Graph:
    """Gives the graph of a program.

    Args:
        program: An `SglFunction`.
        constants: The known arguments, whose values the body sees. Other arguments without a default become symbols,
            and a run must give them.

    Raises:
        TraceError: The body reads a value that only a run has, or does something that a graph cannot do. The message
            names file and line.
    """
    recorder = Recorder()
    arguments = _arguments(program, dict(constants or {}), recorder)
    tracing = Tracer(recorder)
    with scope.inside(tracing):
        state = tracing.call(program, (), arguments)
    outputs = state.outputs()
    graph = Graph(
        name=program.func.__name__,
        arguments=tuple(Argument(name, kind) for name, kind in recorder.arguments.items()),
        block=Block(tuple(recorder.nodes), outputs),
        returns=value_of(state.ret_value, recorder),
    )
    check_graph(graph)
    return graph


def opening(program: Any) -> tuple[AnyNode, ...]:
    """Gives the first nodes of every run of a program: all that a trace has up to where it can go no further.

    Raises:
        TraceError: It can go no further than the beginning.
    """
    recorder = Recorder()
    arguments = _arguments(program, {}, recorder)
    tracing = Tracer(recorder)
    try:
        with scope.inside(tracing):
            tracing.call(program, (), arguments)
    except TraceError:
        if all(isinstance(node, Open) for node in recorder.nodes):
            raise
    return tuple(recorder.nodes)


def _arguments(program: Any, constants: dict[str, Any], recorder: Recorder) -> dict[str, Any]:
    _, *parameters = inspect.signature(program.func).parameters.values()
    given: dict[str, Any] = {**program.bound, **constants}
    if unknown := sorted(set(constants) - {parameter.name for parameter in parameters}):
        raise TraceError(f"{program.func.__name__} has no parameter {unknown[0]!r}, but it was given as a constant")
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TraceError(
                f"{program.func.__name__} takes {parameter}, which a graph cannot: a program to compile names its "
                "parameters"
            )
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise TraceError(f"{program.func.__name__} takes {parameter.name!r} by position only, which a graph cannot")
        if parameter.name not in given and parameter.default is parameter.empty:
            recorder.arguments[parameter.name] = "text"
            given[parameter.name] = recorder.symbols.symbol(ArgumentRef(parameter.name))
    return given


class Tracer:
    """A trace under way: the `Tracing` of `scope`."""

    def __init__(self, recorder: Recorder) -> None:
        self.has_ended = False
        self._recorder = recorder

    def pieces(self, value: Any) -> tuple[Piece, ...]:
        """Gives the pieces of a text, as `Recorder.pieces` does."""
        return self._recorder.pieces(value)

    def call(
        self,
        program: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        defaults: SamplingArgs | None = None,
    ) -> TracedState:
        """Traces a program on a stream of its own, as `scope.Tracing.call` says."""
        recorder = self._recorder
        stream = recorder.new_stream()
        code, name = program.func.__code__, program.func.__name__
        line = f"{Path(code.co_filename).name}:{code.co_firstlineno}" if stream == MAIN_STREAM else program_line()
        spec, number = program.num_api_spec_tokens, recorder.next_id()
        recorder.emit(
            Open(id=number, stream=stream, line=line, program=name, defaults=defaults, num_api_spec_tokens=spec)
        )
        state = TracedState(recorder, stream)
        bound = inspect.signature(program.func).bind(state, *args, **{**program.bound, **kwargs})
        state.ret_value = _run_body(program.func, bound)
        return state


def _run_body(func: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
    try:
        result = func(*bound.args, **bound.kwargs)
        return _finish(result) if type(result) is CoroutineType else result
    except ProgramError as error:
        raise TraceError(f"{error}, at {_raised_at(error, func)}") from error
    except JsgError:
        raise
    except Exception as error:
        raise TraceError(
            f"the program could not be traced, its body raised {type(error).__name__} at {_raised_at(error, func)}: "
            f"{error}; {ADVICE}"
        ) from error


def _finish(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Gives the result of an `async def` body, in which nothing waits during a trace."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    finally:
        coroutine.close()
    raise TraceError(
        f"{coroutine.__name__} awaits something that is not part of the program; a graph cannot keep that, so do it "
        "before, and give the program what came of it"
    )


def _raised_at(error: BaseException, func: Callable[..., Any]) -> str:
    """Gives the innermost line in the file of the program, or "?"."""
    place, inner = "?", error.__traceback__
    while inner is not None:
        path = inner.tb_frame.f_code.co_filename
        if path == func.__code__.co_filename:
            place = f"{Path(path).name}:{inner.tb_lineno}"
        inner = inner.tb_next
    return place
