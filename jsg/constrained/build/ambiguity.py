"""Finds the counted repeats that may be at several counts at once, which a machine cannot follow for long.

A counted repeat costs the same whatever its bounds are, but each of its counts is one more way to read a text. So
a repeat that can have many different counts for the same text must be written out instead.

The search follows two readings of one text side by side, from every place where a text can be read in two ways. It
ignores the counts: a repeat may always end and may always go on. A reading is the position that read the last byte,
and the frames above those that both readings share:

    base │ frame, frame, ... │ position        the other reading has this form too; equal frames become part of the base

If both readings have a frame of the same loop right above the base, the loop has two counts. The search looks for such
loops. As long as readings have no frames, all that have read the same text are followed as one group and not in pairs:
the names of a hundred members, which begin alike, are five thousand pairs.

The answer is approximate in both directions. Where a reading leaves the base, the search assumes that it may continue
after every caller, so it may find more loops than are ambiguous. It may find fewer in a rule that can end at several
places and is called from two places at once, because it assumes that readings that enter a rule together also leave it
together. If the fuel runs out, all loops of a grammar with one rule count as ambiguous, and no further loops of a
larger grammar do.
"""

import functools
import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from jsg.constrained import tables
from jsg.constrained.build.finish import Firsts, Parts, Positions
from jsg.constrained.build.one_count import Backwards, have_one_count

_FUEL = 300_000
"""The number of pairs of ways that the search may compare. It then takes less than a tenth of a second."""
_STEP = 10
"""Fuel to make a way, or to compare two ways that can read the same byte."""
_FUEL_AFTER_FIND = 100_000
"""The most fuel that is left after a loop was found, because the grammar is then built and searched again."""
_LONGEST_CHAR = 12
"""The most bytes of a character, which may be two escapes in a JSON string. Two characters that begin with the same
bytes may give a loop two counts until one of the characters ends."""
_MOST_TOGETHER = 24
"""The most loops that may be open in different readings at once. They are fewer than `Limits.heads`, so that a machine
can follow them all."""
_DEEPEST = 12
_FRESH, _TURNED, _OLD = range(3)
"""What is known of a count: it is zero, it is above zero, or the loop was open before the readings separated."""

Frame = tuple[int, int]
"""The position of a call or loop, and what is known of its count."""
Stack = tuple[Frame, ...]


class Way(NamedTuple):
    """A way in which a reading may read one more byte.

    Attributes:
        bits: The bytes.
        position: The position that read the byte.
        stack: The frames above the base.
        below: The frames of the base that the reading has left, the lowest first. `stack` then begins below them.
    """

    bits: int
    position: int
    stack: Stack
    below: Stack


Reading = tuple[int, Stack]
_Start = tuple[Iterable[int], Stack, Stack, int]
"""The positions that may come next, the frames above the base, the frames of the base that the reading has left, and
the level of the base."""


def several_counts(parts: Parts, firsts: Firsts, repeats: Iterable[int], known: Backwards | None = None) -> set[int]:
    """The loops that may have several counts at once, or be open beside more loops than a machine follows.

    `repeats` are the loops that matter. If their frames hold no counts, there is no search. `known` has the first
    rules, if these were read backwards before.
    """
    counting = [number for number in repeats if _counts(parts, number)]
    if not counting or have_one_count(parts, counting, _MOST_TOGETHER, known):
        return set()
    return _Search(_Levels(parts, firsts)).run()


def _counts(parts: Parts, number: int) -> bool:
    """Whether frames of a loop can differ from each other, by their counts or by the items that have occurred."""
    loop = parts.loops[number]
    return loop.min > 1 or loop.max < tables.UNBOUNDED or any(bit for _, bit in loop.branches)


class _Levels:
    """The level of each position, and the positions that enter each level. Each rule and each loop is a level.

    Attributes:
        of: For each position its level: the number of a rule, or the number of rules plus that of a loop; -1 if nothing
            leads to the position.
        callers: For each level the positions that enter it.
        after: For each level the bytes that may come after it.
        linked: For each link the bytes that may come next where it is.
        first: For each position the bytes that may come next where it may, as bits.
    """

    def __init__(self, parts: Parts, firsts: Firsts):
        self.parts = parts
        self.firsts = firsts
        self.num_rules = len(parts.rules)
        self.branches = [[p for first, _ in loop.branches for p in first] for loop in parts.loops]
        self.of = [-1] * len(parts.kinds)
        begins = [first for _, first, _ in parts.rules]
        begins += [(*inner, *loop.separator) for inner, loop in zip(self.branches, parts.loops, strict=True)]
        self.begins = begins
        self.callers: list[list[int]] = [[] for _ in begins]
        for level, first in enumerate(begins):
            self._spread(level, first)
        self.after = [0] * len(begins)
        self.linked = {p: 0 for p, kind in enumerate(parts.kinds) if kind == tables.LINK and self.of[p] >= 0}
        self._find_after()
        self.first = [self.bits(position, level) if level >= 0 else 0 for position, level in enumerate(self.of)]

    def _spread(self, level: int, first: Iterable[int]) -> None:
        of, follow, kinds = self.of, self.parts.follow, self.parts.kinds
        todo = list(first)
        while todo:
            position = todo.pop()
            if of[position] >= 0:
                continue
            of[position] = level
            if kinds[position] in (tables.CALL, tables.LOOP):
                self.callers[self.entered(position)].append(position)
            for group in follow[position]:
                todo.extend(group)

    def entered(self, position: int) -> int:
        """The level that a call or loop enters."""
        argument = self.parts.arguments[position]
        return argument if self.parts.kinds[position] == tables.CALL else self.num_rules + argument

    def bits(self, position: int, level: int) -> int:
        """The bytes that may come next where this position may, as bits."""
        kind, argument = self.parts.kinds[position], self.parts.arguments[position]
        if kind == tables.BYTE:
            return argument
        if kind in (tables.CALL, tables.LOOP):
            return self.firsts[self.entered(position)][0]
        if kind == tables.LINK:
            return self.linked[position]
        return self.firsts[level][0] if kind == tables.END_SEPARATOR else self.after[level]

    def turning(self, loop: int) -> Positions:
        """The positions that may come after an item of a loop that continues: of its separator or its next item."""
        row = self.parts.loops[loop]
        if row.max <= 1:
            return ()
        if row.separator_kind == tables.NO_SEPARATOR:
            return tuple(self.branches[loop])
        return (*row.separator, *(self.branches[loop] if row.separator_kind == tables.EMPTY_SEPARATOR else ()))

    def _find_after(self) -> None:
        """Fills `after` and `linked`. They are a least fixpoint, because one level may end where another ends."""
        kinds, num_levels = self.parts.kinds, len(self.begins)  # the node of a link is its position after all levels
        known = dict.fromkeys([*range(num_levels), *(num_levels + link for link in self.linked)], 0)
        users: dict[int, list[int]] = {node: [] for node in known}
        for node in known:
            sources = self.callers[node] if node < num_levels else [node - num_levels]
            rows: list[tuple[Iterable[int], int]] = [
                (itertools.chain.from_iterable(self.parts.follow[source]), self.of[source]) for source in sources
            ]
            if self.num_rules <= node < num_levels:
                rows.append((self.turning(node - self.num_rules), node))
            for positions, level in rows:
                for position in positions:
                    if kinds[position] == tables.LINK:
                        users[num_levels + position].append(node)
                    elif kinds[position] in (tables.END_RULE, tables.END_BRANCH):
                        users[level].append(node)
                    else:
                        known[node] |= self.bits(position, level)
        todo = list(known)
        while todo:
            node = todo.pop()
            for user in users[node]:
                if known[node] & ~known[user]:
                    known[user] |= known[node]
                    todo.append(user)
        self.after = [known[level] for level in range(num_levels)]
        self.linked = {link: known[num_levels + link] for link in self.linked}


class _Search:
    """The search: the pairs of readings seen so far, and the ambiguous loops found with them."""

    def __init__(self, levels: _Levels):
        self._levels = levels
        self._parts = levels.parts
        self._ways: dict[Reading, tuple[int, list[Way]]] = {}
        self._seen: dict[tuple[Stack, Stack], set[int]] = {}
        self._groups: list[Positions] = []
        self._group_of: dict[int, int] = {}
        self._num_groups = 0
        self._todo: list[tuple[Reading, Reading, int]] = []
        self._beside: dict[tuple[int, Positions], set[Positions]] = {}
        self._found: set[int] = set()
        self._fuel = _FUEL

    def run(self) -> set[int]:
        """The loops that are ambiguous."""
        for items, level in self._forks():
            if self._fuel <= 0:
                break
            self._part(items, level)
        for starts in self._turns():
            if self._fuel <= 0:
                break
            self._meet_some([self._ways_from([start]) for start in starts])
        while (self._groups or self._todo) and self._fuel > 0:
            if self._groups:
                self._step(self._groups.pop())
                continue
            left, right, age = self._todo.pop()
            if not left[1] and not right[1]:
                self._step((left[0], right[0]))
                continue
            bits, ways = self._ways_of(left)
            other_bits, others = self._ways_of(right)
            shared = bits & other_bits
            self._fuel -= _STEP
            if not shared:
                continue
            near, far = [w for w in ways if w.bits & shared], [w for w in others if w.bits & shared]
            if age and any(
                way.below or way.stack[:1] != stack[:1]
                for some, stack in ((near, left[1]), (far, right[1]))
                for way in some
            ):
                self._find((self._parts.arguments[left[1][0][0]],))  # the loop continues with two counts
            else:
                self._meet_each(near, far, age)
        if self._fuel <= 0 and not self._found and self._levels.num_rules == 1:
            return set(range(len(self._parts.loops)))  # The answer is unknown. Writing all loops out is always right.
        return self._found

    def _step(self, group: Positions) -> None:
        """Reads one more byte from positions that have read the same text in the level in which their readings parted.

        Names of members that begin alike are such a group. Its pairs would be as many as the square of the names.
        """
        follow = self._parts.follow
        groups = dict.fromkeys([group for position in group for group in follow[position]])
        items = dict.fromkeys(itertools.chain.from_iterable(groups))
        self._fuel -= len(group)
        self._part(items, self._levels.of[group[0]])

    def _part(self, items: Collection[int], level: int) -> None:
        """Lets readings part where several of the items, any of which may come next, can read the same byte."""
        first = self._levels.first
        once = several = 0
        for item in items:
            several |= once & first[item]
            once |= first[item]
        if several:
            rows = [self._ways_from([((item,), (), (), level)]) for item in items if first[item] & several]
            self._meet_some([[way for way in row if way.bits & several] for row in rows])

    def _meet_some(self, rows: Iterable[Sequence[Way]]) -> None:
        """Compares the ways of each row with those of all others, as groups where they stay in their level."""
        within: dict[int, dict[int, None]] = {}
        every: list[Way] = []
        leaving: list[Way] = []
        for row in rows:
            for way in row:
                if way.stack or way.below:
                    self._meet_each((way,), every, 0)
                else:
                    self._meet_each((way,), leaving, 0)
                    within.setdefault(way.bits, {})[way.position] = None
            every.extend(row)
            leaving.extend([way for way in row if way.stack or way.below])
        once = several = 0
        for bits, positions in within.items():
            several |= bits if len(positions) > 1 else once & bits
            once |= bits
        while several and self._fuel > 0:
            byte = several & -several
            shared = several
            group: dict[int, None] = {}
            for bits, positions in within.items():
                if bits & byte:
                    shared &= bits
                    group |= positions
                else:
                    shared &= ~bits
            several &= ~shared
            self._fuel -= _STEP * len(group)
            self._add(tuple(group))

    def _add(self, group: Positions) -> None:
        """Queues positions that have read the same text: as one group the first time, and else as pairs."""
        known: dict[int | None, list[int]] = {}
        for position in group:
            known.setdefault(self._group_of.get(position), []).append(position)
        new = known.pop(None, [])
        if not known:
            self._group_of |= dict.fromkeys(group, self._num_groups)
            self._num_groups += 1
            self._groups.append(group)
            return
        rows = [*known.values(), *([position] for position in new)]
        for number, row in enumerate(rows):
            for one, two in itertools.product(row, itertools.chain.from_iterable(rows[number + 1 :])):
                self._fuel -= 1
                self._queue((one, ()), (two, ()), 0)

    def _forks(self) -> Iterable[tuple[Collection[int], int]]:
        """Lists of positions that may come next, with their level."""
        levels, seen = self._levels, set[Positions]()
        lists = [(tuple(first), level) for level, first in enumerate(levels.begins)]
        for position, groups in enumerate(self._parts.follow):
            if len(groups) > 1 or (groups and len(groups[0]) > 1):
                lists.append((tuple(itertools.chain.from_iterable(groups)), levels.of[position]))
        for items, level in lists:
            if level >= 0 and items not in seen:
                seen.add(items)
                yield dict.fromkeys(items), level

    def _turns(self) -> Iterable[Sequence[_Start]]:
        """Where an item of a loop may end: the starts after the loop, and those where it goes on."""
        levels, first = self._levels, self._levels.first
        for position, kind in enumerate(self._parts.kinds):
            level = levels.of[position]
            if kind == tables.END_BRANCH and level >= 0:
                for starts in itertools.batched(self._ended(kind, (), (), level), 2):
                    if _overlap([first[item] for items, *_ in starts for item in items]):
                        yield starts

    def _meet_each(self, ways: Iterable[Way], others: Sequence[Way], age: int) -> None:
        for way in ways:
            self._fuel -= len(others)
            if self._fuel <= 0:
                return
            bits = way.bits
            for other in others:
                if bits & other.bits:
                    self._meet(way, other, age)

    def _ways_of(self, reading: Reading) -> tuple[int, list[Way]]:
        """All bytes that may come next, as bits, and the ways to read one of them."""
        found = self._ways.get(reading)
        if found is None:
            position, stack = reading
            level = self._levels.of[stack[0][0] if stack else position]
            items = itertools.chain.from_iterable(self._parts.follow[position])
            ways = self._ways_from([(items, stack, (), level)])
            found = self._ways[reading] = functools.reduce(operator.or_, [way.bits for way in ways], 0), ways
        return found

    def _ways_from(self, todo: list[_Start]) -> list[Way]:
        """The ways to read one more byte from these starts."""
        parts, levels = self._parts, self._levels
        ways: list[Way] = []
        seen: set[tuple[int, Stack, Stack]] = set()
        while todo and self._fuel > 0:
            items, stack, below, level = todo.pop()
            self._fuel -= 1
            for item in items:
                if (item, stack, below) in seen:
                    continue
                seen.add((item, stack, below))
                self._fuel -= _STEP
                kind = parts.kinds[item]
                if kind == tables.BYTE:
                    ways.append(Way(parts.arguments[item], item, stack, below))
                elif kind in (tables.CALL, tables.LOOP):
                    first = (
                        parts.rules[parts.arguments[item]][1]
                        if kind == tables.CALL
                        else levels.branches[parts.arguments[item]]
                    )
                    if len(stack) + len(below) < _DEEPEST:
                        todo.append((first, (*stack, (item, _FRESH)), below, level))
                elif kind == tables.LINK:
                    todo.append((itertools.chain.from_iterable(parts.follow[item]), stack, below, level))
                else:
                    todo.extend(self._ended(kind, stack, below, level))
        return ways

    def _ended(self, kind: int, stack: Stack, below: Stack, level: int) -> Iterable[_Start]:
        """The starts after the uppermost level, which ends here."""
        parts, levels = self._parts, self._levels
        if kind == tables.END_SEPARATOR:
            loop = (levels.entered(stack[-1][0]) if stack else level) - levels.num_rules
            yield levels.branches[loop], stack, below, level
            return
        if not stack and len(below) >= _DEEPEST:
            return
        for caller in (stack[-1][0],) if stack else levels.callers[level]:
            rest = stack[:-1]
            left, at = (below, level) if stack else (((caller, _OLD), *below), levels.of[caller])
            after = list(itertools.chain.from_iterable(parts.follow[caller]))
            yield after, rest, left, at
            if kind != tables.END_RULE:
                yield levels.turning(parts.arguments[caller]), (*rest, (caller, _TURNED)), left, at

    def _meet(self, way: Way, other: Way, age: int) -> None:
        """Compares two readings of one text, and queues the pair unless the two are the same.

        `age` says for how many bytes the pair has had two counts of one loop. Two characters that differ only in their
        last byte may cause two counts for a few bytes.
        """
        self._fuel -= _STEP
        if way.below and other.below and self._exclude_each_other(way, other):
            return
        left, right = way.stack, other.stack
        if way.below != other.below:
            deeper, shallow = (
                (way.below, other.below) if len(way.below) > len(other.below) else (other.below, way.below)
            )
            rest = len(deeper) - len(shallow)
            if deeper[rest:] != shallow:
                return
            if deeper is way.below:
                right = deeper[:rest] + right
            else:
                left = deeper[:rest] + left
        common, older = 0, 0
        for (caller, count), (caller2, count2) in zip(left, right, strict=False):
            if caller != caller2:
                break
            if count != count2 and self._parts.kinds[caller] == tables.LOOP:
                loop = self._parts.arguments[caller]
                if _counts(self._parts, loop):
                    older = age + 1
                    break
            common += 1
        if older > _LONGEST_CHAR:
            self._find((self._parts.arguments[left[common][0]],))
            return
        readings = self._in_step((way.position, left[common:]), (other.position, right[common:]))
        if readings[0] == readings[1]:
            return
        self._queue(*readings, older)

    def _queue(self, left: Reading, right: Reading, age: int) -> None:
        """Queues a pair that is new."""
        if left[::-1] > right[::-1]:
            left, right = right, left
        seen, key = self._seen.setdefault((left[1], right[1]), set()), left[0] * len(self._parts.kinds) + right[0]
        if key not in seen:
            seen.add(key)
            self._todo.append((left, right, age))
            self._note(left, right)

    def _exclude_each_other(self, way: Way, other: Way) -> bool:
        """Whether one reading leaves a loop of a fixed count, and the other one stays in it with the same count."""
        for depth in range(1, min(len(way.below), len(other.below)) + 1):
            caller = way.below[-depth][0]
            if caller != other.below[-depth][0] or self._parts.kinds[caller] != tables.LOOP:
                continue
            loop = self._parts.loops[self._parts.arguments[caller]]
            if loop.min == loop.max and _turns(way, depth) != _turns(other, depth):
                return True
        return False

    def _in_step(self, left: Reading, right: Reading) -> tuple[Reading, Reading]:
        """Both readings moved to after their calls, if they are at the same place in a rule that two places called."""
        common, most = 0, min(len(left[1]), len(right[1]))
        if left[0] == right[0]:
            while common < most and left[1][-1 - common] == right[1][-1 - common]:
                common += 1
            if common < most:
                caller, other = left[1][-1 - common][0], right[1][-1 - common][0]
                kinds, arguments = self._parts.kinds, self._parts.arguments
                if kinds[caller] == kinds[other] == tables.CALL and arguments[caller] == arguments[other]:
                    return (caller, left[1][: -1 - common]), (other, right[1][: -1 - common])
        return left, right

    def _note(self, left: Reading, right: Reading) -> None:
        """Notes which loops are open in different readings. Readings with the same open loops are one head."""
        if not left[1] and not right[1]:
            return
        open_left, open_right = tuple([c for c, _ in left[1]]), tuple([c for c, _ in right[1]])
        if open_left == open_right or any(self._parts.kinds[c] != tables.LOOP for c in (*open_left, *open_right)):
            return
        level = self._levels.of[left[1][0][0] if left[1] else left[0]]
        for one, two in ((open_left, open_right), (open_right, open_left)):
            beside = self._beside.setdefault((level, one), set())
            if two in beside:
                continue
            beside.add(two)
            if len(beside) > _MOST_TOGETHER:
                self._find([self._parts.arguments[c] for chain in beside for c in chain[-1:]])

    def _find(self, loops: Iterable[int]) -> None:
        self._found.update(loops)
        self._fuel = min(self._fuel, _FUEL_AFTER_FIND)


def _turns(way: Way, depth: int) -> bool:
    """Whether a way continues the loop that is open `depth` frames below the top; otherwise it has left the loop."""
    return len(way.below) == depth and way.stack[:1] == ((way.below[0][0], _TURNED),)


def _overlap(sets: Iterable[int]) -> bool:
    """Whether two of the sets have a byte in common."""
    known = 0
    for bits in sets:
        if known & bits:
            return True
        known |= bits
    return False
