"""Decides how each repeat is built: it is written out copy by copy, or it is counted while a text is read."""

from collections.abc import Mapping
from typing import NamedTuple

from jsg.constrained import ir
from jsg.constrained.build.analysis import Facts
from jsg.errors import GrammarError

UNROLLED = 64
"""A repeat is written out if its copies have at most this many positions in all. A larger one is counted."""
MOST_UNROLLED = 8192
"""A repeat that may be at several counts at once cannot be counted. It is written out up to this many positions."""
_CALL_SIZE = 16
"""The number of positions that a call counts as. It is high because each copy of a call has its own states, while a
counted repeat has them once."""


class Plan(NamedTuple):
    """How a repeat is built.

    Attributes:
        copies: How often the item is built; 0 if the repeat matches only the empty text.
        min, max: The bounds of the repeat, without the first item if `is_separator_first`.
        has_separator: Whether a separator can occur.
        is_separator_first: Whether the item is built once by itself, and what repeats is separator and item.
        is_counted: Whether the repeat becomes a loop.
        is_turning: Whether the first copy also needs a separator before it, because the repeat leads back to it.
    """

    copies: int
    min: int
    max: int | None
    has_separator: bool
    is_separator_first: bool
    is_counted: bool
    is_turning: bool


class Repeats:
    """The plans of all repeats of a grammar."""

    def __init__(self, facts: Facts, written_out: Mapping[int, ir.Repeat]):
        """Makes the plans of a grammar; `written_out` has the repeats that may not be counted, by identity."""
        self._facts = facts
        self._written_out = written_out
        self._sizes: dict[int, int] = {}
        self._plans: dict[int, Plan] = {}

    def plan(self, repeat: ir.Repeat) -> Plan:
        """How to build a repeat that matches something.

        Raises:
            GrammarError: The repeat may not be counted, and is too large to be written out.
        """
        plan = self._plans.get(id(repeat))
        if plan is None:
            plan = self._plans[id(repeat)] = self._plan(repeat)
        return plan

    def _plan(self, repeat: ir.Repeat) -> Plan:
        facts, item, low, high = self._facts, repeat.item, repeat.min, repeat.max
        if high == 0 or not facts.is_productive(item):
            return Plan(0, 0, 0, False, False, False, False)
        if not facts.is_productive(repeat.separator):
            high = 1
        has_separator = high != 1 and repeat.separator != ir.EMPTY
        is_separator_first = has_separator and facts.is_nullable(item)
        if is_separator_first:  # item (separator item)*, so that there are not two ways to repeat nothing
            low, high = max(low - 1, 0), None if high is None else high - 1
            low = 0 if facts.is_nullable(repeat.separator) else low
        elif facts.is_nullable(item):
            low = 0
        copies = high if high is not None else max(low, 1)
        body = self.size(item) + (self.size(repeat.separator) if has_separator else 0)
        is_counted = copies > 1 and copies * body > UNROLLED and id(repeat) not in self._written_out
        if copies * body > MOST_UNROLLED and not is_counted:
            self._check_written_out(repeat, copies * body)
        is_turning = is_counted or (high is None and copies == 1)
        copies = 1 if is_counted else copies
        return Plan(copies, low, high, has_separator, is_separator_first, is_counted, is_turning)

    def _check_written_out(self, repeat: ir.Repeat, size: int) -> None:
        """Raises GrammarError where a repeat that cannot be counted is too large to be written out."""
        if id(repeat) in self._written_out:
            bounds = f"{repeat.min} to {'any number' if repeat.max is None else repeat.max} times"
            raise GrammarError(
                f"a repeat of {bounds} whose texts can be read in several ways is written out and may then take at "
                f"most {MOST_UNROLLED} places, but this one takes {size}; lower its bounds, or end its item with text "
                "that cannot occur inside the item"
            )

    def size(self, root: ir.Expr) -> int:
        """About how many positions an expression takes. A part without positions counts as one, for its work."""
        for expr in ir.parts_first(root, self._sizes):
            self._sizes[id(expr)] = min(self._own_size(expr), 1 << 40)
        return self._sizes[id(root)]

    def _own_size(self, expr: ir.Expr) -> int:
        """The size of an expression whose parts' sizes are known."""
        match expr:
            case ir.Literal(value):
                return len(value)
            case ir.Words(words):
                return sum(map(len, words))
            case ir.Call():
                return _CALL_SIZE
            case ir.Alt(options):
                several = sum(self._sizes[id(option)] for option in options if not is_single(option))
                return max(several + any(map(is_single, options)), 1)
            case ir.Repeat(item, _, _, separator):
                plan = self.plan(expr)
                own = self._sizes[id(item)] + (self._sizes[id(separator)] if plan.has_separator else 0)
                return max(plan.copies, 1) * own + 2 * plan.is_counted
            case _:
                return max(sum(self._sizes[id(part)] for part in ir.parts_of(expr)), 1)


def is_single(expr: ir.Expr) -> bool:
    """Whether an expression is exactly one byte out of a set."""
    return (isinstance(expr, ir.ByteSet) and bool(expr.ranges)) or (
        isinstance(expr, ir.Literal) and len(expr.value) == 1
    )
