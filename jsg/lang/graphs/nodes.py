"""What a graph is made of: frozen records of what a program appends to its streams, and what depends on what.

Nodes stand in program order, which is also an order in which everything a node needs comes before it: ids grow, and a
node refers only to smaller ids. A node belongs to a stream; nodes of one stream run one after another, nodes of
different streams only wait for the values they name. `cond` and `loop` hold their bodies as blocks of nodes.

    pieces of text          str · ArgumentRef · ValueRef
    values that are kept    TextValue · ListValue · DictValue · ConstantValue · VariableValue · StateValue
    conditions              Equals · Contains · Matches · Not · AllOf · AnyOf
    nodes                   Open · Append · Media · Generate · Choose · Turn · Scope · ReadText · Assign · Fork ·
                            Join · Cond · Loop

A kind of node is a dataclass here and a member of `AnyNode`. By the types of its fields `codec` writes and reads it as
JSON, and `parts` finds what it refers to. What it means stands in three more places: `tracing.traced_state` makes it,
`executor.driver` runs it, and `shapes`, if it sets variables, or `check`, if it has rules of its own.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jsg.lang.ir import Image, Role, SamplingArgs, Video
from jsg.lang.nesting import JoinMode

MAIN_STREAM = 0
"""The stream of the program itself; the others are forks and called programs."""
ArgumentKind = Literal["text", "image", "video"]


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentRef:
    """The value that a run gives to an argument."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRef:
    """The variable `name` as node `node` left it.

    Attributes:
        node: A `Generate`, `Choose`, `Scope` (its end), `ReadText`, `Assign`, `Cond` or `Loop`; within the body of a
            loop also that loop, meaning what the round before left.
        name: The variable; "" of a `ReadText`.
        index: Which of the values, where the variable is a list.
    """

    node: int
    name: str
    index: int | None = None


Piece = str | ArgumentRef | ValueRef
Constant = bool | int | float | None
type Values = tuple[tuple[str, "Value"], ...]
"""What variables hold, by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextValue:
    """Text put together from pieces."""

    pieces: tuple[Piece, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ListValue:
    """A list."""

    items: "tuple[Value, ...]"


@dataclasses.dataclass(frozen=True, slots=True)
class DictValue:
    """A dictionary with text keys."""

    items: Values


@dataclasses.dataclass(frozen=True, slots=True)
class ConstantValue:
    """None, a truth value or a number."""

    value: Constant


@dataclasses.dataclass(frozen=True, slots=True)
class VariableValue:
    """Whatever a variable holds, where that is known only when it runs: a list or one value."""

    ref: ValueRef


@dataclasses.dataclass(frozen=True, slots=True)
class StateValue:
    """A whole stream: a program that returns the state of a program it called.

    Attributes:
        stream: Which.
        variables: What its variables hold.
    """

    stream: int
    variables: Values


Value = TextValue | ListValue | DictValue | ConstantValue | VariableValue | StateValue


@dataclasses.dataclass(frozen=True, slots=True)
class Equals:
    """`value` is `text`, white space around both aside."""

    value: TextValue
    text: TextValue


@dataclasses.dataclass(frozen=True, slots=True)
class Contains:
    """`text` stands somewhere in `value`."""

    value: TextValue
    text: TextValue


@dataclasses.dataclass(frozen=True, slots=True)
class Matches:
    """The whole of `value` matches the regular expression, in the dialect of `gen(regex=...)`."""

    value: TextValue
    pattern: str


@dataclasses.dataclass(frozen=True, slots=True)
class Not:
    """`condition` does not hold."""

    condition: "Condition"


@dataclasses.dataclass(frozen=True, slots=True)
class AllOf:
    """Every one of `conditions` holds."""

    conditions: "tuple[Condition, ...]"


@dataclasses.dataclass(frozen=True, slots=True)
class AnyOf:
    """One of `conditions` holds at least."""

    conditions: "tuple[Condition, ...]"


Condition = Equals | Contains | Matches | Not | AllOf | AnyOf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What every node has.

    Attributes:
        id: Its place in the program: larger than that of all before it.
        stream: Whose prompt it extends.
        line: File name and line of the program's statement, as `essay.py:12`.
    """

    id: int
    stream: int
    line: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Open(Node):
    """Begins an empty stream: the program's own, or that of a program it calls.

    Attributes:
        program: Name of the function.
        defaults: What the caller gave for its gens; None is nothing. A called program takes nothing from its caller's
            run, as when it is interpreted.
        num_api_spec_tokens: As `function` was given it.
    """

    program: str
    defaults: SamplingArgs | None = None
    num_api_spec_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Append(Node):
    """Appends text.

    Attributes:
        pieces: The text; two constant pieces never stand side by side.
        part: Which group and which part of it (`unordered`): the parts of a group may stand in any order. None stays
            where it is.
    """

    pieces: tuple[Piece, ...]
    part: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Media(Node):
    """Appends a picture or a video.

    Attributes:
        source: The thing itself, or the argument that brings it.
        num_frames: Of a video that an argument brings; None for a picture.
        part: As in `Append`.
    """

    source: Image | Video | ArgumentRef
    num_frames: int | None = None
    part: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Node):
    """Continues by the model.

    Attributes:
        name: The variable; None where only the text matters.
        args: What the program asked for.
        reasoning: Model type where the program separates the reasoning from the answer.
    """

    name: str | None = None
    args: SamplingArgs = SamplingArgs()  # noqa: RUF009 - frozen
    reasoning: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choose(Node):
    """Lets the model choose. Attributes as in `ir.Select`; a choice is text in pieces."""

    name: str | None = None
    choices: tuple[TextValue, ...]
    method: str
    temperature: float = 0.0
    seed: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Node):
    """Opens or closes a turn."""

    role: Role
    is_begin: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scope(Node):
    """Begins or ends the text that becomes the variable `name`."""

    name: str
    is_begin: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadText(Node):
    """Makes the stream's whole text, as it is here, a value."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assign(Node):
    """Gives the variable `name` a value."""

    name: str
    value: Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Node):
    """Begins `branches`, new streams that go on from here.

    Attributes:
        branches: Their numbers.
        offsets: `position_ids_offset`, one per branch.
    """

    branches: tuple[int, ...]
    offsets: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Join(Node):
    """Ends `branches`, which were forked from this stream."""

    branches: tuple[int, ...]
    mode: JoinMode


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """Nodes that run or do not, together.

    Attributes:
        nodes: In program order. They extend the stream of the node that holds them, or streams opened among them.
        outputs: What the variables that they set hold at their end.
    """

    nodes: "tuple[AnyNode, ...]"
    outputs: Values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cond(Node):
    """Runs one of two blocks.

    Attributes:
        condition: Of the first.
        then, otherwise: The blocks.
        before: What variables that only one of the blocks sets hold if it does not run.
    """

    condition: Condition
    then: Block
    otherwise: Block
    before: Values = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop(Node):
    """Runs `body` at least once, until `until` holds, `max_rounds` times at most.

    Attributes:
        body: The block. In it, and in `until`, a `ValueRef` to the loop is what the round before left.
        until: Looked at after each round; None runs all rounds.
        max_rounds: Bound.
        before: What variables that the body sets hold before the first round.
    """

    body: Block
    until: Condition | None = None
    max_rounds: int
    before: Values = ()


AnyNode = Open | Append | Media | Generate | Choose | Turn | Scope | ReadText | Assign | Fork | Join | Cond | Loop


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """What a run has to give: text (numbers are written as text), a picture or a video."""

    name: str
    kind: ArgumentKind


_PLAIN = frozenset((str, int, float, bool, type(None)))


def children(part: Any) -> Sequence[Any]:
    """The parts that a part of a graph directly holds, in its fields or as a tuple. Texts and numbers are none."""
    held = part if isinstance(part, tuple) else [getattr(part, name) for name in _field_names(type(part))]
    return [child for child in held if type(child) not in _PLAIN]


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    is_part = dataclasses.is_dataclass(kind) and kind.__module__ == __name__
    return tuple(field.name for field in dataclasses.fields(kind)) if is_part else ()


def parts(part: Any) -> Iterator[Any]:
    """A part of a graph and all that it holds, each before its own parts."""
    yield part
    for child in children(part):
        yield from parts(child)


def refs(part: Any) -> "Iterator[ArgumentRef | ValueRef]":
    """The arguments and variables that a part of a graph reads, its blocks included."""
    return (inner for inner in parts(part) if isinstance(inner, ArgumentRef | ValueRef))


def walk(block: Block) -> "Iterator[AnyNode]":
    """All nodes of a block, those of inner blocks behind the node that holds them."""
    for node in block.nodes:
        yield node
        for child in children(node):
            if isinstance(child, Block):
                yield from walk(child)


def kind_of(node: Node) -> str:
    """The name of a kind of node, as JSON has it."""
    return type(node).__name__.lower()


def describe(node: Node) -> str:
    """How messages name a node: `node 7 (gen 'verdict', essay.py:12)`."""
    kind = {Generate: "gen", Choose: "select"}.get(type(node)) or kind_of(node)
    name = getattr(node, "name", None)
    return f"node {node.id} ({f'{kind} {name!r}' if name else kind}, {node.line})"
