"""A compiled grammar as flat arrays. They hold nothing of a vocabulary, and another process can receive them as bytes.

    position   a place where a byte may be, where a rule is called or where a loop is, or the END of a level
    link       a position that stands for those of its follow list, which many lists share; states have none
    list       positions that may come next; every position has one (its follow list), every rule one (its first list)
    loop       a repeat or a bag that is counted while a text is read; each of its branches has a first list
    class      bytes that no position tells apart

A level is a rule, a branch of a loop, or the separator of a loop. Reading a level ends in its END position, one for
each. Position 0 is nowhere in a text.
"""

from typing import NamedTuple, Self

import numpy as np

from jsg.constrained.files import FileForm
from jsg.constrained.jit import Bytes1, Bytes2, Ints1, Ints2, Longs2

BYTE, CALL, LOOP, END_RULE, END_BRANCH, END_SEPARATOR, LINK = range(7)
"""Kinds of position."""

KIND, ARGUMENT, SET, FOLLOW = range(4)
"""Columns of `positions`. ARGUMENT: first list of the rule, the loop, or the branch that ends. SET: row of `sets`."""

MIN, MAX, REQUIRED, NUM_REQUIRED, BRANCHES, BRANCHES_END, SEPARATOR, SEPARATOR_KIND, ONCE, FIRST_END = range(10)
"""Columns of `loops`. REQUIRED: bits of items that must be in it. ONCE: all bits where no item may be repeated, else
0, because then another item may always come. SEPARATOR: its first list, -1 for none. FIRST_END: the END of the first
branch; those of the other branches follow it, and then that of the separator."""

NO_SEPARATOR, PLAIN_SEPARATOR, EMPTY_SEPARATOR = range(3)
"""Kinds of separator; the last may be empty."""

BRANCH_LIST, BRANCH_BIT = range(2)
"""Columns of `branches`. The bit is 0 for an item that may be repeated."""

UNBOUNDED = 1 << 60
"""MAX of a loop without one."""

_FORM = FileForm(
    b"jsg.grammar",
    4,
    "a compiled grammar",
    (
        ("numbers", "int64", 1),
        ("classes", "uint8", 1),
        ("sets", "uint8", 2),
        ("positions", "int32", 2),
        ("list_start", "int32", 1),
        ("list_items", "int32", 1),
        ("loops", "int64", 2),
        ("branches", "int64", 2),
        ("rule_ends", "int32", 1),
    ),
)
"""`numbers` are `start`, `num_rules` and `max_push`."""


class StaticTables(NamedTuple):
    """A grammar, ready to be read.

    Attributes:
        classes: uint8[256], the class of each byte.
        sets: uint8[sets, classes], 1 where the set holds the class.
        positions: int32[positions, 4].
        list_start: int32[lists + 1], where each list begins in `list_items`.
        list_items: int32[...], positions.
        loops: int64[loops, 10].
        branches: int64[branches, 2].
        rule_ends: int32[lists], for the first list of each rule the END of the rule, else 0.
        start: List of positions that a text may begin with; holds position 0 where it may be empty.
        num_rules: How many rules were built, for reports.
        max_push: The most frames that one byte pushes.
    """

    classes: Bytes1
    sets: Bytes2
    positions: Ints2
    list_start: Ints1
    list_items: Ints1
    loops: Longs2
    branches: Longs2
    rule_ends: Ints1
    start: int
    num_rules: int
    max_push: int

    @property
    def num_positions(self) -> int:
        """Positions, those that mark an END counted too."""
        return len(self.positions)

    @property
    def num_levels(self) -> int:
        """At least the number of rules and loops, and of ENDs."""
        return self.num_rules + len(self.branches) + len(self.loops) + 1

    @property
    def num_classes(self) -> int:
        """Classes of bytes."""
        return self.sets.shape[1]

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return sum(value.nbytes for value in self if isinstance(value, np.ndarray))

    def to_bytes(self) -> bytes:
        """The tables as bytes, for `from_bytes`, a file or a browser."""
        numbers = np.array((self.start, self.num_rules, self.max_push))
        return _FORM.pack({"numbers": numbers, **self._asdict()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The tables that `to_bytes` wrote.

        Raises:
            ValueError: The bytes are damaged, of another version, or of something else.
        """
        arrays = _FORM.unpack(data)
        try:
            start, num_rules, max_push = arrays.pop("numbers").tolist()
            tables = cls(**arrays, start=start, num_rules=num_rules, max_push=max_push)
            _check(tables)
        except ValueError as error:
            raise _FORM.damaged(error) from error
        return tables


def _check(tables: StaticTables) -> None:
    """Raises ValueError where an index points outside of its array, because the kernels do not check that."""
    num_positions, num_lists = len(tables.positions), len(tables.list_start) - 1
    num_loops, num_branches = len(tables.loops), len(tables.branches)
    starts = tables.list_start
    kinds, arguments = tables.positions[:, KIND], tables.positions[:, ARGUMENT]
    bounds = {
        BYTE: 1,
        CALL: num_lists,
        LOOP: num_loops,
        END_RULE: 1,
        END_BRANCH: num_branches,
        END_SEPARATOR: num_loops,
        LINK: 1,
    }
    separators, separator_kinds = tables.loops[:, SEPARATOR], tables.loops[:, SEPARATOR_KIND]
    branch_starts, branch_ends = tables.loops[:, BRANCHES], tables.loops[:, BRANCHES_END]
    separated = separator_kinds != NO_SEPARATOR
    is_sound = bool(
        tables.classes.shape == (256,)
        and tables.positions.shape[1] == 4
        and tables.loops.shape[1] == 10
        and tables.branches.shape[1] == 2
        and 0 < tables.num_classes <= 256
        and int(tables.classes.max()) < tables.num_classes
        and num_lists > 0
        and num_positions > 0
        and int(kinds[0]) == END_RULE
        and starts[0] == 0
        and int(starts[-1]) == len(tables.list_items)
        and bool((np.diff(starts) >= 0).all())
        and _within(tables.list_items, num_positions)
        and _within(kinds, 7)
        and all(_within(arguments[kinds == kind], bound) for kind, bound in bounds.items())
        and _within(tables.positions[:, SET], len(tables.sets))
        and _within(tables.positions[:, FOLLOW], num_lists)
        and _within(tables.branches[:, BRANCH_LIST], num_lists)
        and _within(branch_starts, num_branches + 1)
        and _within(branch_ends, num_branches + 1)
        and bool((branch_starts < branch_ends).all())
        and _within(separator_kinds, 3)
        and _within(separators[separated], num_lists)
        and len(tables.rule_ends) == num_lists
        and _within(tables.rule_ends, num_positions)
        and _within(tables.loops[:, FIRST_END], num_positions)
        and bool((tables.loops[:, FIRST_END] + branch_ends - branch_starts < num_positions).all())
        and 0 <= tables.start < num_lists
        and 0 <= tables.max_push <= num_positions
        and np.count_nonzero(tables.rule_ends) <= tables.num_rules <= num_positions
        and np.isin(kinds, (END_RULE, END_BRANCH, END_SEPARATOR)).sum() <= tables.num_levels
    )
    if not is_sound:
        raise ValueError("an index points outside")


def _within(values: np.ndarray, bound: int) -> bool:
    """Whether all values are in [0, bound)."""
    return not values.size or (int(values.min()) >= 0 and int(values.max()) < bound)
