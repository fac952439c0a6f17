"""Makes expressions of arrays: which items come where, and how many there are."""

import dataclasses
from collections.abc import Sequence

from jsg.constrained.ir import EMPTY, MAX_ONCE, NEVER, Automaton, Bag, BagItem, Expr, Repeat, alt, any_of, seq
from jsg.constrained.schema.consts import const_expr
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.shapes import Array


def array_expr(scope: Scope, shape: Array) -> Expr:
    """An array with its brackets; NEVER where no array is valid."""
    most = _most_items(scope, shape)
    if most is not None and most < shape.min_items:
        return NEVER
    content = _in_places(scope, shape, most)
    options: list[Expr] = []
    if shape.min_items == 0 and not shape.some:
        options.append(scope.spacing.empty("[]"))
    if content != NEVER:
        options.append(scope.spacing.enclosed("[", content, "]"))
    return alt(*options)


def _most_items(scope: Scope, shape: Array) -> int | None:
    """The highest possible number of items. An array ends before an item for which no value is valid."""
    most = shape.max_items
    for i, node in enumerate(shape.prefix):
        if not scope.shapes(node):
            return i if most is None else min(i, most)
    if not scope.shapes(shape.items):
        return len(shape.prefix) if most is None else min(len(shape.prefix), most)
    return most


def _in_places(scope: Scope, shape: Array, most: int | None) -> Expr:
    """At least one item: those of the prefix in order, then the others; NEVER where no item is possible."""
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
    if not shape.some:
        accepting.update(range(max(1, shape.min_items), count + 1))
    return Automaton(tuple(edges), frozenset(accepting))


def _run(scope: Scope, shape: Array, most: int | None) -> Expr:
    """At least one item after the prefix, one of them valid for `some`; NEVER where no item is possible."""
    if most == 0 or not scope.shapes(shape.items):
        return NEVER
    comma, least = scope.spacing.comma, max(1, shape.min_items)
    if shape.values is not None:
        return _unique(scope, shape.values, least, most)
    items = scope.value(shape.items)
    if not shape.some:
        return Repeat(items, least, most, comma)
    node = shape.some[0][0]
    if not scope.shapes(node):
        return NEVER
    some = BagItem(scope.value(node), is_once=True, is_required=True)
    return Bag((some, BagItem(items)), comma, least, most)


def _unique(scope: Scope, values: Sequence[str], least: int, most: int | None) -> Expr:
    """At least one of these values, each at most once."""
    options, comma = [const_expr(scope, value) for value in values], scope.spacing.comma
    if len(options) <= MAX_ONCE:
        return Bag(tuple(BagItem(option, is_once=True) for option in options), comma, least, most)
    pairs = [seq(one, comma, any_of(options[:i] + options[i + 1 :])) for i, one in enumerate(options)]
    return any_of(pairs if least == 2 else options + pairs)
