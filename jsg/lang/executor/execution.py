"""One run of a graph on a backend, as tasks of the running event loop, without threads."""

import asyncio
import functools
from collections.abc import Mapping, Sequence

from jsg.constrained.text_patterns import TextPatterns
from jsg.errors import AbortedError, UnknownVariableError
from jsg.lang.executor.arguments import ArgumentValue
from jsg.lang.executor.driver import Driver, Pace
from jsg.lang.executor.evaluation import Evaluator
from jsg.lang.executor.frames import new_frame
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import MAIN_STREAM, AnyNode, Choose, Generate, Join, Open
from jsg.lang.streams.history import History, usage_of
from jsg.lang.streams.loop import Loop
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable
from jsg.lang.words.backend import Backend
from jsg.lang.words.ir import PUBLISHED, SamplingArgs


class Execution:
    """One run of a graph.

    Attributes:
        graph: The graph.
        stream: The program's own stream.
        outputs: The variables of the program; their text grows with that of their values.
        returned: What the program returns.
        submitted: Is done when the own stream has all its nodes.
        ended: Is done when nothing is under way any more.
    """

    def __init__(
        self,
        graph: Graph,
        backend: Backend,
        arguments: Mapping[str, ArgumentValue],
        *,
        loop: Loop,
        defaults: SamplingArgs,
        max_text: int | None = None,
        patterns: TextPatterns | None = None,
        history: History | None = None,
        pace: Pace | None = None,
        beginning: Stream | None = None,
    ) -> None:
        """Prepares the run, which `start` starts.

        Args:
            graph: A well-formed graph.
            backend: The backend.
            arguments: All arguments that the graph declares, of their kinds.
            loop: The event loop of the backend.
            defaults: The defaults of the program's own gens.
            max_text: The number of characters that all texts made from values may have.
            patterns: The patterns of all conditions; None compiles each when it is needed.
            history: Notes what happens.
            pace: As in `Driver`.
            beginning: What the program's own stream begins with, which the graph leaves out.
        """
        history = history or History(is_watched=False)

        def open_stream(node: Open) -> Stream:
            spec = node.num_api_spec_tokens
            open_session = functools.partial(backend.open, num_api_spec_tokens=spec)
            return Stream(loop, open_session, defaults_of(node, defaults), history=history)

        opened = graph.block.nodes[0]
        assert isinstance(opened, Open)
        own = defaults_of(opened, defaults)
        self.stream = open_stream(opened) if beginning is None else beginning.copy(own, history)
        self.outputs = {name: Variable() for name, _ in graph.block.outputs}
        self.returned = Variable()
        self.submitted = Variable()
        self.ended = Variable()
        self.graph = graph
        self._loop = loop
        self._tasks = asyncio.TaskGroup()
        self._evaluator = Evaluator(arguments, self._tasks, max_text, patterns, history)
        self._driver = Driver(
            self.stream,
            self.submitted,
            open_stream,
            arguments,
            self._tasks,
            self._evaluator,
            _concatenated(graph),
            pace,
        )
        self._root: asyncio.Task[None] | None = None
        self._has_begun = False
        self._abort: BaseException | None = None

    @property
    def values(self) -> Sequence[tuple[AnyNode, Variable]]:
        """All variables that nodes have set so far."""
        return self._driver.values

    @property
    def streams(self) -> Sequence[Stream]:
        """All streams so far."""
        return self._driver.streams

    def usage(self) -> dict[str, int]:
        """The calls of the model so far, and their tokens."""
        return usage_of(variable.meta for node, variable in self.values if isinstance(node, Generate | Choose))

    def start(self) -> None:
        """Starts the run. Must be called on the loop."""
        self._root = asyncio.get_running_loop().create_task(self._run())

    def cancel(self, error: BaseException | None = None) -> None:
        """Aborts all that is under way. May be called from any thread."""
        self._loop.post(lambda: self._cancel(error or AbortedError("the program was cancelled")))

    def _cancel(self, error: BaseException) -> None:
        if self.ended.is_done or self._abort is not None:
            return
        self._abort = error
        for stream in self.streams:
            stream.cancel(error)
        if self._root is not None and self._has_begun:  # a task that has not begun would end without its `finally`
            self._root.cancel()

    async def _run(self) -> None:
        self._has_begun = True
        error: BaseException = UnknownVariableError("the program ended without it")
        try:
            if self._abort is not None:
                raise asyncio.CancelledError
            async with self._tasks as tasks:
                frame = new_frame(self.graph.block, None)
                for name, value in self.graph.block.outputs:
                    tasks.create_task(self._evaluator.follow(self.outputs[name], value, frame))
                tasks.create_task(self._evaluator.fulfil(self.returned, self.graph.returns, frame))
                await self._driver.run_block(frame, None)
            self.submitted.finish(None)
            for stream in self.streams:
                stream.close()
                await stream.read("nothing").done()
        except asyncio.CancelledError as cancelled:
            cancelled.__traceback__ = None  # a frame of asyncio's holds the error, and this one through it
            error = self._abort or AbortedError("the program was cancelled")
            self._cancel(error)
        except Exception as group:
            error = group
            self._cancel(error)
            raise
        finally:
            for variable in (*self.outputs.values(), self.returned):
                variable.fail(error)
            self._evaluator.fail_promises(error)
            if self.returned.error is not None:
                self.stream.history.failed(self.returned.error)  # which may be no failure of a stream
            self.submitted.finish(None)
            self.ended.finish(None)


def defaults_of(node: Open, given: SamplingArgs) -> SamplingArgs:
    """Gives the defaults of the gens of a program.

    Args:
        node: The node that opens the program's stream.
        given: The defaults that the run of the graph was given.
    """
    own = given if node.stream == MAIN_STREAM else node.defaults
    return PUBLISHED if own is None else own.over(PUBLISHED)


def _concatenated(graph: Graph) -> frozenset[int]:
    joins = (node for node in graph.nodes() if isinstance(node, Join) and node.mode == "concate_and_append")
    return frozenset(branch for join in joins for branch in join.branches)
