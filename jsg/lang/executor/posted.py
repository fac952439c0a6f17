"""Runs graphs for somebody who has them as data, such as a server: checked against limits first, as JSON at the end.

    arguments = arguments_from_json(graph, body["arguments"])
    check_limits(graph, arguments, limits, defaults)
    async with execute(graph, backend, arguments, defaults=defaults) as run:
        async for event in run.events():    # the program's variables as they grow; only if wanted
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

from jsg.errors import JsgError, RequestError
from jsg.lang.backend import Backend
from jsg.lang.executor.arguments import ArgumentValue
from jsg.lang.executor.driver import place_of
from jsg.lang.executor.execution import Execution
from jsg.lang.executor.frames import text_len
from jsg.lang.executor.limits import ProgramLimits
from jsg.lang.executor.reading import CalledState
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import AnyNode
from jsg.lang.graphs.reorder import reorder
from jsg.lang.ir import SamplingArgs
from jsg.lang.messages import messages_of
from jsg.lang.streams.loop import running_loop
from jsg.lang.streams.variables import Variable

logger = logging.getLogger(__name__)

MAX_DEPTH = 64  # of what a program keeps and returns; lists in lists
ITEM_COST = 64  # characters that are put together in the time in which an item is written into an answer
_TURN = 1000  # items that are written before other tasks have their turn


@dataclasses.dataclass(frozen=True, slots=True)
class VariableEvent:
    """News of a variable of the program.

    Attributes:
        name: Which.
        delta: New text.
        is_done: Nothing more will come of it.
        has_failed: For it is not known how it goes on.
    """

    name: str
    delta: str = ""
    is_done: bool = False
    has_failed: bool = False


class ProgramRun:
    """A graph that runs; see `execute`."""

    def __init__(self, execution: Execution, max_chars: int | None = None) -> None:
        """`max_chars` bounds what it keeps and returns."""
        self._execution = execution
        self._max_chars = max_chars

    async def events(self) -> AsyncIterator[VariableEvent]:
        """The program's variables as they grow, those at its end; each ends with an event that says so."""
        queue: asyncio.Queue[VariableEvent] = asyncio.Queue()

        async def follow(name: str, variable: Variable) -> None:
            has_failed = False
            try:
                async for piece in variable.follow_async():
                    queue.put_nowait(VariableEvent(name, piece))
            except Exception:  # the result says why
                has_failed = True
            queue.put_nowait(VariableEvent(name, is_done=True, has_failed=has_failed))

        outputs = self._execution.outputs
        tasks = [asyncio.create_task(follow(name, variable)) for name, variable in outputs.items()]
        try:
            num_done = 0
            while num_done < len(outputs):
                event = await queue.get()
                num_done += event.is_done
                yield event
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def result(self) -> dict[str, Any]:
        """What came of it, when nothing is under way any more.

        Returns:
            `variables`: by name, None where it failed; `meta_info`: of those that a call of the model set; `text` and
            `messages`: of the program's prompt, None where it failed; `return_value`; `errors`: what failed, see
            `ProgramFailure`; `failed`: of `variables` by name, of `text` and of `return_value` the index of the error
            that kept it from being known, None where none did; `usage`: `calls`, `prompt_tokens`,
            `completion_tokens`, `cached_tokens` of all calls.

        Raises:
            RequestError: The program returns or keeps more than is allowed.
        """
        execution = self._execution
        await execution.ended.get()
        outputs = execution.outputs
        found = _found(execution)
        answer = _Answer(self._max_chars)

        def index(error: BaseException | None) -> int | None:
            return None if error is None else list(found).index(id(error))

        return {
            "variables": {name: await answer.read(variable) for name, variable in outputs.items()},
            "meta_info": {name: variable.meta for name, variable in outputs.items() if variable.meta is not None},
            "text": await _or_none(execution.stream.read("text")),
            "messages": await _messages(execution.stream.read("turns")),
            "return_value": await answer.read(execution.returned),
            "errors": [dataclasses.asdict(_failure(*failure)) for failure in found.values()],
            "failed": {
                "variables": {
                    name: index(variable.error) for name, variable in outputs.items() if variable.error is not None
                },
                "text": index(execution.stream.runner.failure),
                "return_value": index(execution.returned.error),
            },
            "usage": execution.usage(),
        }


@contextlib.asynccontextmanager
async def execute(
    graph: Graph,
    backend: Backend,
    arguments: Mapping[str, ArgumentValue],
    *,
    defaults: SamplingArgs | None = None,
    limits: ProgramLimits | None = None,
) -> AsyncIterator[ProgramRun]:
    """Runs a graph on the loop that runs; cancels what is under way when the block is left.

    Args:
        graph: A graph that is well-formed (`check_graph`).
        backend: Where; it lives on this loop.
        arguments: All that the graph names (`arguments_from_json`).
        defaults: What gens are given where they say nothing.
        limits: Of which `text_chars` also bounds what is put together from values while it runs, and `answer_chars`
            what comes of it.
    """
    execution = Execution(
        reorder(graph),
        backend,
        arguments,
        loop=running_loop(),
        defaults=defaults or SamplingArgs(),
        max_text=None if limits is None else limits.text_chars,
    )
    execution.start()
    try:
        yield ProgramRun(execution, None if limits is None else limits.answer_chars)
    finally:
        execution.cancel()
        await execution.ended.get()


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramFailure:
    """Something that failed in a program.

    Attributes:
        node: The first node that failed for it; None where it was not one that sets a variable.
        file, line: Of the program's statement.
        type: Class of the error.
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
    file, line = noted_place(error) or (place_of(node) if node is not None else ("?", 0))
    message = str(error.args[0]) if isinstance(error, JsgError) and error.args else "internal error"
    return ProgramFailure(None if node is None else node.id, file, line, type(error).__name__, message)


def noted_place(error: BaseException) -> tuple[str, int] | None:
    """The program's statement that a stream has noted on an error."""
    for note in getattr(error, "__notes__", ()):
        _, is_place, place = note.partition("in the program: ")
        name, _, line = place.rpartition(":")
        if is_place and line.isdecimal():
            return name, int(line)
    return None


async def _or_none(variable: Variable) -> Any:
    try:
        return await variable.get()
    except Exception:
        return None


async def _messages(turns: Variable) -> list[dict[str, Any]] | None:
    read = await _or_none(turns)
    return None if read is None else messages_of(read)


class _Answer:
    """Writes values as JSON has them, each as often as it is named: lists that name others twice double each time."""

    def __init__(self, max_chars: int | None) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._num_items = 0

    async def read(self, variable: Variable, depth: int = 0) -> Any:
        """The value of a variable, None where it failed. Raises RequestError where it is too much, or too deep."""
        return await self._write(await _or_none(variable), depth)

    async def _write(self, value: Any, depth: int) -> Any:
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
                    "variables": {name: await self.read(variable, depth + 1) for name, variable in variables.items()},
                }
            case list():
                return [await self._write(item, depth + 1) for item in value]
            case dict():
                return {key: await self._write(item, depth + 1) for key, item in value.items()}
        return value

    def _charge(self, num_chars: int) -> None:
        self._num_chars += num_chars
        if self._max_chars is not None and self._num_chars > self._max_chars:
            raise RequestError(
                f"what a program keeps and returns may have {self._max_chars} characters in all, each item of a list "
                f"counting {ITEM_COST} more; keep less in it"
            )
