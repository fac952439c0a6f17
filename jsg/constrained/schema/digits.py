"""Automata over the digits of decimal numbers, for bounds, multiples, and the number of digits.

A number is read as an optional `-`, digits, and perhaps a point and more digits. Each condition on the number has a
tracker. All trackers read the same digits, and the automaton has a state for each combination of their states that can
occur. A tracker stores no state: `step` takes a state and returns the next one.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable
from decimal import Decimal

from jsg.constrained.automata import DEAD, explore, keep_states, live_states, merge_equivalent
from jsg.constrained.chars import charset
from jsg.constrained.ir import NEVER, Automaton, ByteSet, Expr
from jsg.constrained.limits import Limits, check

MAX_WRITTEN_OUT = 6_000
"""Most states of an automaton that keeps a remainder and also counts digits."""

TrackerState = tuple[int, ...]
Relation = Callable[[int, int], bool]
"""One of `operator.le`, `ge`, `lt`, `gt` and `ne`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """Tracks whether the number stands in a relation to a bound.

    States: (0, n, c) after n digits of the whole part, leading zeros left out; c = -1, 0 or 1 says how they compare
    with the bound's first n digits. (1, n, c) says the same of the first n digits of the fraction.
    """

    relation: Relation
    is_negative: bool
    whole: str
    fraction: str

    @classmethod
    def to(cls, relation: Relation, bound: Decimal) -> "Compared":
        """The tracker for this relation and this bound."""
        whole, _, fraction = f"{abs(bound):f}".partition(".")
        return cls(relation, bound < 0, whole.lstrip("0"), fraction.rstrip("0"))

    def start(self) -> TrackerState:
        """The state before the first digit."""
        return 0, 0, 0

    def step(self, state: TrackerState, digit: int, in_fraction: bool) -> TrackerState | None:
        """The state after a digit; never None. The whole part's single 0 is a digit too."""
        phase, count, order = state
        if not in_fraction:
            if count == 0 and digit == 0:
                return state
            if count >= len(self.whole):
                return 0, len(self.whole) + 1, 1
            return 0, count + 1, order or _compare(digit, int(self.whole[count]))
        if phase == 0:
            order, count = self._whole_order(count, order), 0
        if order or count > len(self.fraction):
            return 1, 0, order
        expected = int(self.fraction[count]) if count < len(self.fraction) else 0
        order = _compare(digit, expected)
        return 1, 0 if order else min(count + 1, len(self.fraction)), order

    def holds(self, state: TrackerState, is_negative: bool) -> bool:
        """Whether the number that ends here stands in the relation."""
        phase, count, order = state
        if phase == 0:
            order, count = self._whole_order(count, order), 0
        if order == 0 and count < len(self.fraction):
            order = -1
        # `order` compares the absolute values.
        if is_negative and self.is_negative:
            order = -order
        elif is_negative:
            order = 0 if order == 0 and not (self.whole or self.fraction) else -1
        elif self.is_negative:
            order = 1
        return self.relation(order, 0)

    def _whole_order(self, count: int, order: int) -> int:
        return order if count == len(self.whole) else _compare(count, len(self.whole))


@dataclasses.dataclass(frozen=True, slots=True)
class Multiple:
    """Tracks whether the number is a multiple of `numerator` / 10^`decimals`. It must be one exactly if `is_wanted`.

    States: (remainder, digits of the fraction so far). The remainder is -1 where a digit beyond `decimals` already
    shows that the number is no multiple.
    """

    numerator: int
    decimals: int
    is_wanted: bool = True

    @classmethod
    def of(cls, factor: Decimal, is_wanted: bool = True) -> "Multiple":
        """The tracker for multiples of this factor, which is above zero."""
        _, digits, exponent = factor.normalize().as_tuple()
        number = int("".join(map(str, digits)))
        assert isinstance(exponent, int)
        return cls(number * 10 ** max(exponent, 0), max(-exponent, 0), is_wanted)

    def start(self) -> TrackerState:
        """The state before the first digit."""
        return 0, 0

    def step(self, state: TrackerState, digit: int, in_fraction: bool) -> TrackerState | None:
        """The state after a digit; None where the fraction has become too long for a multiple."""
        remainder, count = state
        if remainder < 0:
            return state
        if in_fraction and count == self.decimals:
            return state if digit == 0 else None if self.is_wanted else (-1, 0)
        return (remainder * 10 + digit) % self.numerator, count + in_fraction

    def holds(self, state: TrackerState, is_negative: bool) -> bool:
        """Whether the number that ends here meets the condition."""
        remainder, count = state
        is_multiple = remainder >= 0 and remainder * 10 ** (self.decimals - count) % self.numerator == 0
        return is_multiple == self.is_wanted


Tracker = Compared | Multiple


@dataclasses.dataclass(frozen=True, slots=True)
class Digits:
    """How many digits a number may have.

    Attributes:
        whole: The most digits before the point; None for any number of them.
        fraction: The most digits after the point; 0 forbids the point.
        has_minus_zero: Whether `-0` is allowed.
        longest: The most digits before the point where `whole` is None. This limit is dropped where it needs more than
            `MAX_WRITTEN_OUT` states.
    """

    whole: int | None
    fraction: int
    has_minus_zero: bool = True
    longest: int | None = None


_State = tuple[int, int, bool, tuple[TrackerState, ...]]
"""The part of the number, the digits since that part began, whether the number is negative, the trackers' states."""
Edges = list[list[tuple[int, int]]]
"""For each state, its edges as (byte, target)."""
_START, _SIGN, _ZERO, _WHOLE, _POINT, _FRACTION = range(6)


def numbers(digits: Digits, trackers: Iterable[Tracker], limits: Limits) -> Expr:
    """The numbers for which every tracker holds; NEVER where there is no such number."""
    machine = _Machine(digits, tuple(trackers))
    what = "states of the digits of a number, for its bounds and multipleOf"
    order, edges = explore(machine.start(), machine.steps, lambda count: check(count, limits.char_states, what))
    edges, ends = _minimal(edges, [machine.is_end(state) for state in order])
    if digits.longest is not None and edges:
        edges, ends = _shortened(edges, ends, digits.longest)
    return _automaton(edges, ends)


class _Machine:
    """The steps of the automaton: the syntax of a number and the trackers, side by side."""

    def __init__(self, digits: Digits, trackers: tuple[Tracker, ...]) -> None:
        self._digits = digits
        self._trackers = trackers

    def start(self) -> _State:
        return _START, 0, False, tuple(tracker.start() for tracker in self._trackers)

    def is_end(self, state: _State) -> bool:
        place, _, is_negative, inner = state
        if place in (_START, _SIGN, _POINT):
            return False
        if place == _ZERO and is_negative and not self._digits.has_minus_zero:
            return False
        return all(tracker.holds(own, is_negative) for tracker, own in zip(self._trackers, inner, strict=True))

    def steps(self, state: _State) -> Iterable[tuple[int, _State]]:
        """Each byte that may follow, and the state after it."""
        place, count, is_negative, inner = state
        if place == _START:
            yield ord("-"), (_SIGN, 0, True, inner)
        if place in (_ZERO, _WHOLE) and self._digits.fraction:
            yield ord("."), (_POINT, 0, is_negative, inner)
        for digit in self._possible(place, count):
            following = self._after_digit(inner, digit, place in (_POINT, _FRACTION))
            if following is not None:
                to, number = self._counted(place, count, digit)
                yield ord("0") + digit, (to, number, is_negative, following)

    def _possible(self, place: int, count: int) -> range:
        if place in (_START, _SIGN, _POINT):
            return range(10)
        if place == _WHOLE:
            return range(10 if self._digits.whole is None or count < self._digits.whole else 0)
        return range(10 if place == _FRACTION and count < self._digits.fraction else 0)

    def _counted(self, place: int, count: int, digit: int) -> tuple[int, int]:
        if place in (_START, _SIGN):
            return (_ZERO, 0) if digit == 0 else (_WHOLE, 1)
        if place == _WHOLE:
            return _WHOLE, 1 if self._digits.whole is None else count + 1
        return _FRACTION, count + 1

    def _after_digit(
        self, inner: tuple[TrackerState, ...], digit: int, in_fraction: bool
    ) -> tuple[TrackerState, ...] | None:
        following: list[TrackerState] = []
        for tracker, own in zip(self._trackers, inner, strict=True):
            after = tracker.step(own, digit, in_fraction)
            if after is None:
                return None
            following.append(after)
        return tuple(following)


def _minimal(edges: Edges, ends: list[bool]) -> tuple[Edges, list[bool]]:
    """The smallest automaton for the same numbers; empty where there are none."""
    labels = sorted({label for row in edges for label, _ in row})
    rows = [tuple([targets.get(label, DEAD) for label in labels]) for targets in map(dict, edges)]
    accepting = {state for state, is_end in enumerate(ends) if is_end}
    live = live_states(rows, accepting)
    if 0 not in live:
        return [], []
    rows, accepting = merge_equivalent(*keep_states(rows, accepting, live))
    merged = [[(label, target) for label, target in zip(labels, row, strict=True) if target != DEAD] for row in rows]
    return merged, [state in accepting for state in range(len(rows))]


def _shortened(edges: Edges, ends: list[bool], longest: int) -> tuple[Edges, list[bool]]:
    """The automaton for its numbers with at most `longest` digits before the point.

    The automaton is copied once for each number of digits. Where the copies have too many states, it is returned
    unchanged.
    """
    if len(edges) * (longest + 1) > MAX_WRITTEN_OUT:
        return edges, ends
    after_point = longest + 1  # the count for every state from the point on

    def steps(at: tuple[int, int]) -> Iterable[tuple[int, tuple[int, int]]]:
        state, count = at
        for label, target in edges[state]:
            if label == ord("."):
                yield label, (target, after_point)
            elif label == ord("-") or count == after_point:
                yield label, (target, count)
            elif count < longest:
                yield label, (target, count + 1)

    order, rows = explore((0, 0), steps)
    return rows, [ends[state] for state, _ in order]


def _automaton(edges: Edges, ends: list[bool]) -> Expr:
    rows: list[tuple[tuple[Expr, int], ...]] = []
    for row in edges:
        by_target: dict[int, list[int]] = {}
        for label, target in row:
            by_target.setdefault(target, []).append(label)
        rows.append(tuple((ByteSet(charset.of(found)), target) for target, found in by_target.items()))
    return Automaton(tuple(rows), frozenset(i for i, is_end in enumerate(ends) if is_end)) if rows else NEVER


def _compare(left: int, right: int) -> int:
    return operator.gt(left, right) - operator.lt(left, right)
