"""The variables that a node sets, and how text may read them."""

from collections.abc import Iterable
from typing import assert_never

from jsg.lang.graphs.nodes import (
    AnyNode,
    Assign,
    Choose,
    Cond,
    ConstantValue,
    DictValue,
    Generate,
    ListValue,
    Loop,
    ReadText,
    Scope,
    StateValue,
    TextValue,
    TupleValue,
    Value,
    VariableValue,
)
from jsg.lang.ir import REASONING_SUFFIX

Shape = int | None
"""The shape of a variable that text may read: None for one value, or the length of a list."""
OPAQUE = -1
"""The shape of a variable that text may not read: a dictionary, a list of lists, or a list in some runs only."""


def defined(node: AnyNode) -> dict[str, Shape]:
    """Gives the shapes of the variables that a node sets, by name; a `ReadText` sets ""."""
    match node:
        case Generate(name=str(name), args=args, reasoning=reasoning):
            names = (name,) if reasoning is None else (name, name + REASONING_SUFFIX)
            return dict.fromkeys(names, args.n if args.n is not None and args.n > 1 else None)
        case Choose(name=str(name)) | Scope(name=name, is_begin=False):
            return {name: None}
        case ReadText():
            return {"": None}
        case Assign(name=name, value=value):
            return {name: shape_of(value)}
        case Cond(then=then, otherwise=otherwise, before=before):
            return merged_shapes(then.outputs, otherwise.outputs, before)
        case Loop(body=body, before=before):
            return merged_shapes(body.outputs, before)
        case _:
            return {}


def shape_of(value: Value) -> Shape:
    """Gives the shape of a variable that holds this value."""
    match value:
        case ListValue(items) | TupleValue(items):
            return len(items) if all(isinstance(item, TextValue | ConstantValue) for item in items) else OPAQUE
        case TextValue() | ConstantValue():
            return None
        case DictValue() | StateValue() | VariableValue():
            return OPAQUE
        case _:
            assert_never(value)


def merged_shapes(*sides: Iterable[tuple[str, Value]]) -> dict[str, Shape]:
    """Gives the shapes of variables that hold the value of one of several sides, by name."""
    shapes: dict[str, Shape] = {}
    for side in sides:
        for name, value in side:
            shape = shape_of(value)
            shapes[name] = shape if shapes.get(name, shape) == shape else OPAQUE
    return shapes
