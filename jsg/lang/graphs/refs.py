"""What the parts of a graph read: the arguments and variables that they name."""

from collections.abc import Iterable, Iterator
from typing import assert_never

from jsg.lang.graphs.graph import (
    AllOf,
    AnyNode,
    AnyOf,
    Append,
    ArgumentRef,
    Assign,
    Block,
    Choose,
    Cond,
    Condition,
    ConstantValue,
    Contains,
    DictValue,
    Equals,
    Fork,
    Generate,
    Join,
    ListValue,
    Loop,
    Matches,
    Media,
    Not,
    Open,
    Piece,
    ReadText,
    Scope,
    StateValue,
    TextValue,
    Turn,
    Value,
    ValueRef,
    VariableValue,
)

Ref = ArgumentRef | ValueRef


def refs_of_node(node: AnyNode) -> Iterator[Ref]:
    """What a node reads, its blocks included."""
    match node:
        case Append():
            yield from _refs(node.pieces)
        case Media():
            if isinstance(node.source, ArgumentRef):
                yield node.source
        case Choose():
            for choice in node.choices:
                yield from _refs(choice.pieces)
        case Assign():
            yield from refs_of_value(node.value)
        case Cond():
            yield from refs_of_condition(node.condition)
            yield from _refs_of_values(node.before)
            yield from refs_of_block(node.then)
            yield from refs_of_block(node.otherwise)
        case Loop():
            yield from _refs_of_values(node.before)
            yield from refs_of_block(node.body)
            if node.until is not None:
                yield from refs_of_condition(node.until)
        case Open() | Generate() | Turn() | Scope() | ReadText() | Fork() | Join():
            pass
        case _:
            assert_never(node)


def refs_of_block(block: Block) -> Iterator[Ref]:
    """What the nodes and outputs of a block read."""
    for node in block.nodes:
        yield from refs_of_node(node)
    yield from _refs_of_values(block.outputs)


def refs_of_value(value: Value) -> Iterator[Ref]:
    """What a value reads."""
    match value:
        case TextValue(pieces):
            yield from _refs(pieces)
        case ListValue(items):
            for item in items:
                yield from refs_of_value(item)
        case DictValue(items) | StateValue(outputs=items):
            yield from _refs_of_values(items)
        case VariableValue(ref):
            yield ref
        case ConstantValue():
            pass
        case _:
            assert_never(value)


def refs_of_condition(condition: Condition) -> Iterator[Ref]:
    """What a condition reads."""
    match condition:
        case Equals(value, text) | Contains(value, text):
            yield from _refs(value.pieces)
            yield from _refs(text.pieces)
        case Matches(value):
            yield from _refs(value.pieces)
        case Not(inner):
            yield from refs_of_condition(inner)
        case AllOf(conditions) | AnyOf(conditions):
            for inner in conditions:
                yield from refs_of_condition(inner)
        case _:
            assert_never(condition)


def _refs_of_values(values: Iterable[tuple[str, Value]]) -> Iterator[Ref]:
    for _, value in values:
        yield from refs_of_value(value)


def _refs(pieces: Iterable[Piece]) -> Iterator[Ref]:
    for piece in pieces:
        if not isinstance(piece, str):
            yield piece
