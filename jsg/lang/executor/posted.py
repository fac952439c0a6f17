"""Runs graphs that came as data, such as those that clients send to a server, and gives the results as JSON.

    arguments = arguments_from_json(graph, body["arguments"])
    patterns = check_limits(graph, arguments, limits, defaults)
    tables = ...  # of `PatternSet("matches", tuple(patterns))`, made where it may take long
    async with execute(
        graph, backend, arguments, defaults=defaults, limits=limits, patterns=TextPatterns(tuple(patterns), tables)
    ) as run:
        async for event in run.events():    # optional: the program's variables and its text as they grow
            ...
        answer = await run.result()

Leaving the block early cancels what is under way.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any

from jsg.constrained.text_patterns import TextPatterns
from jsg.errors import JsgError, RequestError
from jsg.lang.executor.arguments import ArgumentValue
from jsg.lang.executor.beginning import Beginning
from jsg.lang.executor.driver import Pace, place_of
from jsg.lang.executor.execution import Execution
from jsg.lang.executor.frames import text_len
from jsg.lang.executor.limits import ProgramLimits
from jsg.lang.executor.reading import CalledState
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import AnyNode
from jsg.lang.graphs.reorder import reorder
from jsg.lang.program.messages import messages_of
from jsg.lang.streams.loop import running_loop
from jsg.lang.streams.ops import Place
from jsg.lang.streams.variables import Variable
from jsg.lang.words.backend import Backend
from jsg.lang.words.ir import SamplingArgs

logger = logging.getLogger(__name__)

MAX_DEPTH = 64  # of lists in lists that a program keeps or returns
ITEM_COST = 64  # writing an item into an answer takes as long as writing this many characters
_Path = tuple[str | int, ...]  # keys and indices that lead to a part of an answer
_TURN = 1000  # items that are written before other tasks run


@dataclasses.dataclass(frozen=True, slots=True)
class VariableEvent:
    """A change of a variable of the program, or of its text.

    Attributes:
        name: The variable; None for the text.
        delta: Its new text.
        is_done: Whether no more text comes.
        has_failed: Whether it ended by an error.
    """

    name: str | None
    delta: str = ""
    is_done: bool = False
    has_failed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CallEvent:
    """A call of the model that has begun or ended.

    Attributes:
        index: Its index in the timeline.
        call: What the timeline says of it now.
    """

    index: int
    call: dict[str, Any]


class ProgramRun:
    """A run of a graph; see `execute`."""

    def __init__(self, execution: Execution, max_chars: int | None = None) -> None:
        """`max_chars` limits what the program keeps and returns."""
        self._execution = execution
        self._max_chars = max_chars

    async def events(self) -> AsyncIterator[VariableEvent | CallEvent]:
        """Gives the variables that the program leaves, and its text, as they grow, and its calls of the model.

        Each last event of a variable, and of the text, has `is_done`.
        """
        queue: asyncio.Queue[VariableEvent | CallEvent] = asyncio.Queue()

        async def follow(name: str | None, variable: Variable) -> None:
            async for piece in variable.grow_async():
                queue.put_nowait(VariableEvent(name, piece))
            queue.put_nowait(VariableEvent(name, is_done=True, has_failed=variable.error is not None))

        async def follow_calls() -> None:
            async for index, call in self._execution.stream.history.changes():
                queue.put_nowait(CallEvent(index, call))

        followed = {**self._execution.outputs, None: self._execution.stream.log}
        tasks = [asyncio.create_task(follow(name, variable)) for name, variable in followed.items()]
        tasks.append(asyncio.create_task(follow_calls()))
        try:
            num_done = 0
            while num_done < len(followed):
                event = await queue.get()
                num_done += isinstance(event, VariableEvent) and event.is_done
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def result(self) -> dict[str, Any]:
        """Gives the result of the run, once everything in it has ended.

        Returns:
            `variables`: the values by name, None for one that failed; `meta_info`: the reports of the calls that set
            variables; `text` and `messages`: the program's prompt, None where it failed; `return_value`; `errors`: a
            list of `ProgramFailure`; `failed`: the index of the error of each failed variable (`variables`, by name),
            of `text` and of `return_value`, None where there is none; `usage`: `calls`, `prompt_tokens`,
            `completion_tokens` and `cached_tokens` of all calls; `timeline`: these calls, as `History.timeline` says;
            `tuples`: where in the result a list is a tuple, each place as the keys and indices that lead to it.

        Raises:
            RequestError: The program keeps or returns more than is allowed.
        """
        execution = self._execution
        await execution.ended.get()
        outputs = execution.outputs
        found = _found(execution)
        answer = _Answer(self._max_chars)

        def index(error: BaseException | None) -> int | None:
            return None if error is None else list(found).index(id(error))

        return {
            "variables": {name: await answer.read(variable, ("variables", name)) for name, variable in outputs.items()},
            "meta_info": {name: variable.meta for name, variable in outputs.items() if variable.meta is not None},
            "text": await _or_none(execution.stream.read("text")),
            "messages": await _messages(execution.stream.read("turns")),
            "return_value": await answer.read(execution.returned, ("return_value",)),
            "tuples": answer.tuples,
            "errors": [dataclasses.asdict(_failure(*failure)) for failure in found.values()],
            "failed": {
                "variables": {
                    name: index(variable.error) for name, variable in outputs.items() if variable.error is not None
                },
                "text": index(execution.stream.runner.failure),
                "return_value": index(execution.returned.error),
            },
            "usage": execution.usage(),
            "timeline": execution.stream.history.timeline(),
        }


@contextlib.asynccontextmanager
async def execute(
    graph: Graph,
    backend: Backend,
    arguments: Mapping[str, ArgumentValue],
    *,
    defaults: SamplingArgs | None = None,
    limits: ProgramLimits | None = None,
    patterns: TextPatterns | None = None,
    pace: Pace | None = None,
    beginning: Beginning | None = None,
) -> AsyncIterator[ProgramRun]:
    """Runs a graph on the running loop. Cancels what is under way at the end of the block.

    Args:
        graph: A well-formed graph (`check_graph`).
        backend: The backend, on this loop.
        arguments: All arguments that the graph declares (`arguments_from_json`).
        defaults: The defaults of its gens.
        limits: Their `text_chars` also limit the texts that are made from values during the run, and their
            `answer_chars` the result.
        patterns: The patterns of its conditions; None compiles each when it is needed.
        pace: Returns when the next node may be handed to its stream; None lets other tasks run now and then.
        beginning: What it has in common with other runs of the graph.
    """
    beginning = beginning or Beginning(reorder(graph))
    execution = Execution(
        beginning.graph,
        backend,
        arguments,
        loop=running_loop() if beginning.stream is None else beginning.stream.runner.loop,
        defaults=defaults or SamplingArgs(),
        max_text=None if limits is None else limits.text_chars,
        patterns=patterns,
        pace=pace,
        beginning=beginning.stream,
    )
    execution.start()
    try:
        yield ProgramRun(execution, None if limits is None else limits.answer_chars)
    finally:
        execution.cancel()
        await execution.ended.get()


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramFailure:
    """An error of a program.

    Attributes:
        node: The first node that failed by it; None where no node that sets a variable did.
        file, line: The program's statement.
        type: The class of the error.
        message: What went wrong.
    """

    node: int | None
    file: str
    line: int
    type: str
    message: str


def _found(execution: Execution) -> dict[int, tuple[AnyNode | None, BaseException]]:
    found: dict[int, tuple[AnyNode | None, BaseException]] = {}
    for node, variable in sorted(execution.values, key=lambda pair: pair[0].id):
        if variable.is_done and variable.error is not None:
            found.setdefault(id(variable.error), (node, variable.error))
    others = [stream.runner.failure for stream in execution.streams]
    others += [variable.error for variable in (*execution.outputs.values(), execution.returned)]
    for error in others:
        if error is not None:
            found.setdefault(id(error), (None, error))
    return found


def _failure(node: AnyNode | None, error: BaseException) -> ProgramFailure:
    if not isinstance(error, JsgError):
        logger.error("a program failed", exc_info=error)
    place = noted_place(error) or (Place("?", 0) if node is None else place_of(node))
    message = str(error) if isinstance(error, JsgError) else "internal error"
    return ProgramFailure(None if node is None else node.id, place.file, place.line, type(error).__name__, message)


def noted_place(error: BaseException) -> Place | None:
    """Gives the program's statement that a stream has noted on an error."""
    for note in getattr(error, "__notes__", ()):
        _, is_place, place = note.partition("in the program: ")
        name, _, line = place.rpartition(":")
        if is_place and line.isdecimal():
            return Place(name, int(line))
    return None


async def _or_none(variable: Variable) -> Any:
    await variable.done()
    return variable.now() if variable.error is None else None


async def _messages(turns: Variable) -> list[dict[str, Any]] | None:
    read = await _or_none(turns)
    return None if read is None else messages_of(read)


class _Answer:
    """Writes values as JSON. A value that is named twice is written, and counted, twice.

    Attributes:
        tuples: The places of lists that are tuples.
    """

    def __init__(self, max_chars: int | None) -> None:
        self.tuples: list[_Path] = []
        self._max_chars = max_chars
        self._num_chars = 0
        self._num_items = 0

    async def read(self, variable: Variable, path: "_Path", depth: int = 0) -> Any:
        """Gives the value of a variable, None where it failed. Raises RequestError where it is too long or too deep."""
        return await self._write(await _or_none(variable), path, depth)

    async def _write(self, value: Any, path: "_Path", depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise RequestError(
                f"what a program keeps and returns may be nested {MAX_DEPTH} deep, but this is deeper; keep less in it"
            )
        self._charge(ITEM_COST + (len(value) if isinstance(value, str) else 0))
        self._num_items += 1
        if self._num_items % _TURN == 0:
            await asyncio.sleep(0)
        match value:
            case CalledState(stream=stream, variables=variables):
                self._charge(text_len(stream))
                return {
                    "text": await _or_none(stream.read("text")),
                    "variables": {
                        name: await self.read(variable, (*path, "variables", name), depth + 1)
                        for name, variable in variables.items()
                    },
                }
            case list() | tuple():
                if isinstance(value, tuple):
                    self._charge(ITEM_COST * len(path))
                    self.tuples.append(path)
                return [await self._write(item, (*path, index), depth + 1) for index, item in enumerate(value)]
            case dict():
                return {key: await self._write(item, (*path, key), depth + 1) for key, item in value.items()}
        return value

    def _charge(self, num_chars: int) -> None:
        self._num_chars += num_chars
        if self._max_chars is not None and self._num_chars > self._max_chars:
            raise RequestError(
                f"what a program keeps and returns may have {self._max_chars} characters in all, each item of a list "
                f"counting {ITEM_COST} more; keep less in it"
            )
