"""The last step of building: it finds first bytes and classes of bytes, and fills the flat arrays."""

import array
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from jsg.constrained import ir
from jsg.constrained.automata import components, is_cyclic
from jsg.constrained.limits import Limits, check
from jsg.constrained.tables import BYTE, CALL, LINK, LOOP, StaticTables
from jsg.errors import GrammarError

Positions = tuple[int, ...]
MOST_COPIED = 16
"""The most positions that are copied into another list. Where there are more, a link stands for them."""
MAX_SETS = 1 << 15
"""The most different sets of bytes. Each is a row of a table."""


class Loop(NamedTuple):
    """A repeat or a bag that is counted; see the columns of `StaticTables.loops`.

    Attributes:
        min, max: The bounds of the count, which can be reached.
        required: The bits of the required items.
        branches: For each item, the positions that begin it, and its bit; 0 if the item may be repeated.
        separator: The positions that begin the separator.
        separator_kind: NO_SEPARATOR, PLAIN_SEPARATOR or EMPTY_SEPARATOR.
        once: The bits of all items if no item may be repeated, else 0.
        first_end: The END of its first branch; the other ENDs follow it.
        origin: The repeat that became this loop; None for a bag.
    """

    min: int
    max: int
    required: int
    branches: list[tuple[Positions, int]]
    separator: Positions
    separator_kind: int
    once: int
    first_end: int
    origin: ir.Repeat | None


class Parts(NamedTuple):
    """A grammar's positions as the builder collected them.

    Attributes:
        kinds, arguments: The kind and the argument of each position. The argument of BYTE is a set of bytes as bits,
            and that of CALL is a rule's number.
        follow: The groups of positions that may come next, for each position.
        loops: Every counted repeat and bag.
        rules: The name of each rule, the positions that begin it, and its END.
        start: The number of the rule of the whole text.
    """

    kinds: list[int]
    arguments: list[int]
    follow: list[list[Positions]]
    loops: list[Loop]
    rules: list[tuple[str, Positions, int]]
    start: int

    def without_links(self, positions: Iterable[int]) -> Iterator[int]:
        """The positions, with those that a link stands for in its place, each link once."""
        todo, seen = list(positions), set[int]()
        for position in todo:  # `todo` grows while it is walked.
            if self.kinds[position] != LINK:
                yield position
            elif position not in seen:
                seen.add(position)
                todo.extend(itertools.chain.from_iterable(self.follow[position]))


Firsts = list[tuple[int, int]]
"""For each rule, and then for each loop: the bytes that it can begin with, as bits, and the most frames that it opens
before its first byte."""


def finish(
    parts: Parts, firsts: Firsts, is_start_nullable: bool, limits: Limits, rows: "Rows | None" = None
) -> StaticTables:
    """The tables of a grammar with these positions.

    Args:
        parts: The positions.
        firsts: The result of `first_bytes`.
        is_start_nullable: Whether the empty text is one of the grammar's texts.
        limits: The limits of the work.
        rows: The rows of the rules and positions with the lowest numbers, if they are made already.

    Raises:
        GrammarError: The grammar has too many sets of bytes or too many transitions.
    """
    rows = Rows(limits) if rows is None else rows.copied(limits)
    rows.fill(parts, firsts)
    lists, sets = rows.lists, rows.sets
    loops, branches = _loop_arrays(parts.loops, lists)
    _, first, end = parts.rules[parts.start]
    start_list = lists.number([(end,), first]) if is_start_nullable else rows.rules[parts.start]
    for group in lists.links:
        rows.add(LINK, 0, 0, lists.number([group]))
    check(len(sets), MAX_SETS, "different sets of bytes")
    classes, members = _byte_classes(list(sets))
    list_start, list_items = lists.arrays()
    rule_ends = np.zeros(len(list_start) - 1, np.int32)
    rule_ends[rows.rules] = [end for _, _, end in parts.rules]
    return StaticTables(
        classes=classes,
        sets=members,
        positions=rows.array(),
        list_start=list_start,
        list_items=list_items,
        loops=loops,
        branches=branches,
        rule_ends=rule_ends,
        start=start_list,
        num_rules=len(parts.rules),
        max_push=max(depth for _, depth in firsts),
    )


class Rows:
    """The rows of `StaticTables.positions` while they are made. Those of a library are made once, and copied.

    Attributes:
        lists: The lists of positions that the rows name.
        sets: The number of each set of bytes.
        rules: For each rule the list of the positions that begin it.
    """

    def __init__(self, limits: Limits):
        self.lists = _Lists(limits)
        self.lists.number([(0,)])
        self.sets: dict[int, int] = {}
        self.rules: list[int] = []
        self._columns: tuple[list[int], ...] = ([], [], [], [])

    def copied(self, limits: Limits) -> "Rows":
        """The same rows, to which others may be added."""
        other = Rows.__new__(Rows)
        other.lists, other.sets, other.rules = self.lists.copied(limits), self.sets.copy(), self.rules.copy()
        other._columns = tuple([column.copy() for column in self._columns])
        return other

    def fill(self, parts: Parts, firsts: Firsts) -> None:
        """Adds the rules and the positions that are new."""
        lists, numbers, sets, rules, num_rules = self.lists, self.lists.numbers, self.sets, self.rules, len(parts.rules)
        lists.num_positions = len(parts.kinds)
        rules.extend([lists.number([first]) for _, first, _ in parts.rules[len(rules) :]])
        kinds, arguments, members, follows = self._columns
        begin = len(kinds)
        kinds.extend(parts.kinds[begin:])
        for kind, argument, groups in zip(kinds[begin:], parts.arguments[begin:], parts.follow[begin:], strict=True):
            if kind == BYTE:
                arguments.append(0)
                bits = argument
            else:
                arguments.append(rules[argument] if kind == CALL else argument)
                bits = _bits_of(kind, argument, firsts, num_rules)
            number = sets.get(bits)
            if number is None:
                number = sets[bits] = len(sets)
            members.append(number)
            if len(groups) == 1 and len(groups[0]) == 1:  # the most common case
                follow = numbers.get(groups[0])
                follows.append(lists.number_of(groups[0]) if follow is None else follow)
            else:
                follows.append(lists.number(groups))

    def add(self, kind: int, argument: int, bits: int, follow: int) -> None:
        """Adds one position."""
        row = (kind, argument, self.sets.setdefault(bits, len(self.sets)), follow)
        for column, value in zip(self._columns, row, strict=True):
            column.append(value)

    def array(self) -> np.ndarray:
        """The rows."""
        result = np.empty((len(self._columns[0]), len(self._columns)), np.int32)
        for number, column in enumerate(self._columns):
            result[:, number] = _ints(column)
        return result


class _Lists:
    """Lists of positions. Equal lists are stored once.

    Attributes:
        links: What the links after the last position stand for. Many lists have the same long group among others.
        num_positions: The number of the first of these links.
        numbers: The number of each list.
    """

    def __init__(self, limits: Limits):
        self.links: list[Positions] = []
        self.num_positions = 0
        self._link_of: dict[int, Positions] = {}
        self._limits = limits
        self.numbers: dict[Positions, int] = {}
        self._by_identity: dict[int | tuple[int, ...], int] = {}
        self._starts = [0]
        self._items: list[int] = []
        self._work = 0

    def copied(self, limits: Limits) -> "_Lists":
        """The same lists, to which others may be added. There are no links yet."""
        assert not self.links, "their numbers would be those of other positions"
        other = _Lists(limits)
        other.numbers, other._by_identity = self.numbers.copy(), self._by_identity.copy()
        other._starts, other._items, other._work = self._starts.copy(), self._items.copy(), self._work
        return other

    def number(self, groups: list[Positions]) -> int:
        """The number of the list with the positions of all groups; without groups, of the list with position 0."""
        if not groups:
            return 0
        # Groups outlive this object, so identities are unique.
        key = id(groups[0]) if len(groups) == 1 else tuple(map(id, groups))
        known = self._by_identity.get(key)
        if known is None:
            if len(groups) > 1:
                groups = [group if len(group) <= MOST_COPIED else self._linked(group) for group in groups]
                self._work += sum(map(len, groups))
            merged = tuple(dict.fromkeys(itertools.chain.from_iterable(groups)))
            known = self._by_identity[key] = self.number_of(merged)
        return known

    def _linked(self, group: Positions) -> Positions:
        """The link to a group."""
        if id(group) not in self._link_of:
            self._link_of[id(group)] = (self.num_positions + len(self.links),)
            self.links.append(group)
        return self._link_of[id(group)]

    def number_of(self, items: Positions) -> int:
        """The number of the list with these positions."""
        numbers = self.numbers
        number = numbers.get(items)
        if number is None:
            number = numbers[items] = len(numbers)
            self._items.extend(items)
            self._starts.append(len(self._items))
            self._work += len(items)
            if self._work > self._limits.transitions:
                check(self._work, self._limits.transitions, "transitions")
        return number

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The place where each list begins, and the positions of all lists."""
        return _ints(self._starts), _ints(self._items)


def _ints(values: list[int]) -> np.ndarray:
    """The values as int32, in a third of the time that numpy takes."""
    return np.frombuffer(array.array("i", values), np.int32)


def _bits_of(kind: int, argument: int, firsts: Firsts, num_rules: int) -> int:
    """The bytes that a position other than BYTE can begin with, as bits. An END and a link have none."""
    if kind == CALL:
        return firsts[argument][0]
    return firsts[num_rules + argument][0] if kind == LOOP else 0


def _loop_arrays(loops: list[Loop], lists: _Lists) -> tuple[np.ndarray, np.ndarray]:
    """`StaticTables.loops` and `.branches`."""
    rows, branches = [], []
    for loop in loops:
        begin = len(branches)
        branches.extend((lists.number([first]), _signed(bit)) for first, bit in loop.branches)
        separator = lists.number([loop.separator]) if loop.separator_kind else -1
        required, num_required = _signed(loop.required), loop.required.bit_count()
        bounds = (min(loop.min, 1 << 59), min(loop.max, 1 << 60))
        rows.append(
            (
                *(*bounds, required, num_required, begin, len(branches)),
                *(separator, loop.separator_kind, _signed(loop.once), loop.first_end),
            )
        )
    return np.array(rows, np.int64).reshape(-1, 10), np.array(branches, np.int64).reshape(-1, 2)


def _signed(bits: int) -> int:
    """The signed 64-bit integer with the same bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def first_bytes(parts: Parts) -> Firsts:
    """The first bytes of all rules and loops; see `Firsts`.

    Raises:
        GrammarError: A rule can begin with itself.
    """
    num_rules = len(parts.rules)
    firsts = [first for _, first, _ in parts.rules]
    firsts += [tuple(p for first, _ in loop.branches for p in first) for loop in parts.loops]
    units = [_unit(parts, first, num_rules) for first in firsts]
    inner = {unit: children for unit, (_, children) in enumerate(units)}
    known: dict[int, tuple[int, int]] = {}
    for component in components(inner):
        if is_cyclic(component, inner):
            raise _begins_with_itself(parts, component, inner)
        (unit,) = component
        bits, depth = units[unit][0], 0
        for child in inner[unit]:
            bits |= known[child][0]
            depth = max(depth, 1 + known[child][1])
        known[unit] = (bits, depth)
    return [(bits, depth + 1) for bits, depth in (known[i] for i in range(len(units)))]


def _begins_with_itself(parts: Parts, component: list[int], inner: Mapping[int, list[int]]) -> GrammarError:
    """The error for rules that begin with each other. It names the rules of one cycle."""
    way = [component[0]]
    while (following := next(child for child in inner[way[-1]] if child in component)) not in way:
        way.append(following)
    names = [parts.rules[unit][0] for unit in way[way.index(following) :] if unit < len(parts.rules)]
    return GrammarError(
        f"a rule may not begin with itself, but {' → '.join([*names, names[0]])} does; "
        "let it begin with something else, or write a repeat (*, +) instead"
    )


def _unit(parts: Parts, first: Positions, num_rules: int) -> tuple[int, list[int]]:
    """The bytes that these positions read directly, and the rules and loops that they enter."""
    bits, children = 0, {}
    for position in parts.without_links(first):
        kind, argument = parts.kinds[position], parts.arguments[position]
        if kind == BYTE:
            bits |= argument
        elif kind == CALL:
            children[argument] = None
        elif kind == LOOP:
            children[num_rules + argument] = None
    return bits, list(children)


def _byte_classes(sets: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """The class of each byte, and for each set the classes that it has."""
    packed = np.frombuffer(b"".join(bits.to_bytes(32, "little") for bits in sets), np.uint8).reshape(-1, 32)
    holds = np.unpackbits(packed, axis=1, bitorder="little")  # [sets, 256]
    columns = np.ascontiguousarray(np.packbits(holds, axis=0).T)
    signatures = columns.view(f"V{columns.shape[1]}").ravel().tolist()  # for each byte the sets that hold it
    numbers = {signature: number for number, signature in enumerate(dict.fromkeys(signatures))}
    classes = np.array([numbers[signature] for signature in signatures], np.uint8)
    one_each = np.unique(classes, return_index=True)[1]
    return classes, np.ascontiguousarray(holds[:, one_each])
