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
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

from jsg.errors import GraphError, JsgError, RequestError
from jsg.lang.backend import Backend
from jsg.lang.executor.conditions import check_pattern, patterns_of
from jsg.lang.executor.driver import place_of
from jsg.lang.executor.execution import Execution, defaults_of
from jsg.lang.executor.frames import CalledState, text_len
from jsg.lang.graphs.graph import (
    AnyNode,
    Append,
    ArgumentRef,
    Assign,
    Block,
    Choose,
    Cond,
    Condition,
    Fork,
    Generate,
    Graph,
    Join,
    Loop,
    Media,
    Open,
    Piece,
    Value,
    describe,
)
from jsg.lang.graphs.json_form import media_to_dict
from jsg.lang.graphs.json_reader import Reader
from jsg.lang.graphs.optimise import ALL_ON, ArgumentValue, Optimisations, reorder
from jsg.lang.graphs.sizes import condition_size, text_of_args, value_size
from jsg.lang.ir import Image, SamplingArgs, Video
from jsg.lang.state import messages_of
from jsg.lang.streams.loop import running_loop
from jsg.lang.streams.variables import Variable
from jsg.processing.parts import file_size

logger = logging.getLogger(__name__)

MAX_DEPTH = 64  # of what a program keeps and returns; lists in lists
ITEM_COST = 64  # characters that are put together in the time in which an item is written into an answer
_TURN = 1000  # items that are written before other tasks have their turn


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramLimits:
    """What a graph may ask for. Whatever stands in a loop counts once for each of its rounds.

    Attributes:
        nodes: Nodes as they are written.
        steps: Nodes that run, and what they put together: a round of a loop is one, too, and so is each piece of a
            text, each item of a value and each part of a condition.
        outputs: Variables that the program and its blocks leave.
        calls: `gen`s and `select`s that run; a gen with n continuations counts n.
        streams: Prompts that are opened or forked.
        fan_out: Branches of one fork.
        new_tokens: `max_tokens` of all gens together, times n.
        text_chars: Of what is appended, constants, arguments and values together, and of choices.
        answer_chars: Of what the program keeps and returns; each item of a list or dictionary counts 64 more.
        rounds: `max_rounds` of one loop.
        patterns: Of all conditions.
        pattern_chars: Of one pattern.
    """

    nodes: int = 4096
    steps: int = 65_536
    outputs: int = 1024
    calls: int = 4096
    streams: int = 1024
    fan_out: int = 256
    new_tokens: int = 1_000_000
    text_chars: int = 8_000_000
    answer_chars: int = 2**24
    rounds: int = 256
    patterns: int = 16
    pattern_chars: int = 1000


def check_limits(
    graph: Graph,
    arguments: Mapping[str, ArgumentValue],
    limits: ProgramLimits,
    defaults: SamplingArgs = SamplingArgs(),  # noqa: B008 - frozen
) -> None:
    """Checks what a graph asks for before anything of it runs.

    Raises:
        GraphError: It is more than the limits allow, or a pattern of a condition is refused; the message names the
            node at which it became too much.
    """
    count = _Count(limits, arguments, defaults)
    count.add_block(graph.block, 1)
    count.add_values((graph.returns,), 1, graph.block.nodes[-1])
    for node, pattern in count.patterns:
        try:
            check_pattern(pattern)
        except RequestError as error:
            raise GraphError(f"{describe(node)}: {error}", param="graph") from None


class _Count:
    """What the nodes so far ask for.

    Attributes:
        patterns: To be compiled, with where they stand.
    """

    def __init__(self, limits: ProgramLimits, arguments: Mapping[str, ArgumentValue], defaults: SamplingArgs) -> None:
        self.patterns: list[tuple[AnyNode, str]] = []
        self._limits = limits
        self._arguments = arguments
        self._given = defaults
        self._defaults: dict[int, SamplingArgs] = {}
        self._counts: dict[str, int] = {}

    def add_block(self, block: Block, rounds: int) -> None:
        for node in block.nodes:
            self._add("nodes", 1, node)
            self._add("steps", rounds, node)
            self._add_node(node, rounds)
        if block.nodes:
            self._add("outputs", len(block.outputs), block.nodes[-1])
            self.add_values((value for _, value in block.outputs), rounds, block.nodes[-1])

    def _add_node(self, node: AnyNode, rounds: int) -> None:
        match node:
            case Open():
                self._defaults[node.stream] = defaults_of(node, self._given)
                self._add("streams", rounds, node)
            case Append(pieces=pieces):
                self._add_pieces(pieces, rounds, node)
            case Assign(value=value):
                self.add_values((value,), rounds, node)
            case Media(source=source):
                media = self._arguments[source.name] if isinstance(source, ArgumentRef) else source
                assert isinstance(media, Image | Video)
                self._add("text_chars", rounds * file_size(media.data), node)
            case Generate(gen=gen):
                args = gen.args.over(self._defaults[node.stream])
                n = max(1, args.n or 1)
                self._add("calls", rounds * n, node)
                self._add("new_tokens", rounds * n * max(0, args.max_tokens or 0), node)
                self._add("text_chars", rounds * text_of_args(args), node)
            case Choose(choices=choices):
                self._add("calls", rounds, node)
                for choice in choices:
                    self.add_values((choice,), rounds, node)
                    self._add("text_chars", rounds * self._length(choice.pieces), node)
            case Fork(branches=branches):
                for branch in branches:
                    self._defaults[branch] = self._defaults[node.stream]
                self._check("fan_out", len(branches), node)
                self._add("streams", rounds * len(branches), node)
            case Join(branches=branches):
                self._add("steps", rounds * len(branches), node)
            case Cond(condition=condition, before=before):
                self._add_condition(condition, rounds, node)
                self.add_values((value for _, value in before), rounds, node)
                self.add_block(node.then, rounds)
                self.add_block(node.otherwise, rounds)
            case Loop(max_rounds=max_rounds, until=until, before=before):
                self._check("rounds", max_rounds, node)
                self._add("steps", rounds * max_rounds, node)
                # What it carries is defined again in each round, whether the body sets it or not.
                self.add_values((value for _, value in before), rounds * max_rounds, node)
                if until is not None:
                    self._add_condition(until, rounds * max_rounds, node)
                self.add_block(node.body, rounds * max_rounds)
            case _:
                pass

    def _add_pieces(self, pieces: tuple[Piece, ...], rounds: int, node: AnyNode) -> None:
        self._add("steps", rounds * len(pieces), node)
        self._add("text_chars", rounds * self._length(pieces), node)

    def add_values(self, values: Iterable[Value], rounds: int, node: AnyNode) -> None:
        for value in values:
            self._add("steps", rounds * value_size(value), node)

    def _add_condition(self, condition: Condition, rounds: int, node: Cond | Loop) -> None:
        self._add("steps", rounds * condition_size(condition), node)
        self._add_patterns(node, condition)

    def _length(self, pieces: tuple[Piece, ...]) -> int:
        length = 0
        for piece in pieces:
            if isinstance(piece, ArgumentRef):
                length += len(str(self._arguments[piece.name]))
            elif isinstance(piece, str):
                length += len(piece)
        return length

    def _add(self, what: str, number: int, node: AnyNode) -> None:
        self._counts[what] = self._counts.get(what, 0) + number
        self._check(what, self._counts[what], node)

    def _check(self, what: str, number: int, node: AnyNode) -> None:
        limit = getattr(self._limits, what)
        if number > limit:
            raise GraphError(
                f"{describe(node)}: a program may have {what} up to {limit}, but this one has {number} so far; ask for "
                "less, or run it in parts",
                param="graph",
            )

    def _add_patterns(self, node: Cond | Loop, condition: Condition) -> None:
        for pattern in patterns_of(condition):
            self._check("pattern_chars", len(pattern), node)
            self._add("patterns", 1, node)
            self.patterns.append((node, pattern))


def arguments_to_json(arguments: Mapping[str, ArgumentValue]) -> dict[str, Any]:
    """Arguments as `POST /v1/programs` takes them."""
    return {name: value if isinstance(value, str) else media_to_dict(value) for name, value in arguments.items()}


def arguments_from_json(graph: Graph, source: Any) -> dict[str, ArgumentValue]:
    """The reverse: exactly the arguments that a graph declares, each of its kind.

    Raises:
        GraphError: One is missing, unknown or of another kind.
    """
    if not isinstance(source, Mapping):
        raise GraphError("arguments must be an object", param="arguments")
    declared = {argument.name for argument in graph.arguments}
    if missing := sorted(declared - source.keys()):
        raise GraphError(f"the program needs the argument {missing[0]!r}", param="arguments")
    if unknown := sorted(map(str, source.keys() - declared)):
        raise GraphError(f"the program has no argument {unknown[0][:40]!r}", param="arguments")
    return {
        argument.name: _argument(argument.name, argument.kind, source[argument.name]) for argument in graph.arguments
    }


def _argument(name: str, kind: str, source: Any) -> ArgumentValue:
    if kind == "text":
        if isinstance(source, str | int | float):
            return Reader(f"argument {name!r}").text(str(source), "it")
        raise GraphError(f"the argument {name!r} must be text or a number", param="arguments")
    if not isinstance(source, Mapping) or kind not in source:
        raise GraphError(f"the argument {name!r} must be an object with the field {kind}", param="arguments")
    media = Reader(f"argument {name!r}").media({"num_frames": 1, **source} if kind == "video" else source)
    return media


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
            "usage": usage(execution),
        }


@contextlib.asynccontextmanager
async def execute(
    graph: Graph,
    backend: Backend,
    arguments: Mapping[str, ArgumentValue],
    *,
    defaults: SamplingArgs | None = None,
    options: Optimisations = ALL_ON,
    limits: ProgramLimits | None = None,
) -> AsyncIterator[ProgramRun]:
    """Runs a graph on the loop that runs; cancels what is under way when the block is left.

    Args:
        graph: A graph that is well-formed (`check_graph`).
        backend: Where; it lives on this loop.
        arguments: All that the graph names (`arguments_from_json`).
        defaults: What gens are given where they say nothing.
        options: Optimisations.
        limits: Of which `text_chars` also bounds what is put together from values while it runs, and `answer_chars`
            what comes of it.
    """
    execution = Execution(
        reorder(graph) if options.reorder else graph,
        backend,
        arguments,
        loop=running_loop(),
        defaults=defaults or SamplingArgs(),
        options=options,
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


def failures(execution: Execution) -> list[ProgramFailure]:
    """What failed in a program that has ended, each error once, in program order."""
    return [_failure(node, error) for node, error in _found(execution).values()]


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


def usage(execution: Execution) -> dict[str, int]:
    """Calls of the model and their tokens."""
    total: dict[str, int] = dict.fromkeys(("calls", "prompt_tokens", "completion_tokens", "cached_tokens"), 0)
    seen: set[int] = set()
    for node, variable in execution.values:
        if not isinstance(node, Generate | Choose) or variable.meta is None or id(variable.meta) in seen:
            continue
        seen.add(id(variable.meta))  # the reasoning of a gen has the same as its answer
        total["calls"] += 1
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens"):
            value = variable.meta.get(name)
            total[name] += value if isinstance(value, int) else 0
    return total


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
            case CalledState(stream, variables):
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
