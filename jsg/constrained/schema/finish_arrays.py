"""Makes shapes of the drafts of arrays; `contains` becomes part of the items."""

import dataclasses
import itertools
from collections.abc import Iterator

from jsg.constrained.schema.drafts import Items, Kind, least_of
from jsg.constrained.schema.formulas import Formulas
from jsg.constrained.schema.shapes import ANY, NEVER, Array, Contains, NodeName
from jsg.errors import GrammarError

MAX_COUNTED = 5
"""Items of a prefix that `contains` may count, apart from its simplest form."""


def finish_array(formulas: Formulas, shape: Items, where: NodeName) -> Iterator[Array]:
    """The shapes whose values are those of the draft.

    Raises:
        GrammarError: `contains` stands where it is not supported.
    """
    kinds: list[Kind] = []
    for kind in _merged(shape.contains):
        if formulas.judge.is_never(kind.node):
            if kind.least:
                return
        elif kind.node == ANY:
            shape = _counted(shape, kind)
        elif kind.most == 0:
            shape = _without(formulas, shape, kind)
        elif kind.least or kind.most is not None:
            kinds.append(kind)
    if len(kinds) > 1:
        raise GrammarError(f"contains at {where}: more than one that must hold for the same array is not supported")
    for one in _with_kind(formulas, shape, kinds[0], where) if kinds else (_array(shape, None),):
        array = _clipped(formulas, one)
        if array is not None:
            yield array


def _merged(kinds: tuple[Kind, ...]) -> list[Kind]:
    """With the counts of equal kinds put together."""
    found: dict[tuple[NodeName, int], Kind] = {}
    for kind in kinds:
        key = (kind.node, kind.start)
        if (other := found.get(key)) is not None:
            kind = Kind(kind.node, max(kind.least, other.least), least_of(kind.most, other.most), kind.start)
        found[key] = kind
    return list(found.values())


def _counted(shape: Items, kind: Kind) -> Items:
    """With bounds of the length, as every item is of the kind."""
    least = max(shape.min_items, kind.start + kind.least) if kind.least else shape.min_items
    most = shape.max_items if kind.most is None else least_of(shape.max_items, kind.start + kind.most)
    return dataclasses.replace(shape, min_items=least, max_items=most)


def _without(formulas: Formulas, shape: Items, kind: Kind) -> Items:
    """Without items of the kind."""
    other = _other(formulas, kind.node)
    conjoin = formulas.context.nodes.conjoin
    prefix = [conjoin(node, other) if i >= kind.start else node for i, node in enumerate(_padded(shape, kind.start))]
    return dataclasses.replace(shape, prefix=tuple(prefix), items=conjoin(shape.items, other))


def _with_kind(formulas: Formulas, shape: Items, kind: Kind, where: NodeName) -> Iterator[Array]:
    """As alternatives that count items after the prefix only."""
    conjoin = formulas.context.nodes.conjoin
    if kind.least and kind.most is not None and kind.most < kind.least:
        return
    prefix = _padded(shape, kind.start)
    length = len(prefix)
    shape = dataclasses.replace(shape, prefix=prefix)
    if kind.least == 1 and kind.most is None:
        for i in range(kind.start, length):
            chosen = (*prefix[:i], conjoin(prefix[i], kind.node), *prefix[i + 1 :])
            yield _array(dataclasses.replace(shape, prefix=chosen, min_items=max(shape.min_items, i + 1)), None)
        yield _array(shape, _contains(formulas, shape.items, kind, kind.least, kind.most))
        return
    if length - kind.start > MAX_COUNTED:
        raise GrammarError(f"contains at {where}: counts over more than {MAX_COUNTED} prefixItems are not supported")
    other = _other(formulas, kind.node) if length > kind.start else NEVER
    for total in range(kind.start, length + 1):  # where the array ends: before that item of the prefix, or after all
        for choice in itertools.product((False, True), repeat=total - kind.start):
            found = sum(choice)
            least, most = kind.least - found, None if kind.most is None else kind.most - found
            if (most is not None and most < 0) or (total < length and least > 0):
                continue
            chosen = [conjoin(prefix[kind.start + i], kind.node if c else other) for i, c in enumerate(choice)]
            part = dataclasses.replace(
                shape,
                prefix=(*prefix[: kind.start], *chosen),
                min_items=max(shape.min_items, total if choice else 0),
                max_items=least_of(shape.max_items, total) if total < length else shape.max_items,
            )
            yield _array(part, _contains(formulas, shape.items, kind, max(least, 0), most) if total == length else None)


def _contains(formulas: Formulas, items: NodeName, kind: Kind, least: int, most: int | None) -> Contains | None:
    if not least and most is None:
        return None
    conjoin = formulas.context.nodes.conjoin
    other = _other(formulas, kind.node)
    has_other = most is not None or formulas.is_plain(other)
    return Contains(conjoin(items, kind.node), conjoin(items, other) if has_other else None, least, most)


def _other(formulas: Formulas, node: NodeName) -> NodeName:
    """The node of the values that are not valid for a node."""
    literals = formulas.context.nodes.literals(node)
    if not literals:
        return NEVER
    assert len(literals) == 1  # `contains` has one schema
    return formulas.context.nodes.node(-literals[0])


def _padded(shape: Items, length: int) -> tuple[NodeName, ...]:
    return shape.prefix + (shape.items,) * (length - len(shape.prefix))


def _array(shape: Items, contains: Contains | None) -> Array:
    return Array(shape.prefix, shape.items, shape.min_items, shape.max_items, contains, shape.is_unique)


def _clipped(formulas: Formulas, array: Array) -> Array | None:
    """With a length that the nodes allow; None where no array is one."""
    is_never = formulas.judge.is_never
    prefix = tuple(itertools.takewhile(lambda node: not is_never(node), array.prefix))
    most = array.max_items
    items = array.items if len(prefix) == len(array.prefix) and not is_never(array.items) else NEVER
    contains = array.contains
    if items == NEVER:
        most = len(prefix) if most is None else min(most, len(prefix))
    if contains is not None:
        if contains.least and is_never(contains.node):
            return None
        room = None if most is None else most - len(prefix)
        if room is not None and room < contains.least:
            return None
        if room is not None and room <= 0:
            contains = None
    if most is not None:
        prefix = prefix[:most]
        if array.min_items > most:
            return None
    is_unique = array.is_unique and (most is None or most > 1)
    return Array(prefix, items, array.min_items, most, contains, is_unique)
