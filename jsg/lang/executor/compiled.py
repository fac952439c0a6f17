"""Compiled programs: graphs, and the ways to run them."""

import asyncio
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast, final

from jsg.errors import ConfigError, ProgramError
from jsg.lang.executor.arguments import ArgumentValue, argument_value, arguments_to_json
from jsg.lang.executor.execution import Execution
from jsg.lang.executor.limits import MAX_FAN_OUT
from jsg.lang.executor.posts import AT_ONCE, Posts
from jsg.lang.executor.reading import GraphState
from jsg.lang.executor.runs import GraphBackend, LocalState, RemoteState
from jsg.lang.graphs.check import graph_from_json
from jsg.lang.graphs.codec import sampling_to_dict
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import (
    MAIN_STREAM,
    AnyNode,
    Append,
    ArgumentRef,
    Assign,
    Fork,
    Media,
    Open,
    ReadText,
    Scope,
    Turn,
)
from jsg.lang.graphs.reorder import reorder, varying_arguments
from jsg.lang.program.batch import Batchable, Items, Work, arguments_of, read_items
from jsg.lang.program.defaults import as_backend
from jsg.lang.program.run_args import RunArgs, Where, take_run_args
from jsg.lang.streams.history import History
from jsg.lang.streams.loop import shared_loop, wait_for
from jsg.lang.words.backend import Backend, BackendSource, HintSession, PromptItem
from jsg.lang.words.ir import RoleBegin, RoleEnd, SamplingArgs, Text
from jsg.lang.words.keywords import advice, unknown_in_batch


def cache_prefix(nodes: Iterable[AnyNode], backend: Backend) -> None:
    """Computes the constant beginning of all runs. Raises ConfigError where the backend keeps no prefixes."""
    prefix = constant_prefix(node for node in nodes if node.stream == MAIN_STREAM)

    async def compute() -> None:
        session = backend.open()
        try:
            if not hasattr(session, "hint"):
                raise ConfigError("cache() needs a backend that keeps prefixes: a jsg.Engine or a jsg server")
            for item in prefix:
                await session.extend(item)
            await cast(HintSession, session).hint()
        finally:
            await session.close()

    wait_for(shared_loop().submit(compute()))


def constant_prefix(nodes: Iterable[AnyNode]) -> tuple[PromptItem, ...]:
    """Gives what the nodes of a stream append before the first value that only a run knows.

    Args:
        nodes: The nodes of one stream, in program order.
    """
    items: list[PromptItem] = []
    for node in nodes:
        match node:
            case Append(pieces=pieces):
                known = list(itertools.takewhile(lambda piece: isinstance(piece, str), pieces))
                items += [Text(str(piece)) for piece in known]
                if len(known) < len(pieces):
                    break
            case Media(source=source) if not isinstance(source, ArgumentRef):
                items.append(source)
            case Turn(role=role, is_begin=is_begin):
                items.append(RoleBegin(role) if is_begin else RoleEnd(role))
            case Open() | Scope() | Assign() | ReadText():
                pass
            case _:
                break
    return tuple(items)


@final
class CompiledFunction(Batchable[GraphState]):
    """A program as a graph. It prints, draws, becomes JSON, and runs without its Python function.

    Attributes:
        graph: The graph.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._own = frozenset(argument.name for argument in graph.arguments)

    def __str__(self) -> str:
        return str(self.graph)

    def __repr__(self) -> str:
        return f"<compiled {self.graph.name}, {sum(1 for _ in self.graph.nodes())} nodes>"

    def to_dot(self) -> str:
        """Gives a drawing in the language of Graphviz."""
        return self.graph.to_dot()

    def to_json(self) -> str:
        """Gives the graph as JSON, which `from_json` reads and `POST /v1/programs` takes as `graph`."""
        return self.graph.to_json()

    @classmethod
    def from_json(cls, source: str | bytes | Mapping[str, Any]) -> "CompiledFunction":
        """Reads what `to_json` gives. Raises GraphError."""
        return cls(graph_from_json(source))

    def __call__(self, *args: Any, **kwargs: Any) -> GraphState:
        """Does the same as `run`."""
        return self.run(*args, **kwargs)

    def run(
        self,
        *args: Any,
        stream: bool = False,
        backend: Backend | BackendSource | None = None,
        where: Where = "auto",
        **kwargs: Any,
    ) -> GraphState:
        """Runs the program. Returns at once; reading the state waits.

        Args:
            *args: The arguments of the graph, in their order.
            stream: A server sends variables and the text as they grow. In this process they grow without it.
            backend: The backend; the default one where None.
            where: "server" sends the whole graph, "here" runs it in this process, call by call; "auto" sends it if the
                backend takes graphs (`jsg.RuntimeEndpoint`) and no fork has more branches than a server takes.
            **kwargs: Arguments by name, and the arguments of `RunArgs`.

        Raises:
            ProgramError: The arguments do not fit the graph.
            ConfigError: The backend takes no graphs and `where` is "server".
        """
        given, kwargs = take_run_args(kwargs, self._own)
        bound = self._bind(args, kwargs)
        return self._starter([bound], given, as_backend(backend), where, stream=stream)(bound)

    async def arun(
        self,
        *args: Any,
        stream: bool = False,
        backend: Backend | BackendSource | None = None,
        where: Where = "auto",
        **kwargs: Any,
    ) -> GraphState:
        """Does the same as `run`, but waits for the end unless `stream`. Cancelling the task cancels the program."""
        state = self.run(*args, stream=stream, backend=backend, where=where, **kwargs)
        return state if stream else await _settled(state)

    # Pieces of runs.

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, ArgumentValue]:
        names = [argument.name for argument in self.graph.arguments]
        if len(args) > len(names):
            raise ProgramError(f"{self.graph.name} takes {len(names)} arguments, but got {len(args)}")
        given = dict(zip(names, args, strict=False))
        if twice := sorted(given.keys() & kwargs.keys()):
            raise ProgramError(f"{self.graph.name} was given {twice[0]!r} twice")
        given |= kwargs
        if missing := [name for name in names if name not in given]:
            raise ProgramError(f"{self.graph.name} needs the argument {missing[0]!r}")
        _check_no_optimisations(given.keys() - set(names))
        if unknown := sorted(given.keys() - set(names)):
            what = advice(unknown, "run") or "; what was a constant when it was compiled stays one"
            raise ProgramError(f"{self.graph.name} takes {', '.join(names) or 'nothing'}, but got {unknown[0]!r}{what}")
        return {argument.name: argument_value(argument, given[argument.name]) for argument in self.graph.arguments}

    def _batch(
        self, items: Items, backend: Backend | BackendSource | None, options: dict[str, Any]
    ) -> Work[GraphState]:
        where: Where = options.pop("where", "auto")
        given, rest = take_run_args(options, self._own)
        _check_no_optimisations(rest)
        if rest:
            raise ProgramError(unknown_in_batch(rest, RunArgs.__annotations__))
        runs = read_items(items, lambda index, item: self._bind(*arguments_of(item, index)))
        is_read = isinstance(runs, list)
        start = self._starter(runs if is_read else None, given, as_backend(backend), where, is_batch=True)

        async def run_one(arguments: Mapping[str, ArgumentValue]) -> GraphState:
            return await _settled(start(arguments))

        starts = (functools.partial(run_one, arguments) for arguments in runs)
        auto = {"auto": AT_ONCE} if _is_sent(as_backend(backend), where, self.graph) else {}
        return Work(starts, len(runs) if is_read else None, **auto)

    def _starter(
        self,
        runs: Sequence[Mapping[str, ArgumentValue]] | None,
        given: SamplingArgs,
        backend: Backend,
        where: Where,
        *,
        stream: bool = False,
        is_batch: bool = False,
    ) -> Callable[[Mapping[str, ArgumentValue]], GraphState]:
        """Gives a function that starts a run and gives its state.

        Args:
            runs: The arguments of all runs, by which the parts of `unordered` are put in order; None if not known yet.
            given: The sampling arguments of the runs.
            backend: The backend.
            where: As in `run`.
            stream: As in `run`.
            is_batch: Whether many runs may go to a server in one post.
        """
        loop = shared_loop()
        if _is_sent(backend, where, self.graph):
            sent, graph, sampling = cast(GraphBackend, backend), self.graph.to_dict(), sampling_to_dict(given)
            posts = Posts(backend, graph, sampling) if is_batch and hasattr(backend, "run_graphs") else None

            def start_there(bound: Mapping[str, ArgumentValue]) -> GraphState:
                state, arguments = RemoteState(self.graph, loop), arguments_to_json(bound)
                if posts is None:
                    loop.post(lambda: state.start(sent, graph, arguments, sampling, stream=stream))
                else:
                    loop.post(functools.partial(posts.add, state, arguments))
                return state

            return start_there
        varying = () if runs is None else (varying_arguments(self.graph.arguments, runs),)
        reordered = reorder(self.graph, *varying)

        def start_here(bound: Mapping[str, ArgumentValue]) -> GraphState:
            execution = Execution(reordered, backend, bound, loop=loop, defaults=given, history=History())
            loop.post(execution.start)
            return LocalState(execution)

        return start_here


async def _settled(state: GraphState) -> GraphState:
    """Waits for the end of a run. The run ends early where the waiting task is cancelled."""
    try:
        await state.ended.done()
    except asyncio.CancelledError:
        state.cancel()
        raise
    return state


def _is_sent(backend: Backend, where: Where, graph: Graph) -> bool:
    takes_graphs = hasattr(backend, "run_graph")
    if where == "server" and not takes_graphs:
        raise ConfigError(
            f"{type(backend).__name__} takes no graphs: a jsg.RuntimeEndpoint does; leave out where='server'"
        )
    if where not in ("auto", "here", "server"):
        raise ProgramError(f"where must be 'auto', 'here' or 'server', but got {where!r}")
    if where == "auto" and any(isinstance(node, Fork) and len(node.branches) > MAX_FAN_OUT for node in graph.nodes()):
        return False  # a server refuses it
    return takes_graphs and where != "here"


def _check_no_optimisations(unknown: Collection[str]) -> None:
    """Raises ProgramError for an argument that runs took in earlier versions."""
    if "optimisations" in unknown:
        raise ProgramError(
            "a run takes no optimisations any more: streams always run side by side and prefixes are given back as "
            "early as possible, while share_prefixes, batch_prefix and prefetch gained nothing and are gone; leave "
            "optimisations out"
        )
