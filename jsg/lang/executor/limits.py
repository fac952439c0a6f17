"""What a graph that somebody sent may ask for, counted before anything of it runs."""

import dataclasses
from collections.abc import Iterable, Mapping

from jsg.errors import GraphError, RequestError
from jsg.lang.executor.arguments import ArgumentValue
from jsg.lang.executor.conditions import check_pattern, patterns_of
from jsg.lang.executor.execution import defaults_of
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
from jsg.lang.graphs.sizes import condition_size, text_of_args, value_size
from jsg.lang.ir import Image, SamplingArgs, Video
from jsg.processing.parts import file_size


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
