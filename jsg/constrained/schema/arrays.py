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
from jsg.constrained.schema.shapes import Array, Contains, NodeName
from jsg.constrained.schema.unequal import are_apart, few_values
from jsg.errors import GrammarError

_MAX_STATES = 2_000
"""Of the automaton for `contains` beside other counts."""

_MAX_ROWS = 256
"""Of unequal items in places of their own."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Content:
    """What stands between the brackets: whether that may be nothing, and what it is where it is something."""

    can_be_empty: bool
    some: Expr


def array_expr(scope: Scope, shape: Array, where: str) -> Expr:
    """An array with its brackets; NEVER where no array is valid.

    Raises:
        GrammarError: `uniqueItems` or `contains` asks for more than a grammar can say.
    """
    most = _most_items(scope, shape)
    if most is not None and most < shape.min_items:
        return NEVER
    if shape.is_unique and (most is None or most > 1):
        content = _unique(scope, shape, most, where)
    else:
        content = _in_places(scope, shape, most, where)
    options: list[Expr] = []
    if content.can_be_empty:
        options.append(scope.spacing.empty("[]"))
    if content.some != NEVER:
        options.append(scope.spacing.enclosed("[", content.some, "]"))
    return alt(*options)


def _most_items(scope: Scope, shape: Array) -> int | None:
    """The most items there can be; what has no valid value ends an array before it."""
    most = shape.max_items
    for i, node in enumerate(shape.prefix):
        if not scope.shapes(node):
            return i if most is None else min(i, most)
    if not scope.shapes(shape.items):
        return len(shape.prefix) if most is None else min(len(shape.prefix), most)
    return most


def _in_places(scope: Scope, shape: Array, most: int | None, where: str) -> _Content:
    """The prefix, one item after another, then the others."""
    spacing, prefix = scope.spacing, shape.prefix[:most]
    count = len(prefix)
    rest_shape = dataclasses.replace(shape, prefix=(), min_items=max(0, shape.min_items - count))
    rest = _run(scope, rest_shape, None if most is None else most - count, where)
    if not prefix:
        return rest
    edges: list[tuple[tuple[Expr, int], ...]] = []
    for i, node in enumerate(prefix):
        edges.append(((seq(spacing.comma if i else EMPTY, scope.value(node)), i + 1),))
    edges.append(() if rest.some == NEVER else ((seq(spacing.comma, rest.some), count + 1),))
    edges.append(())
    accepting = {count + 1}
    needs_more = shape.contains is not None and shape.contains.least > 0
    if not needs_more:
        accepting.update(range(max(1, shape.min_items), count + 1))
    return _Content(shape.min_items == 0 and not needs_more, Automaton(tuple(edges), frozenset(accepting)))


def _run(scope: Scope, shape: Array, most: int | None, where: str) -> _Content:
    """Items after the prefix: a counted run, and how many are of a kind."""
    if shape.contains is not None and (shape.contains.least or shape.contains.most is not None):
        return _with_contains(scope, shape, shape.contains, most, where)
    if most == 0 or not scope.shapes(shape.items):
        return _Content(shape.min_items == 0, NEVER)
    run = Repeat(scope.value(shape.items), max(1, shape.min_items), most, scope.spacing.comma)
    return _Content(shape.min_items == 0, run)


def _unique(scope: Scope, shape: Array, most: int | None, where: str) -> _Content:
    """Unequal items: each out of a few, of which each may stand in the array once, or in places that share no value."""
    count = len(shape.prefix) if most is None else min(most, len(shape.prefix))
    if shape.contains is None and count == most:
        found = _unequal(scope, shape, shape.prefix[:count])
        if found is not None:
            return found
    values = few_values(scope, shape.items)
    if values is None or len(values) > MAX_ONCE or shape.prefix or shape.contains is not None:
        raise GrammarError(
            f"uniqueItems can be enforced only where the items are one set of at most {MAX_ONCE} values (an enum, "
            f"booleans, a range of integers), or there is one place for each item and no two places share a value, and "
            f"that is not so at {where}; leave uniqueItems out, give the items an enum, or set maxItems to 1"
        )
    limit = len(values) if most is None else min(most, len(values))
    if limit < shape.min_items:
        return _Content(False, NEVER)
    items = tuple(BagItem(const_expr(scope.spacing, text, scope.order), is_once=True) for text in values.values())
    return _Content(shape.min_items == 0, Bag(items, scope.spacing.comma, max(1, shape.min_items), limit))


def _unequal(scope: Scope, shape: Array, places: tuple[NodeName, ...]) -> _Content | None:
    """Unequal items in places of their own; None where that cannot be told, or not in a few rows."""
    if are_apart(scope, places):
        return _in_places(scope, dataclasses.replace(shape, prefix=places, items=NEVER_NODE), len(places), "")
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
    return _Content(shape.min_items == 0, any_of(exprs))


def _with_contains(scope: Scope, shape: Array, contains: Contains, most: int | None, where: str) -> _Content:
    """So many items of a kind, in any places.

    Where it is known what is not of the kind, states count the items that are. Else, only `least` matters: so many
    items are taken as being of the kind, and the others are anything.
    """
    spacing = scope.spacing
    kind = scope.value(contains.node) if scope.shapes(contains.node) else NEVER
    others = scope.value(contains.others if contains.others is not None else shape.items)
    if contains.others is not None and not scope.shapes(contains.others):
        others = NEVER
    can_be_empty = shape.min_items == 0 and contains.least == 0
    if contains.most is None and contains.least == 1:
        first = BagItem(kind, is_required=True, is_once=True)
        if kind == NEVER:
            return _Content(False, NEVER)
        if most == 0:
            return _Content(False, NEVER)
        items = (first, BagItem(scope.value(shape.items)))
        return _Content(False, Bag(items, spacing.comma, max(1, shape.min_items), most))
    if contains.most == 0:
        run = Repeat(others, max(1, shape.min_items), most, spacing.comma)
        is_never = others == NEVER or most == 0
        return _Content(can_be_empty, NEVER if is_never else run)
    return _Content(can_be_empty, _counting(shape, contains, most, (kind, others), spacing.comma, where))


def _counting(
    shape: Array, contains: Contains, most: int | None, kinds: tuple[Expr, Expr], comma: Expr, where: str
) -> Expr:
    """An automaton whose states are how many items there are, and how many of them are of the kind."""
    kind, others = kinds
    kind_limit = contains.least if contains.most is None else contains.most
    # Beyond these counts nothing depends on how many items there are; one says that a comma comes first.
    limit = max(1, shape.min_items) if most is None else most
    if (kind_limit + 1) * (limit + 1) > _MAX_STATES:
        raise GrammarError(
            f"contains beside minItems or maxItems can be enforced up to {_MAX_STATES} combinations of their counts, "
            f"but there are more at {where}; use smaller numbers"
        )
    width = kind_limit + 1
    edges: list[tuple[tuple[Expr, int], ...]] = []
    accepting: set[int] = set()
    for count in range(limit + 1):
        after = min(count + 1, limit)
        is_full = most is not None and count == most
        lead = comma if count else EMPTY
        for found in range(width):
            out: list[tuple[Expr, int]] = []
            if not is_full and others != NEVER:
                out.append((seq(lead, others), after * width + found))
            if not is_full and kind != NEVER and (found < kind_limit or contains.most is None):
                out.append((seq(lead, kind), after * width + min(found + 1, kind_limit)))
            edges.append(tuple(out))
            if count >= max(1, shape.min_items) and found >= contains.least:
                accepting.add(count * width + found)
    return Automaton(tuple(edges), frozenset(accepting))
