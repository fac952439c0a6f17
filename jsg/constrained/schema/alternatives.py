"""Alternatives and their conjunction. A value of some type is valid for a schema if one of its alternatives allows it.

An alternative becomes a shape when everything about its node is known. Until then it may have what a shape cannot
have: values of enum and const that are still to be checked, objects as a list of facets, arrays with any number of
`some`, and refusals, which are reasons why the alternative cannot be enforced. A refusal matters only if some value is
valid for the alternative.
"""

import dataclasses
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from jsg.constrained.schema.shapes import ANY, Array, Boolean, NodeName, Null, Number, String
from jsg.constrained.schema.values import ceiling, floor


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Facet:
    """What one schema says about the members of an object.

    Attributes:
        properties: The node of each declared name.
        patterns: The node of each pattern of names, as (pattern, node).
        additional: The node of the members whose names no property and no pattern covers.
        others: Whether the schema says something about these members ("given"), or declares members and is silent about
            others ("missing"); None where the facet only repeats a part of a schema, such as what `not` forbids.
    """

    properties: Mapping[str, NodeName]
    patterns: tuple[tuple[str, NodeName], ...] = ()
    additional: NodeName = ANY
    others: Literal["given", "missing"] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Members:
    """An object for which every facet holds.

    Attributes:
        required: The names of required members.
        names: Nodes; every name, as a string, is valid for each of them.
        some: (node of the name, node of the value): for each pair the object has a member that is valid for both. One
            member may meet several pairs.
    """

    facets: tuple[Facet, ...] = ()
    required: tuple[str, ...] = ()
    names: tuple[NodeName, ...] = ()
    some: tuple[tuple[NodeName, NodeName], ...] = ()
    min_properties: int = 0
    max_properties: int | None = None

    @property
    def declaring(self) -> frozenset[Facet]:
        """The facets that decide whether the object is closed, and which members it then has."""
        return frozenset(facet for facet in self.facets if facet.others is not None)

    @property
    def is_closed_by_default(self) -> bool:
        """Whether schemas declare its members, and none of them says anything about others."""
        declaring = self.declaring
        return bool(declaring) and all(facet.others == "missing" for facet in declaring)

    def shows_all_of(self, other: "Members") -> bool:
        """Whether closing this object by default leaves out no member that the other object has and that is valid."""
        return not self.is_closed_by_default or self.declaring == other.declaring


AlternativeShape = Null | Boolean | Number | String | Array | Members

FREE: Mapping[str, AlternativeShape] = {
    "null": Null(),
    "boolean": Boolean(),
    "number": Number(),
    "string": String(),
    "array": Array(),
    "object": Members(),
}
"""For each type, the shape of all its values. An alternative is free only if its shape is one of these very objects,
because identity is quick to test."""

_FREE_BY_CLASS: Mapping[type, AlternativeShape] = {type(shape): shape for shape in FREE.values()}


@dataclasses.dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative for the values of one type.

    Attributes:
        shape: The shape of its values.
        values: The keys of the only values that it allows, in the order of the schema; None for all values of the
            shape.
        refusals: The reasons why it cannot be enforced.
    """

    shape: AlternativeShape
    values: tuple[str, ...] | None = None
    refusals: tuple[str, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether it allows every value of its type."""
        return self.values is None and not self.refusals and self.shape is _FREE_BY_CLASS[type(self.shape)]

    @property
    def is_listed(self) -> bool:
        """Whether it is nothing but a list of values."""
        return self.values is not None and not self.refusals and self.shape is _FREE_BY_CLASS[type(self.shape)]


class Meeting:
    """Conjunction of alternatives. `conjoin` gives the node of the values that are valid for all of several nodes."""

    def __init__(self, conjoin: Callable[..., NodeName]):
        self._conjoin = conjoin

    def meet(self, left: Alternative, right: Alternative) -> Alternative | None:
        """The alternative of the values that are valid for both; None where there clearly is no such value."""
        if left.is_free:
            return right
        if right.is_free or left == right:
            return left
        values = left.values if right.values is None else right.values
        if left.values is not None and right.values is not None:
            allowed = set(right.values)
            values = tuple(value for value in left.values if value in allowed)
        if left.is_listed or left.shape is right.shape:
            shape = right.shape
        elif right.is_listed:
            shape = left.shape
        else:
            shape = self._shapes(left.shape, right.shape)
        if shape is None or values == ():
            return None
        return Alternative(shape, values, _united(left.refusals, right.refusals))

    def _shapes(self, left: AlternativeShape, right: AlternativeShape) -> AlternativeShape | None:
        match left, right:
            case Number(), Number():
                return meet_numbers(left, right)
            case String(), String():
                return meet_strings(left, right)
            case Array(), Array():
                return self._items(left, right)
            case Members(), Members():
                return _members(left, right)
        return left

    def _items(self, left: Array, right: Array) -> Array | None:
        length = max(len(left.prefix), len(right.prefix))
        prefix = tuple(
            self._conjoin(*(side.prefix[i] if i < len(side.prefix) else side.items for side in (left, right)))
            for i in range(length)
        )
        most = least_of(left.max_items, right.max_items)
        least = max(left.min_items, right.min_items)
        return items_of(
            Array(
                prefix,
                self._conjoin(left.items, right.items),
                least,
                most,
                _united(left.some, right.some),
                left.is_unique or right.is_unique,
            )
        )


def items_of(shape: Array) -> Array | None:
    """The same shape; None where its counts contradict each other."""
    if shape.max_items is not None and shape.min_items > shape.max_items:
        return None
    return shape


def least_of(left: int | None, right: int | None) -> int | None:
    """The lower of two bounds; None means no bound."""
    return min((bound for bound in (left, right) if bound is not None), default=None)


def _united[T](left: tuple[T, ...], right: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(left + right)) if left and right else left or right


def meet_numbers(left: Number, right: Number) -> Number | None:
    """The numbers of both shapes; None where there clearly is no such number."""
    low, is_low_open = max(
        ((side.min, side.is_min_exclusive) for side in (left, right) if side.min is not None), default=(None, False)
    )
    highs = [(side.max, not side.is_max_exclusive) for side in (left, right) if side.max is not None]
    high, is_high_closed = min(highs, default=(None, True))
    return number_of(
        Number(
            is_integer=left.is_integer or right.is_integer,
            min=low,
            max=high,
            is_min_exclusive=is_low_open,
            is_max_exclusive=not is_high_closed,
            multiple_of=_united(left.multiple_of, right.multiple_of),
            not_multiple_of=_united(left.not_multiple_of, right.not_multiple_of),
            excluded=left.excluded | right.excluded,
        )
    )


def number_of(shape: Number) -> Number | None:
    """The same shape in its simplest form; None where no number is of it."""
    steps = [Fraction(step) for step in shape.multiple_of]
    if shape.is_integer or any(step.denominator == 1 for step in steps):
        shape = _integers(shape)
        steps.append(Fraction(1))
    for forbidden in shape.not_multiple_of:
        if any(step % Fraction(forbidden) == 0 for step in steps):
            return None
    low, high = shape.min, shape.max
    if low is None or high is None:
        return shape
    if low > high or (low == high and (shape.is_min_exclusive or shape.is_max_exclusive)):
        return None
    if low == high and low in shape.excluded:
        return None
    if any(_has_no_multiple(step, shape) for step in steps):
        return None
    return shape


def _integers(shape: Number) -> Number:
    """The same shape for integers, with bounds that are integers and inclusive."""
    low, high = shape.min, shape.max
    if low is not None:
        low = floor(low) + 1 if shape.is_min_exclusive else ceiling(low)
    if high is not None:
        high = ceiling(high) - 1 if shape.is_max_exclusive else floor(high)
    while low is not None and low in shape.excluded:
        low += 1
    while high is not None and high in shape.excluded:
        high -= 1
    return dataclasses.replace(
        shape,
        is_integer=True,
        min=low,
        max=high,
        is_min_exclusive=False,
        is_max_exclusive=False,
        multiple_of=tuple(step for step in shape.multiple_of if step != 1),
        not_multiple_of=tuple(step for step in shape.not_multiple_of if not 1 % Fraction(step))
        or shape.not_multiple_of,
    )


def _has_no_multiple(step: Fraction, shape: Number) -> bool:
    assert shape.min is not None and shape.max is not None
    first = -(-Fraction(shape.min) // step) * step
    if first == shape.min and shape.is_min_exclusive:
        first += step
    return first > shape.max or (first == shape.max and shape.is_max_exclusive)


def meet_strings(left: String, right: String) -> String | None:
    """The strings of both shapes; None where there clearly is no such string."""
    return string_of(
        String(
            min_length=max(left.min_length, right.min_length),
            max_length=least_of(left.max_length, right.max_length),
            patterns=_united(left.patterns, right.patterns),
            not_patterns=_united(left.not_patterns, right.not_patterns),
            formats=_united(left.formats, right.formats),
            excluded=left.excluded | right.excluded,
        )
    )


def string_of(shape: String) -> String | None:
    """The same shape; None where clearly no string is of it."""
    if shape.max_length is not None and shape.min_length > shape.max_length:
        return None
    if set(shape.patterns) & set(shape.not_patterns):
        return None
    if shape.max_length == 0 and "" in shape.excluded:
        return None
    if "" in shape.excluded and not shape.min_length:
        return dataclasses.replace(shape, min_length=1, excluded=shape.excluded - {""})
    return shape


def _members(left: Members, right: Members) -> Members | None:
    most = least_of(left.max_properties, right.max_properties)
    required = _united(left.required, right.required)
    least = max(left.min_properties, right.min_properties)
    if most is not None and max(least, len(required)) > most:
        return None
    return Members(
        facets=_united(left.facets, right.facets),
        required=required,
        names=_united(left.names, right.names),
        some=_united(left.some, right.some),
        min_properties=least,
        max_properties=most,
    )


def is_multiple(value: Decimal, step: Decimal) -> bool:
    """Whether the value is a whole number of steps, exactly."""
    return Fraction(value) % Fraction(step) == 0
