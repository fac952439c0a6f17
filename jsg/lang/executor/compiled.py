"""Compiled programs: a graph, and the ways to run it."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, cast

from jsg.errors import ConfigError, ProgramError
from jsg.lang.backend import Backend, BackendSource, HintSession, PromptItem
from jsg.lang.batch import arguments_of, num_workers, progress
from jsg.lang.defaults import as_backend
from jsg.lang.executor.arguments import ArgumentValue, argument_value, arguments_to_json
from jsg.lang.executor.execution import Execution
from jsg.lang.executor.reading import GraphState, Readings
from jsg.lang.executor.runs import GraphBackend, LocalRun, RemoteRun
from jsg.lang.graphs.check import graph_from_json
from jsg.lang.graphs.codec import sampling_to_dict
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import (
    MAIN_STREAM,
    AnyNode,
    Append,
    ArgumentRef,
    Assign,
    Media,
    Open,
    ReadText,
    Scope,
    Turn,
)
from jsg.lang.graphs.reorder import reorder, varying_arguments
from jsg.lang.ir import RoleBegin, RoleEnd, SamplingArgs, Text
from jsg.lang.run_args import RunArgs, take_run_args
from jsg.lang.streams.loop import shared_loop, wait_for
from jsg.lang.streams.variables import Variable

Where = Literal["auto", "here", "server"]
_WINDOW = 256  # runs whose results may wait to be taken from an iterator, unless more run at a time


def cache_prefix(graph: Graph, backend: Backend) -> None:
    """Computes what every run of a program begins with. Raises ConfigError where the backend keeps no prefixes."""
    prefix = constant_prefix(node for node in graph.block.nodes if node.stream == MAIN_STREAM)

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
    """What the nodes of a stream append before anything that only a run knows.

    Args:
        nodes: Of one stream, in program order.
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


class CompiledFunction:
    """A program as a graph: prints, draws, becomes JSON, and runs without the Python that it came from.

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
        """A drawing in Graphviz' language."""
        return self.graph.to_dot()

    def to_json(self) -> str:
        """The graph as JSON, which `from_json` reads and `POST /v1/programs` takes as `graph`."""
        return self.graph.to_json()

    @classmethod
    def from_json(cls, source: str | bytes | Mapping[str, Any]) -> "CompiledFunction":
        """The reverse of `to_json`. Raises GraphError."""
        return cls(graph_from_json(source))

    def __call__(self, *args: Any, **kwargs: Any) -> GraphState:
        """As `run`."""
        return self.run(*args, **kwargs)

    def run(
        self,
        *args: Any,
        stream: bool = False,
        backend: Backend | BackendSource | None = None,
        where: Where = "auto",
        **kwargs: Any,
    ) -> GraphState:
        """Runs it; returns at once, reading the state waits.

        Args:
            *args: The graph's arguments, in their order.
            stream: A server sends variables as they grow; in this process they can always be read so.
            backend: A backend; the default one where None.
            where: "server" sends the graph whole, "here" runs it in this process, call by call; "auto" sends it where
                the backend takes graphs (`jsg.RuntimeEndpoint`).
            **kwargs: Arguments by name, and what `RunArgs` says.

        Raises:
            ProgramError: The arguments are not those of the graph.
            ConfigError: The backend takes no graphs and `where` is "server".
        """
        given, kwargs = take_run_args(kwargs, self._own)
        arguments = self._bind(args, kwargs)
        chosen = as_backend(backend)
        if _is_sent(chosen, where):
            state, begin = self._remote(cast(GraphBackend, chosen), arguments, given, stream)
        else:
            state, begin = _local(reorder(self.graph), chosen, arguments, given)
        shared_loop().post(begin)
        return state

    async def arun(
        self,
        *args: Any,
        stream: bool = False,
        backend: Backend | BackendSource | None = None,
        where: Where = "auto",
        **kwargs: Any,
    ) -> GraphState:
        """As `run`, but waits for the end unless `stream`; cancelling the task cancels the program."""
        state = self.run(*args, stream=stream, backend=backend, where=where, **kwargs)
        if not stream:
            try:
                await state.settle()
            except asyncio.CancelledError:
                state.cancel()
                raise
        return state

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Backend | BackendSource | None = None,
        where: Where = "auto",
        **run_args: Unpack[RunArgs],
    ) -> list[GraphState] | Iterator[GraphState]:
        """Runs it once for each item, several at a time; gives the states in the items' order, each at its end.

        What fails in an item stays with its state. An interrupt cancels all.

        Args:
            batch_kwargs: For each run its arguments, as a dict or a sequence.
            num_threads: Runs under way at a time, as `SglFunction.run_batch` counts them; there are no threads.
            progress_bar: Shows how many are done.
            generator_style: Gives an iterator, whose states come as soon as they and those before them are done.
            backend: As in `run`.
            where: As in `run`.
            **run_args: As `RunArgs` says, for all.

        Raises:
            ProgramError: An item does not fit the graph's arguments; nothing was run.
        """
        batch = self._batch(batch_kwargs, num_threads, progress_bar, backend, where, dict(run_args))
        if not generator_style:
            return list(_states(batch))
        batch.limit_lead()
        return _states(batch)

    async def arun_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Backend | BackendSource | None = None,
        where: Where = "auto",
        **run_args: Unpack[RunArgs],
    ) -> list[GraphState] | AsyncIterator[GraphState]:
        """As `run_batch`, for tasks; with `generator_style` an asynchronous iterator."""
        batch = self._batch(batch_kwargs, num_threads, progress_bar, backend, where, dict(run_args))
        if generator_style:
            batch.limit_lead()
            return _states_async(batch)
        async with contextlib.aclosing(_states_async(batch)) as states:
            return [state async for state in states]

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
            raise ProgramError(
                f"{self.graph.name} takes {', '.join(names) or 'nothing'}, but got {unknown[0]!r}; what was a constant "
                "when it was compiled stays one"
            )
        return {argument.name: argument_value(argument, given[argument.name]) for argument in self.graph.arguments}

    def _remote(
        self, backend: GraphBackend, arguments: Mapping[str, ArgumentValue], given: SamplingArgs, stream: bool
    ) -> tuple[GraphState, Callable[[], object]]:
        run = RemoteRun(self.graph, shared_loop())
        graph, data, sampling = self.graph.to_dict(), arguments_to_json(arguments), sampling_to_dict(given)
        keep: list[asyncio.Task[None]] = []

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(run.run(backend, graph, data, sampling, stream=stream))
            keep.append(task)  # the loop itself holds tasks weakly
            task.add_done_callback(keep.remove)

        return GraphState(run), begin

    def _batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        num_threads: int | Literal["auto"],
        progress_bar: bool,
        backend: Backend | BackendSource | None,
        where: Where,
        run_args: dict[str, Any],
    ) -> "_Batch":
        given, rest = take_run_args(run_args, self._own)
        _check_no_optimisations(rest)
        if rest:
            raise ProgramError(f"run_batch has no argument {', '.join(sorted(rest))}; arguments are given per item")
        runs = [self._bind(*arguments_of(item, index)) for index, item in enumerate(batch_kwargs)]
        begin = self._starter(runs, given, as_backend(backend), where)
        return _Batch(begin, len(runs), num_workers(num_threads, len(runs)), progress_bar)

    def _starter(
        self,
        runs: Sequence[Mapping[str, ArgumentValue]],
        given: SamplingArgs,
        backend: Backend,
        where: Where,
    ) -> "_Starter":
        if _is_sent(backend, where):
            sent = cast(GraphBackend, backend)
            return lambda index: self._remote(sent, runs[index], given, False)
        varying = varying_arguments(self.graph.arguments, runs)
        graph = reorder(self.graph, varying)
        return lambda index: _local(graph, backend, runs[index], given)


_Starter = Callable[[int], tuple[GraphState, Callable[[], object]]]
"""Gives the state of a run of a batch by its index, and what starts it on the loop."""


class _Batch:
    """Runs under way; lives on the shared loop.

    Attributes:
        states: Each done when its run is.
        room: What bounds how far runs may get ahead of who takes their states.
    """

    def __init__(self, begin: _Starter, size: int, num_workers: int, progress_bar: bool) -> None:
        self._begin = begin
        self._num_workers = num_workers
        self._progress_bar = progress_bar
        self.states = [Variable() for _ in range(size)]
        self.room = asyncio.Semaphore(size + 1)  # one more: who finds nothing left has taken one, too

    def limit_lead(self) -> None:
        """Bounds how far it gets ahead of who takes its states; each that is taken makes room for one more."""
        self.room = asyncio.Semaphore(max(_WINDOW, 2 * self._num_workers))

    async def run(self) -> None:
        """Runs all; cancelling it cancels what is under way."""
        indices = iter(range(len(self.states)))
        end: Exception = ProgramError("the batch was cancelled")
        try:
            with progress(len(self.states), self._progress_bar) as advance:
                async with asyncio.TaskGroup() as group:
                    for _ in range(self._num_workers):
                        group.create_task(self._work(indices, advance))
        except Exception as error:  # our bug: who waits for a state shall see it
            end = error
            raise
        finally:
            for state in self.states:
                state.fail(end)

    async def _work(self, indices: Iterator[int], advance: Callable[[], None]) -> None:
        while True:
            await self.room.acquire()
            index = next(indices, None)
            if index is None:
                self.room.release()
                return
            state, begin = self._begin(index)
            begin()
            try:
                await state.settle()
            except asyncio.CancelledError:
                state.cancel()
                raise
            self.states[index].finish(state)
            advance()


def _states(batch: _Batch) -> Iterator[GraphState]:
    """The states of a batch, in order; closing the iterator early cancels the rest."""
    loop = shared_loop()
    future = loop.submit(batch.run())
    try:
        for state in batch.states:
            yield state.wait()
            loop.post(batch.room.release)
        future.result()
    finally:
        future.cancel()


async def _states_async(batch: _Batch) -> AsyncGenerator[GraphState]:
    """As `_states`, for tasks of any event loop."""
    loop = shared_loop()
    future = loop.submit(batch.run())
    try:
        for state in batch.states:
            yield await state.get()
            loop.post(batch.room.release)
        await asyncio.wrap_future(future)
    finally:
        future.cancel()


def _local(
    graph: Graph,
    backend: Backend,
    arguments: Mapping[str, ArgumentValue],
    given: SamplingArgs,
) -> tuple[GraphState, Callable[[], object]]:
    execution = Execution(
        graph,
        backend,
        arguments,
        loop=shared_loop(),
        defaults=given,
    )
    readings: Readings = LocalRun(execution)
    return GraphState(readings), execution.start


def _is_sent(backend: Backend, where: Where) -> bool:
    takes_graphs = hasattr(backend, "run_graph")
    if where == "server" and not takes_graphs:
        raise ConfigError(
            f"{type(backend).__name__} takes no graphs: a jsg.RuntimeEndpoint does; leave out where='server'"
        )
    if where not in ("auto", "here", "server"):
        raise ProgramError(f"where must be 'auto', 'here' or 'server', but got {where!r}")
    return takes_graphs and where != "here"


def _check_no_optimisations(unknown: Collection[str]) -> None:
    """Raises ProgramError for an argument that runs once took."""
    if "optimisations" in unknown:
        raise ProgramError(
            "a run takes no optimisations any more: streams always run side by side and prefixes are given back as "
            "early as possible, while share_prefixes, batch_prefix and prefetch gained nothing and are gone; leave "
            "optimisations out"
        )
