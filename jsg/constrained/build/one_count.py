"""Proves that counted repeats are never at several counts at once, by reading back from where two counts would differ.

Two readings of one text have a repeat at two counts only after one of these:

- One reading enters the repeat, and the other one is in it already.
- Both have entered it at the same place, and then only one of them begins another item with the next byte.

Both have read the same byte before. From there the search goes back byte by byte, as long as both readings can have
read the same byte. If it never comes to a place where the two may have parted, no text has two counts. That takes one
or two bytes for a number or a string of JSON, because what comes before it cannot be in it.

The frames that are open are not followed, so the proof may fail where a text has one count only. Then `ambiguity.py` is
asked, which takes longer.
"""

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

from jsg.constrained import tables
from jsg.constrained.build.finish import Loop, Parts, Positions

_FUEL = 600
"""The most places and pairs that the proof for one loop looks at. Most loops need fewer than a hundred."""

_Before = tuple[Collection[int], bool]
"""The positions of the bytes that may be the last ones before a place, and whether it may be the beginning."""


class _OutOfFuelError(Exception):
    """The proof takes too long."""


def have_one_count(
    parts: Parts, repeats: Collection[int], most_together: int, known: "Backwards | None" = None
) -> bool:
    """Whether no text has any of these loops at two counts; False where there is no short proof.

    It is also False where one of them is in a rule with more than `most_together` loops, all of which may be open in
    different readings. `known` has the rules that come first, if these were read backwards before.
    """
    if len(parts.loops) > most_together and _are_many(parts, repeats, most_together):
        return False
    try:
        return all(map(Backwards(parts, known).has_one_count, repeats))
    except _OutOfFuelError:
        return False


def _are_many(parts: Parts, repeats: Collection[int], most: int) -> bool:
    """Whether a rule with one of these loops has more loops than `most`."""
    # A rule's positions come one after another, its END last. A rule that matches nothing has none.
    ends = [*itertools.accumulate([end for _, _, end in parts.rules], max)]
    rules = [bisect_left(ends, loop.first_end) for loop in parts.loops]
    sizes = Counter(rules)
    return any(sizes[rules[loop]] > most for loop in repeats)


class Backwards:
    """Reads a grammar backwards.

    Attributes:
        sources: For each position the lists of the positions that it may follow, without one that only leads to the
            position after it, as most bytes of a literal do.
        callers: For each rule the positions that call it.
        places: For each loop its position.
        rules, loops, separators: For each position that begins a rule, an item of a loop or its separator, the number
            of that rule or loop.
        known: What `_before` has found.
    """

    def __init__(self, parts: Parts, known: "Backwards | None" = None):
        """Reads the grammar of `parts`. Its first positions are those of `known`, which nothing but calls leads to."""
        self.parts = parts
        self.fuel = _FUEL
        self.known: dict[tuple[int, int | None], _Before] = {}
        self.sources: dict[int, list[list[int]]] = {} if known is None else known.sources.copy()
        self.callers: dict[int, list[int]] = {}
        self.places: dict[int, int] = {}
        begin = 0
        if known is not None:
            begin = len(known.parts.kinds)
            self.callers |= {rule: [*callers] for rule, callers in known.callers.items()}
            self.places |= known.places
        users: dict[int, list[int]] = {}
        for position, row in enumerate(parts.follow[begin:], begin):
            if len(row) == 1 and len(row[0]) == 1 and row[0][0] == position + 1:
                continue
            for group in row:
                sources = users.get(id(group))
                if sources is not None:
                    sources.append(position)
                    continue
                sources = users[id(group)] = [position]
                for item in group:
                    self.sources.setdefault(item, []).append(sources)
        for position, kind in enumerate(parts.kinds[begin:], begin):
            if kind == tables.CALL:
                self.callers.setdefault(parts.arguments[position], []).append(position)
            elif kind == tables.LOOP:
                self.places[parts.arguments[position]] = position
        self.rules = {item: rule for rule, (_, first, _) in enumerate(parts.rules) for item in first}
        self.loops = {item: number for number, loop in enumerate(parts.loops) for item in _items(loop)}
        self.separators = {item: number for number, loop in enumerate(parts.loops) for item in loop.separator}

    def has_one_count(self, loop: int) -> bool:
        """Whether no text has the loop at two counts; False where that is not sure."""
        self.fuel = _FUEL
        inside = self._inside(loop)
        entering, _ = self._before(self.places[loop])
        if not self._never_meet(itertools.product(inside, entering)):
            return False
        ending = self._all_before(self._ends(loop), loop) & inside
        bits, begin = self.parts.arguments, 0
        for position in self._first(self._turning(loop)):
            begin |= bits[position]
        going_on = self._all_before([position for position in inside if bits[position] & begin], loop) & inside
        return self._never_meet(itertools.product(ending, going_on), loop, inside)

    def _never_meet(
        self, pairs: Iterable[tuple[int, int]], loop: int | None = None, inside: set[int] | None = None
    ) -> bool:
        """Whether no text has two different readings that end with the bytes of one of these pairs of positions.

        Args:
            pairs: The positions that have read the last byte in both readings.
            loop: If it is given, the text is an item of this loop, with the separator before it.
            inside: The positions of the loop.
        """
        bits, seen = self.parts.arguments, set[tuple[int, int]]()
        todo = [pair for pair in pairs if bits[pair[0]] & bits[pair[1]]]
        while todo:
            pair = todo.pop()
            if pair in seen:
                continue
            seen.add(pair)
            if pair[0] == pair[1]:
                return False
            (before, may_begin), (others, may_others_begin) = [self._before(position, loop) for position in pair]
            if may_begin and may_others_begin:
                return False
            for one, other in itertools.product(before, others):
                self._spend()
                if bits[one] & bits[other] and (inside is None or (one in inside and other in inside)):
                    todo.append((one, other))
        return True

    def _inside(self, loop: int) -> set[int]:
        """The positions of the bytes that can be read while a loop is open."""
        row, follow = self.parts.loops[loop], self.parts.follow
        found = dict.fromkeys((*_items(row), *row.separator))
        for position in (order := list(found)):  # `order` grows while it is walked.
            self._spend()
            for each in (*itertools.chain.from_iterable(follow[position]), *self._entered(position)):
                if each not in found:
                    found[each] = None
                    order.append(each)
        return {position for position in found if self.parts.kinds[position] == tables.BYTE}

    def _first(self, positions: Iterable[int]) -> Iterator[int]:
        """The positions of the bytes that these positions, any of which may come next, begin with."""
        found = dict.fromkeys(positions)
        for position in (order := list(found)):  # `order` grows while it is walked.
            self._spend()
            kind = self.parts.kinds[position]
            if kind == tables.BYTE:
                yield position
            linked = itertools.chain.from_iterable(self.parts.follow[position]) if kind == tables.LINK else ()
            for each in (*self._entered(position), *linked):
                if each not in found:
                    found[each] = None
                    order.append(each)

    def _entered(self, position: int) -> Positions:
        """What may come next where the position calls a rule or enters a loop."""
        kind, argument = self.parts.kinds[position], self.parts.arguments[position]
        if kind == tables.CALL:
            return self.parts.rules[argument][1]
        if kind == tables.LOOP:
            row = self.parts.loops[argument]
            return (*_items(row), *row.separator)
        return ()

    def _turning(self, loop: int) -> Positions:
        """What may come after an item of a loop that goes on."""
        row = self.parts.loops[loop]
        return (*row.separator, *(_items(row) if row.separator_kind != tables.PLAIN_SEPARATOR else ()))

    def _ends(self, loop: int) -> Iterable[int]:
        """The ENDs of the items of a loop."""
        row = self.parts.loops[loop]
        return range(row.first_end, row.first_end + len(row.branches))

    def _all_before(self, positions: Iterable[int], loop: int) -> set[int]:
        """What may come before any of these positions in an item of a loop."""
        return set(itertools.chain.from_iterable(self._before(position, loop)[0] for position in positions))

    def _before(self, position: int, item_of: int | None = None) -> _Before:
        """What may come before a position: in the whole text, or in an item of a loop with the separator before it."""
        known = self.known.get((position, item_of))
        if known is None:
            known = self.known[position, item_of] = self._found_before(position, item_of)
        return known

    def _found_before(self, position: int, item_of: int | None) -> _Before:
        parts = self.parts
        found: dict[int, None] = {}
        may_begin = False
        todo, seen = [position], {position}
        while todo:
            self._spend()
            at = todo.pop()
            more: list[int] = []
            sources = [*itertools.chain.from_iterable(self.sources.get(at, ()))]
            if at and parts.follow[at - 1] == [(at,)]:
                sources.append(at - 1)
            for source in sources:
                kind, argument = parts.kinds[source], parts.arguments[source]
                if kind == tables.BYTE:
                    found[source] = None
                elif kind == tables.CALL:
                    more.append(parts.rules[argument][2])
                elif kind == tables.LOOP:
                    more += self._ends(argument)
                else:
                    more.append(source)
            if (rule := self.rules.get(at)) is not None:
                more += self.callers.get(rule, ())
                may_begin |= rule == parts.start and item_of is None
            if (loop := self.loops.get(at)) is not None:
                row = parts.loops[loop]
                if row.separator_kind != tables.NO_SEPARATOR:
                    more.append(row.first_end + len(row.branches))
                if loop == item_of:
                    may_begin = True
                else:
                    more.append(self.places[loop])
                    more += self._ends(loop) if row.separator_kind != tables.PLAIN_SEPARATOR else ()
            if (loop := self.separators.get(at)) is not None:
                if loop == item_of:
                    may_begin = True
                else:
                    more += self._ends(loop)
            for each in more:
                if each not in seen:
                    seen.add(each)
                    todo.append(each)
        return found, may_begin

    def _spend(self) -> None:
        self.fuel -= 1
        if self.fuel < 0:
            raise _OutOfFuelError


def _items(loop: Loop) -> Positions:
    """The positions that begin the items of a loop."""
    return tuple(itertools.chain.from_iterable(first for first, _ in loop.branches))
