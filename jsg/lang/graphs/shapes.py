"""The variables that a node sets, and how text may read them."""

import dataclasses
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
    Join,
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
from jsg.lang.words.ir import REASONING_SUFFIX


@dataclasses.dataclass(frozen=True, slots=True)
class Many:
    """The shape of a list or tuple, whose items text may read."""

    length: int
    is_tuple: bool = False


Shape = Many | None
"""The shape of a variable that text may read: None for one value."""
OPAQUE = Many(-1)
"""The shape of a variable that text may not read: a dictionary, a list of lists, or a list in some runs only."""


def defined(node: AnyNode) -> dict[str, Shape]:
    """Gives the shapes of the variables that a node sets, by name; a `ReadText` sets ""."""
    match node:
        case Generate(name=str(name), args=args, reasoning=reasoning):
            names = (name,) if reasoning is None else (name, name + REASONING_SUFFIX)
            return dict.fromkeys(names, Many(args.n) if args.n is not None and args.n > 1 else None)
        case Choose(name=str(name)) | Scope(name=name, is_begin=False):
            return {name: None}
        case ReadText():
            return {"": None}
        case Assign(name=name, value=value):
            return {name: shape_of(value)}
        case Join(branches=branches, gathered=gathered):
            length = Many(len(branches))
            return {one.name: length if one.is_sure and one.is_flat else OPAQUE for one in gathered}
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
            is_flat = all(isinstance(item, TextValue | ConstantValue) for item in items)
            return Many(len(items), isinstance(value, TupleValue)) if is_flat else OPAQUE
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
