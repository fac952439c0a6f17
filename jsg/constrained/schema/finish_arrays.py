"""Makes shapes of the alternatives of arrays. An item that `some` asks for is in the prefix or after it."""

import dataclasses
import itertools
from collections.abc import Iterator
from decimal import Decimal

from jsg.constrained.ir import MAX_ONCE
from jsg.constrained.schema.alternatives import AlternativeShape
from jsg.constrained.schema.formulas import Formulas
from jsg.constrained.schema.judge import fits_number
from jsg.constrained.schema.shapes import NEVER, Array, Boolean, Json, NodeName, Null, Number
from jsg.constrained.schema.values import TYPES, key_of, text_of
from jsg.errors import GrammarError

MAX_PAIRED = 128
"""Most values of the items of a unique array that has at most two. For each value the others are written out."""
MAX_RANGE = 20
"""How many times as long as the list of its values a range of integers may be, of which others are left out."""


def finish_array(formulas: Formulas, shape: Array, where: NodeName) -> Iterator[Array]:
    """The shapes whose values are those of the alternative.

    Raises:
        GrammarError: The alternative has more than one `some`.
    """
    if len(shape.some) > 1:
        raise GrammarError(
            f"items at {where}: the array must be valid for more than one schema with `not` over its items, which is "
            "not supported; remove one of them"
        )
    for alternative in _placed(formulas, shape, *shape.some[0]) if shape.some else (shape,):
        array = _clipped(formulas, alternative)
        if array is not None and array.is_unique:
            array = _with_values(formulas, array, where)
        if array is not None:
            yield array


def _placed(formulas: Formulas, shape: Array, node: NodeName, start: int) -> Iterator[Array]:
    """An alternative for each location of the item that is valid for the node: each in the prefix, and after it."""
    conjoin = formulas.context.nodes.conjoin
    prefix = shape.prefix + (shape.items,) * (start - len(shape.prefix))
    array = dataclasses.replace(shape, prefix=prefix, some=())
    for i in range(start, len(prefix)):
        chosen = (*prefix[:i], conjoin(prefix[i], node), *prefix[i + 1 :])
        yield dataclasses.replace(array, prefix=chosen, min_items=max(shape.min_items, i + 1))
    yield dataclasses.replace(array, some=((conjoin(shape.items, node), len(prefix)),))


def _clipped(formulas: Formulas, array: Array) -> Array | None:
    """The array with its length limited to what its nodes allow; None where no array is valid."""
    is_never = formulas.judge.is_never
    prefix = tuple(itertools.takewhile(lambda node: not is_never(node), array.prefix))
    most = array.max_items
    items = array.items if len(prefix) == len(array.prefix) and not is_never(array.items) else NEVER
    if items == NEVER:
        most = len(prefix) if most is None else min(most, len(prefix))
    if array.some and (is_never(array.some[0][0]) or (most is not None and most <= len(prefix))):
        return None
    if most is not None:
        prefix = prefix[:most]
        if array.min_items > most:
            return None
    return dataclasses.replace(array, prefix=prefix, items=items, max_items=most)


def _with_values(formulas: Formulas, array: Array, where: NodeName) -> Array | None:
    """The array, which is unique, with the values of its items; None where they are too few.

    Raises:
        GrammarError: Items of two places may be equal, or the items that may be repeated have too many values.
    """
    most, judge = array.max_items, formulas.judge
    others = most is None or most > len(array.prefix)
    nodes = (*array.prefix, array.items) if others else array.prefix
    is_disjoint = all(
        judge.is_never(formulas.context.nodes.conjoin(*pair)) for pair in itertools.combinations(nodes, 2)
    )
    num_others = None if most is None else most - len(array.prefix)
    if is_disjoint and num_others is not None and num_others <= 1:
        return array
    limit = MAX_PAIRED if num_others == 2 else MAX_ONCE
    values = _values(formulas, array.items, limit) if is_disjoint and not array.some else None
    if values is None:
        raise GrammarError(
            f"uniqueItems at {where} is supported if the items are at most {limit} known values (by enum, const, type "
            "boolean or a range of integers), and no two places of prefixItems have a value in common; otherwise leave "
            "it out, set maxItems to 1, or list the values in an enum"
        )
    most = len(array.prefix) + min(len(values), len(values) if num_others is None else num_others)
    return None if array.min_items > most else dataclasses.replace(array, max_items=most, values=values)


def _values(formulas: Formulas, node: NodeName, limit: int) -> tuple[str, ...] | None:
    """The canonical texts of the values of a node; None where there are more than `limit`, or they are not known."""
    found: dict[str, str] = {}
    for kind in TYPES:
        for alternative in formulas.of_node(node, kind):
            if alternative.values is not None:
                values = formulas.judge.listed(alternative)
            elif formulas.judge.is_empty(alternative):
                continue
            else:
                values = _few(alternative.shape, limit)
            if values is None or alternative.refusals:
                return None
            found.update((key_of(value, "an item"), text_of(value, "an item")) for value in values)
            if len(found) > limit:
                return None
    return tuple(found.values())


def _few(shape: AlternativeShape, limit: int) -> list[Json] | None:
    """The values of a shape where it has few."""
    match shape:
        case Null():
            return [None]
        case Boolean():
            return [False, True]
        case Number(True, Decimal() as low, Decimal() as high) if high - low < MAX_RANGE * limit:
            return [n for n in range(int(low), int(high) + 1) if fits_number(Decimal(n), shape)]
    return None
