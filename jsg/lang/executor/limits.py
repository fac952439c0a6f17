"""The limits of a graph that a client sent, which are checked before anything of it runs."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jsg.errors import GraphError
from jsg.lang.executor.arguments import ArgumentValue, known_media, known_text
from jsg.lang.executor.conditions import matches_of
from jsg.lang.executor.execution import defaults_of
from jsg.lang.graphs.graph import Graph
from jsg.lang.graphs.nodes import (
    AnyNode,
    Append,
    Assign,
    Block,
    Choose,
    Cond,
    Condition,
    Fork,
    Generate,
    Join,
    Loop,
    Media,
    Open,
    Piece,
    TextValue,
    Value,
    ValueRef,
    describe,
    parts,
)
from jsg.lang.words.ir import SamplingArgs
from jsg.processing.parts import file_size

MAX_FAN_OUT = 256


@dataclasses.dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The most that a graph may ask for. A node in a loop counts once for each round.

    Attributes:
        nodes: Nodes of the graph as it is written.
        steps: Nodes that run, rounds of loops, pieces of texts, items of values and parts of conditions.
        outputs: Variables that the program and its blocks set.
        calls: `gen`s and `select`s that run; a gen with n continuations counts n.
        streams: Streams that are opened or forked.
        fan_out: Branches of one fork.
        new_tokens: The sum of `max_tokens` times n over all gens.
        text_chars: Characters that are appended, from constants, arguments and values, and characters of choices.
        answer_chars: Characters of what the program keeps and returns; each item of a list or dictionary adds 64.
        rounds: The largest `max_rounds` of a loop.
        patterns: Patterns in all conditions.
        pattern_chars: Characters of one pattern.
    """

    nodes: int = 4096
    steps: int = 65_536
    outputs: int = 1024
    calls: int = 4096
    streams: int = 1024
    fan_out: int = MAX_FAN_OUT
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
    *,
    further: Sequence[Mapping[str, ArgumentValue]] = (),
) -> dict[str, AnyNode]:
    """Checks that a graph stays within the limits.

    Args:
        graph: The graph.
        arguments: The arguments of a run.
        limits: The limits.
        defaults: The defaults of its gens.
        further: The arguments of further runs. What runs or is opened counts once for each run.

    Returns:
        Each pattern of its conditions, with the first node that has it. They are not compiled here, because that may
        take seconds, and belongs where it can be ended.

    Raises:
        GraphError: The graph exceeds a limit. The message names the node.
    """
    count = _Count(limits, defaults)
    for run in (arguments, *further):
        count.begin(run)
        count.add_block(graph.block, 1)
        count.add("steps", size_of(graph.returns), graph.block.nodes[-1])
    return count.patterns


def num_streams(graph: Graph) -> int:
    """Counts the streams of a graph as it is written. The rounds of a loop come one after the other."""
    return sum(len(node.branches) if isinstance(node, Fork) else isinstance(node, Open) for node in graph.nodes())


def size_of(part: Any) -> int:
    """Counts the values, conditions and pieces of text that a part of a graph consists of."""
    held = (inner for inner in parts(part) if isinstance(inner, Value | Condition))
    return sum(1 + len(inner.pieces) if isinstance(inner, TextValue) else 1 for inner in held)


_OF_THE_GRAPH = ("nodes", "outputs", "patterns")  # which many runs have in common


class _Count:
    """Counts what the nodes so far ask for.

    Attributes:
        patterns: The patterns to be compiled, each with its first node.
    """

    def __init__(self, limits: ProgramLimits, defaults: SamplingArgs) -> None:
        self.patterns: dict[str, AnyNode] = {}
        self._limits = limits
        self._arguments: Mapping[str, ArgumentValue] = {}
        self._given = defaults
        self._defaults: dict[int, SamplingArgs] = {}
        self._counts: dict[str, int] = {}

    def begin(self, arguments: Mapping[str, ArgumentValue]) -> None:
        """Begins to count a run with these arguments."""
        self._arguments = arguments
        for what in _OF_THE_GRAPH:
            self._counts[what] = 0

    def add_block(self, block: Block, rounds: int) -> None:
        for node in block.nodes:
            self.add("nodes", 1, node)
            self.add("steps", rounds, node)
            self._add_node(node, rounds)
        if block.nodes:
            self.add("outputs", len(block.outputs), block.nodes[-1])
            self.add("steps", rounds * size_of(block.outputs), block.nodes[-1])

    def add(self, what: str, number: int, node: AnyNode) -> None:
        """Adds to a count. Raises GraphError where it exceeds its limit."""
        self._counts[what] = self._counts.get(what, 0) + number
        self._check(what, self._counts[what], node)

    def _add_node(self, node: AnyNode, rounds: int) -> None:
        match node:
            case Open():
                self._defaults[node.stream] = defaults_of(node, self._given)
                self.add("streams", rounds, node)
            case Append(pieces=pieces):
                self.add("steps", rounds * len(pieces), node)
                self.add("text_chars", rounds * self._length(pieces), node)
            case Assign(value=value):
                self.add("steps", rounds * size_of(value), node)
            case Media():
                self.add("text_chars", rounds * file_size(known_media(node, self._arguments).data), node)
            case Generate():
                args = node.args.over(self._defaults[node.stream])
                n = max(1, args.n or 1)
                self.add("calls", rounds * n, node)
                self.add("new_tokens", rounds * n * max(0, args.max_tokens or 0), node)
                self.add("text_chars", rounds * _text_of_args(args), node)
            case Choose(texts=texts):
                self.add("calls", rounds, node)
                self.add("steps", rounds * size_of(texts), node)
                self.add("text_chars", rounds * sum(self._length(text.pieces) for text in texts), node)
            case Fork(branches=branches):
                self._defaults |= dict.fromkeys(branches, self._defaults[node.stream])
                self._check("fan_out", len(branches), node)
                self.add("streams", rounds * len(branches), node)
            case Join(branches=branches, gathered=gathered):
                self.add("steps", rounds * len(branches) * (1 + len(gathered)), node)
            case Cond():
                self._add_condition(node.condition, rounds, node)
                self.add("steps", rounds * size_of(node.before), node)
                self.add_block(node.then, rounds)
                self.add_block(node.otherwise, rounds)
            case Loop(max_rounds=max_rounds):
                self._check("rounds", max_rounds, node)
                rounds *= max_rounds
                # Each round defines the variables of `before` again, whether the body sets them or not.
                self.add("steps", rounds * (1 + size_of(node.before)), node)
                self._add_condition(node.until, rounds, node)
                self.add_block(node.body, rounds)
            case _:
                pass

    def _add_condition(self, condition: Condition | None, rounds: int, node: Cond | Loop) -> None:
        self.add("steps", rounds * size_of(condition), node)
        for part in matches_of(condition):
            self._check("pattern_chars", len(part.pattern), node)
            self.add("patterns", 1, node)
            self.patterns.setdefault(part.pattern, node)

    def _length(self, pieces: Iterable[Piece]) -> int:
        return len(known_text([piece for piece in pieces if not isinstance(piece, ValueRef)], self._arguments))

    def _check(self, what: str, number: int, node: AnyNode) -> None:
        limit = getattr(self._limits, what)
        if number > limit:
            raise GraphError(
                f"{describe(node)}: a program may have {what} up to {limit}, but this one has {number} so far; ask for "
                "less, or run it in parts",
                param="graph",
            )


def _text_of_args(args: SamplingArgs) -> int:
    """Counts the characters of all texts in the arguments of a gen. A list item that is no text counts as one."""
    size = 0
    for value in args.given().values():
        for item in value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ():
            size += len(item) if isinstance(item, str) else 1
    return size
