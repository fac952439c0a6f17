"""For `uniqueItems`: the values of a node where they are few, and whether nodes have no value in common."""

import json
import math
from collections.abc import Sequence
from decimal import Decimal

from jsg.constrained.ir import MAX_ONCE
from jsg.constrained.schema.judge import fits_number
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.shapes import Boolean, Const, NodeName, Null, Number, Shape
from jsg.constrained.schema.values import key_of, type_of


def few_values(scope: Scope, node: NodeName) -> dict[str, str] | None:
    """The valid values as canonical JSON, by a key that equal values share; None where there may be many."""
    values: dict[str, str] = {}
    for shape in scope.shapes(node):
        texts = _texts(shape)
        if texts is None:
            return None
        for text in texts:
            # Members of an object in another order make no other value.
            values.setdefault(key_of(json.loads(text, parse_float=Decimal), "a value"), text)
    return values


def are_apart(scope: Scope, nodes: Sequence[NodeName]) -> bool:
    """Whether no two of the nodes have a value in common, as far as their types and their few values tell."""
    known = set[str]()
    types_of_few, types_of_many = set[str](), set[str]()
    for node in nodes:
        values, types = few_values(scope, node), _types(scope, node)
        if not types.isdisjoint(types_of_many):
            return False
        if values is None:
            if not types.isdisjoint(types_of_few):
                return False
            types_of_many |= types
            continue
        if not known.isdisjoint(values):
            return False
        known.update(values)
        types_of_few |= types
    return True


def _types(scope: Scope, node: NodeName) -> set[str]:
    return {
        type_of(json.loads(shape.text)) if isinstance(shape, Const) else type(shape).__name__.lower()
        for shape in scope.shapes(node)
    }


def _texts(shape: Shape) -> list[str] | None:
    match shape:
        case Const(text):
            return [text]
        case Boolean():
            return ["true", "false"]
        case Null():
            return ["null"]
        case Number(is_integer=True, min=Decimal() as low, max=Decimal() as high) if high - low <= MAX_ONCE:
            numbers = (Decimal(number) for number in range(math.ceil(low), math.floor(high) + 1))
            return [str(number) for number in numbers if fits_number(number, shape)]
    return None
