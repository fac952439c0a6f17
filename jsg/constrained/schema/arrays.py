"""Arrays as expressions: the items in their places, how many there are, and what they must be."""

import dataclasses
import itertools
import math

from jsg.constrained.ir import (
    EMPTY,
    MAX_ONCE,
    NEVER,
    Automaton,
    Bag,
    BagItem,
    Expr,
    Repeat,
    alt,
    any_of,
    separated,
    seq,
)
from jsg.constrained.schema.consts import const_expr
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.shapes import NEVER as NEVER_NODE
from jsg.constrained.schema.shapes import Array, NodeName
from jsg.constrained.schema.unequal import are_apart, few_values
from jsg.errors import GrammarError

_MAX_ROWS = 256
"""Of unequal items in places of their own."""


def array_expr(scope: Scope, shape: Array, where: str) -> Expr:
    """An array with its brackets; NEVER where no array is valid.

    Raises:
        GrammarError: `uniqueItems` asks for more than a grammar can say.
    """
    most = _most_items(scope, shape)
    if most is not None and most < shape.min_items:
        return NEVER
    if shape.is_unique and (most is None or most > 1):
        content = _unique(scope, shape, most, where)
    else:
        content = _in_places(scope, shape, most)
    options: list[Expr] = []
    if shape.min_items == 0 and shape.some is None:
        options.append(scope.spacing.empty("[]"))
    if content != NEVER:
        options.append(scope.spacing.enclosed("[", content, "]"))
    return alt(*options)


def _most_items(scope: Scope, shape: Array) -> int | None:
    """The most items that there can be. An array ends before an item that no value is valid for."""
    most = shape.max_items
    for i, node in enumerate(shape.prefix):
        if not scope.shapes(node):
            return i if most is None else min(i, most)
    if not scope.shapes(shape.items):
        return len(shape.prefix) if most is None else min(len(shape.prefix), most)
    return most


def _in_places(scope: Scope, shape: Array, most: int | None) -> Expr:
    """One item or more: the prefix, one item after another, then the others; NEVER where there can be none."""
    spacing, prefix = scope.spacing, shape.prefix[:most]
    count = len(prefix)
    rest_shape = dataclasses.replace(shape, prefix=(), min_items=max(0, shape.min_items - count))
    rest = _run(scope, rest_shape, None if most is None else most - count)
    if not prefix:
        return rest
    edges: list[tuple[tuple[Expr, int], ...]] = []
    for i, node in enumerate(prefix):
        edges.append(((seq(spacing.comma if i else EMPTY, scope.value(node)), i + 1),))
    edges.append(() if rest == NEVER else ((seq(spacing.comma, rest), count + 1),))
    edges.append(())
    accepting = {count + 1}
    if shape.some is None:
        accepting.update(range(max(1, shape.min_items), count + 1))
    return Automaton(tuple(edges), frozenset(accepting))


def _run(scope: Scope, shape: Array, most: int | None) -> Expr:
    """One item or more after the prefix, one of them valid for `some`; NEVER where there can be none."""
    if most == 0 or not scope.shapes(shape.items):
        return NEVER
    items, comma, least = scope.value(shape.items), scope.spacing.comma, max(1, shape.min_items)
    if shape.some is None:
        return Repeat(items, least, most, comma)
    if not scope.shapes(shape.some):
        return NEVER
    some = BagItem(scope.value(shape.some), is_once=True, is_required=True)
    return Bag((some, BagItem(items)), comma, least, most)


def _unique(scope: Scope, shape: Array, most: int | None, where: str) -> Expr:
    """Items that differ: each is one of a few values that stand once, or they have places that share no value."""
    count = len(shape.prefix) if most is None else min(most, len(shape.prefix))
    if shape.some is None and count == most:
        found = _unequal(scope, shape, shape.prefix[:count])
        if found is not None:
            return found
    values = few_values(scope, shape.items)
    if values is None or len(values) > MAX_ONCE or shape.prefix or shape.some is not None:
        raise GrammarError(
            f"uniqueItems can be enforced only where the items are one set of at most {MAX_ONCE} values (an enum, "
            f"booleans, a range of integers), or there is one place for each item and no two places share a value, and "
            f"that is not so at {where}; leave uniqueItems out, give the items an enum, or set maxItems to 1"
        )
    limit = len(values) if most is None else min(most, len(values))
    if limit < shape.min_items:
        return NEVER
    items = tuple(BagItem(const_expr(scope.spacing, text, scope.order), is_once=True) for text in values.values())
    return Bag(items, scope.spacing.comma, max(1, shape.min_items), limit)


def _unequal(scope: Scope, shape: Array, places: tuple[NodeName, ...]) -> Expr | None:
    """Items that differ, each in a place of its own; None where that is not known, or takes too many rows."""
    if are_apart(scope, places):
        return _in_places(scope, dataclasses.replace(shape, prefix=places, items=NEVER_NODE), len(places))
    choices: list[dict[str, str]] = []
    for node in places:
        values = few_values(scope, node)
        if values is None or math.prod(map(len, choices)) * len(values) > _MAX_ROWS:
            return None
        choices.append(values)
    rows = (
        row
        for length in range(max(1, shape.min_items), len(places) + 1)
        for row in itertools.product(*(values.items() for values in choices[:length]))
        if len({key for key, _ in row}) == length
    )
    exprs = [
        separated([const_expr(scope.spacing, text, scope.order) for _, text in row], scope.spacing.comma)
        for row in rows
    ]
    return any_of(exprs)
