"""The parts of a graph: frozen records of what a program appends to its streams.

Nodes are in program order: ids grow, and a node refers only to smaller ids. A node belongs to a stream. Nodes of one
stream run one after another; nodes of different streams wait only for the values that they name. `cond` and `loop` hold
their bodies as blocks of nodes.

    pieces of text          str · ArgumentRef · ValueRef
    values that are kept    TextValue · ListValue · TupleValue · DictValue · ConstantValue · VariableValue · StateValue
    conditions              Equals · Contains · Matches · Not · AllOf · AnyOf
    nodes                   Open · Append · Media · Generate · Choose · Turn · Scope · ReadText · Assign · Fork ·
                            Join · Cond · Loop

A kind of node is a dataclass here and a member of `AnyNode`. By the types of its fields `codec` writes and reads it,
and `parts` finds what it refers to. Two more files must know it: `tracing.traced_state` makes it, and `executor.driver`
runs it. Three know it if it sets variables (`shapes`), has rules of its own (`check`), or costs more than a step
(`executor.limits`). To all others it is a node like any other, unless they name it for the sake of speed or looks.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jsg.lang.words.ir import DecisionKind, Image, Role, SamplingArgs, Video
from jsg.lang.words.nesting import JoinMode

MAIN_STREAM = 0
"""The stream of the program itself. Others are those of forks and of called programs."""
ArgumentKind = Literal["text", "image", "video"]


@dataclasses.dataclass(frozen=True, slots=True)
class ArgumentRef:
    """The value that a run gives to an argument."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class ValueRef:
    """The value that node `node` gave to the variable `name`.

    Attributes:
        node: A `Generate`, `Choose`, `Scope` (its end), `ReadText`, `Assign`, `Join`, `Cond` or `Loop`. Within the
            body of a loop that loop stands for the round before.
        name: The variable; "" for a `ReadText`.
        index: The index of the value, where the variable is a list.
    """

    node: int
    name: str
    index: int | None = None


Piece = str | ArgumentRef | ValueRef
Constant = bool | int | float | None
type Values = tuple[tuple[str, "Value"], ...]
"""The values of variables, by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class TextValue:
    """Text put together from pieces, or the value of a single argument or variable as it is: text, a number, ....

    Attributes:
        pieces: The pieces.
        is_text: Whether the value of a single argument or variable becomes text, as an f-string makes it.
    """

    pieces: tuple[Piece, ...]
    is_text: bool = False

    @property
    def kept(self) -> "ArgumentRef | ValueRef | None":
        """The argument or variable whose value this is, whatever it is; None where it is text."""
        ref = self.pieces[0] if len(self.pieces) == 1 and not self.is_text else None
        return None if isinstance(ref, str) else ref


@dataclasses.dataclass(frozen=True, slots=True)
class ListValue:
    """A list."""

    items: "tuple[Value, ...]"


@dataclasses.dataclass(frozen=True, slots=True)
class TupleValue:
    """A tuple. JSON has none, so a server answers with a list, and says where the tuples are."""

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
    """The value of a variable of which only the run knows whether it is a list or one value."""

    ref: ValueRef


@dataclasses.dataclass(frozen=True, slots=True)
class StateValue:
    """The state of a called program.

    Attributes:
        stream: The number of its stream.
        variables: Its variables.
    """

    stream: int
    variables: Values


Value = TextValue | ListValue | TupleValue | DictValue | ConstantValue | VariableValue | StateValue


@dataclasses.dataclass(frozen=True, slots=True)
class Equals:
    """`value` is `text`, apart from white space around both."""

    value: TextValue
    text: TextValue


@dataclasses.dataclass(frozen=True, slots=True)
class Contains:
    """`text` is somewhere in `value`."""

    value: TextValue
    text: TextValue


@dataclasses.dataclass(frozen=True, slots=True)
class Matches:
    """All of `value` matches the regular expression, in the dialect of `gen(regex=...)`."""

    value: TextValue
    pattern: str


@dataclasses.dataclass(frozen=True, slots=True)
class Not:
    """`condition` does not hold."""

    condition: "Condition"


@dataclasses.dataclass(frozen=True, slots=True)
class AllOf:
    """Each of `conditions` holds."""

    conditions: "tuple[Condition, ...]"


@dataclasses.dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of `conditions` holds."""

    conditions: "tuple[Condition, ...]"


Condition = Equals | Contains | Matches | Not | AllOf | AnyOf


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The fields of every node.

    Attributes:
        id: A number that is larger than the ids of all nodes before.
        stream: The number of the stream that the node belongs to.
        line: File name and line of the program's statement, such as `essay.py:12`.
    """

    id: int
    stream: int
    line: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Open(Node):
    """Begins an empty stream: the program's own, or that of a program it calls.

    Attributes:
        program: The name of the function.
        defaults: The defaults that the call gave to its gens, or None. As when it is interpreted, a called program
            takes no defaults from the run of its caller.
        num_api_spec_tokens: The argument of `function`.
    """

    program: str
    defaults: SamplingArgs | None = None
    num_api_spec_tokens: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Append(Node):
    """Appends text.

    Attributes:
        pieces: The text. Two constant pieces are never next to each other.
        part: For `unordered`, the numbers of a group and of a part in it; the parts of a group may be in any order.
    """

    pieces: tuple[Piece, ...]
    part: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Media(Node):
    """Appends a picture or a video.

    Attributes:
        source: The picture or video, or the argument that brings it.
        num_frames: The number of frames of a video that an argument brings; None for a picture.
        part: The part of an unordered group, as in `Append`.
    """

    source: Image | Video | ArgumentRef
    num_frames: int | None = None
    part: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Node):
    """Lets the model continue.

    Attributes:
        name: The variable; None where only the text matters.
        args: The arguments of the gen.
        reasoning: The model type, where the program separates the reasoning from the answer.
    """

    name: str | None = None
    args: SamplingArgs = SamplingArgs()  # noqa: RUF009 - frozen
    reasoning: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choose(Node):
    """Lets the model choose, or decide. Its attributes are those of `ir.Select`."""

    name: str | None = None
    choices: tuple[TextValue, ...]
    method: str
    temperature: float = 0.0
    seed: int | None = None
    question: TextValue | None = None
    decision: DecisionKind | None = None

    @property
    def texts(self) -> tuple[TextValue, ...]:
        """The choices, and the question after them if there is one."""
        return self.choices if self.question is None else (*self.choices, self.question)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn(Node):
    """Opens or closes a turn."""

    role: Role
    is_begin: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scope(Node):
    """Begins or ends a scope, whose text becomes the variable `name`."""

    name: str
    is_begin: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadText(Node):
    """Reads the text that the stream has here."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assign(Node):
    """Gives the variable `name` a value."""

    name: str
    value: Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fork(Node):
    """Begins `branches`, new streams that continue from here.

    Attributes:
        branches: The numbers of the streams.
        offsets: `position_ids_offset`, one number for each branch.
    """

    branches: tuple[int, ...]
    offsets: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Gathered:
    """A variable that a join makes a list: the value of each branch that has set it, and None for the others.

    Attributes:
        name: The variable.
        is_sure: Whether a branch sets it in every run. If not, and none does, it stays what it was.
        is_flat: Whether no branch sets it to a list or dictionary, so that text may read each item.
    """

    name: str
    is_sure: bool = True
    is_flat: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Join(Node):
    """Ends `branches`, which were forked from this stream.

    Attributes:
        branches: The numbers of their streams.
        mode: The argument of `join`.
        gathered: The variables that the branches set, with "gather_variable".
    """

    branches: tuple[int, ...]
    mode: JoinMode
    gathered: tuple[Gathered, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """The body of a graph, a `cond` or a `loop`.

    Attributes:
        nodes: Its nodes, in program order. They extend the stream of the node that holds the block, or streams that are
            opened in the block.
        outputs: The values, at the end of the block, of the variables that it sets.
    """

    nodes: "tuple[AnyNode, ...]"
    outputs: Values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cond(Node):
    """Runs one of two blocks.

    Attributes:
        condition: Decides for the first block.
        then, otherwise: The blocks.
        before: The values that variables keep if the block that sets them does not run.
    """

    condition: Condition
    then: Block
    otherwise: Block
    before: Values = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop(Node):
    """Runs `body` at least once, until `until` holds, and at most `max_rounds` times.

    Attributes:
        body: The block. In it, and in `until`, a `ValueRef` to the loop stands for the round before.
        until: The condition after each round on which the loop ends; None runs all rounds.
        max_rounds: The largest number of rounds.
        before: The values, before the first round, of the variables that the body sets or reads.
    """

    body: Block
    until: Condition | None = None
    max_rounds: int
    before: Values = ()


AnyNode = Open | Append | Media | Generate | Choose | Turn | Scope | ReadText | Assign | Fork | Join | Cond | Loop


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a graph: text or a number (both of the kind text), a picture or a video."""

    name: str
    kind: ArgumentKind


_PLAIN = frozenset((str, int, float, bool, type(None)))


def children(part: Any) -> Sequence[Any]:
    """Gives the parts in the fields, or in the tuple, of a part of a graph. Texts and numbers are no parts."""
    held = part if isinstance(part, tuple) else [getattr(part, name) for name in _field_names(type(part))]
    return [child for child in held if type(child) not in _PLAIN]


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
    is_part = dataclasses.is_dataclass(kind) and kind.__module__ == __name__
    return tuple(field.name for field in dataclasses.fields(kind)) if is_part else ()


def parts(part: Any) -> Iterator[Any]:
    """Gives a part of a graph and all parts in it, each before its own parts."""
    yield part
    for child in children(part):
        yield from parts(child)


def refs(part: Any) -> "Iterator[ArgumentRef | ValueRef]":
    """Gives the arguments and variables that a part of a graph reads, its blocks included."""
    return (inner for inner in parts(part) if isinstance(inner, ArgumentRef | ValueRef))


def walk(block: Block) -> "Iterator[AnyNode]":
    """Gives all nodes of a block. Those of inner blocks come after the node that holds them."""
    for node in block.nodes:
        yield node
        for child in children(node):
            if isinstance(child, Block):
                yield from walk(child)


def kind_of(node: Node) -> str:
    """Gives the name of the kind of a node, as it is in JSON."""
    return type(node).__name__.lower()


def describe(node: Node) -> str:
    """Gives the name of a node in messages, such as `node 7 (gen 'verdict', essay.py:12)`."""
    kind = {Generate: "gen", Choose: "select"}.get(type(node)) or kind_of(node)
    name = getattr(node, "name", None)
    return f"node {node.id} ({f'{kind} {name!r}' if name else kind}, {node.line})"
