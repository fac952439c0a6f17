"""Watches: the longest cached prefix of each waiting prompt, exact while the tree changes.

Watches that end at one place and need the same page next are a group. A change of the tree moves a group as a whole, as
far as all of it goes the same way. Where the ways part, the largest part stays the group, and the others become groups
of their own.

The watches of a group are in the order of their tokens, with the number of tokens that neighbours have in common. So
those that go the same way are neighbours, and to divide a group no prompts are compared but with the new edge.
"""

import bisect
import dataclasses
import heapq
import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np

from jsg.cache.node import Node

FIRST_COMPARED = 256
"""The tokens that are compared first, since most prompts differ soon. Each further look takes eight times as many."""
SPARE = 64
"""How many ended watches or stale turns a group may have, beside one for each watch, before they are dropped."""


@final
@dataclasses.dataclass(slots=True, eq=False)
class Watch:
    """One waiting prompt. `RadixCache.watch` makes it, and only the cache changes it.

    Attributes:
        tokens: int32, the whole pages that may match. It is the caller's array, not a copy, and must not change.
        namespace: The namespace whose prefixes may match.
        serial: A number that grows with each watch that is made.
        tier: Its group gives the watch of the smallest turn for each tier.
        turn: See `tier`.
        group: The watches that end where it does and need the same page next; None once it has ended.
    """

    tokens: np.ndarray
    namespace: str
    serial: int
    tier: int
    turn: int
    group: "WatchGroup | None" = None

    @property
    def matched(self) -> int:
        """How many tokens the longest cached prefix has."""
        assert self.group is not None, "an ended watch follows nothing"
        return self.group.matched

    @property
    def node(self) -> Node:
        """The node in whose edge, or at whose end, the match ends."""
        assert self.group is not None, "an ended watch follows nothing"
        return self.group.place.edge.node


@final
@dataclasses.dataclass(slots=True, eq=False)
class Edge:
    """The places on the edge of a node, from its first page to its end, where watches end.

    Attributes:
        node: The node. A split gives the upper half of its edge to another one.
        start: How many tokens the path has before the edge.
        places: By increasing `matched`, none without groups.
    """

    node: Node
    start: int
    places: "list[Place]"

    def find(self, matched: int) -> int:
        """The index of the first place that is so deep or deeper."""
        return first_index(self.places, matched)

    def at(self, matched: int) -> "Place":
        """The place at this depth; a new one if there is none."""
        index = self.find(matched)
        if index == len(self.places) or self.places[index].matched != matched:
            self.places.insert(index, Place(matched, self, {}))
        return self.places[index]


@final
@dataclasses.dataclass(slots=True, eq=False)
class Place:
    """A point of the tree where the match of some watches ends.

    Attributes:
        matched: How many tokens the path to it has.
        edge: The edge that it is on.
        groups: The groups there, by the page that each needs next; empty for the watches whose whole prompt matches.
    """

    matched: int
    edge: Edge
    groups: "dict[bytes, WatchGroup]"


def first_index(places: Sequence[Place], matched: int) -> int:
    """The index of the first place that is so deep or deeper."""
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        if places[middle].matched < matched:
            low = middle + 1
        else:
            high = middle
    return low


@final
class WatchGroup:
    """Watches at one place that need the same page next, in the order of their tokens.

    `_shared[i]` is the number of tokens that watch `i` has in common with the one before it. Each prompt ends with an
    end mark, as long as a page, which equal prompts have in common too.

    Invariants: the group of each watch is this one, or None if it has ended. The first and the last have not. The heaps
    of `_turns` have every watch, and stale entries; they are made when somebody asks for them.

    Attributes:
        place: Where its watches end.
        size: How many watches have not ended.
        watches: These, and some that have ended.
    """

    __slots__ = ("_num_turns", "_shared", "_turns", "place", "size", "watches")

    def __init__(self, place: Place, watches: list[Watch], shared: "array[int] | None" = None) -> None:
        self.place = place
        self.watches = watches
        self._shared = array("q", (0,)) if shared is None else shared
        self.size = 0
        self._turns: dict[int, list[tuple[int, int, Watch]]] | None = None
        self._num_turns = 0
        self._take(watches)

    @property
    def matched(self) -> int:
        """How many tokens of each watch match."""
        return self.place.matched

    def __iter__(self) -> Iterator[Watch]:
        return (watch for watch in self.watches if watch.group is self)

    def first(self, tier: int) -> Watch | None:
        """The watch of the smallest turn in a tier."""
        if len(self.watches) == 1:
            return self.watches[0] if self.watches[0].tier == tier else None
        turns = self._heaps().get(tier)
        while turns:
            watch = turns[0][2]
            if watch.group is self:
                return watch
            heapq.heappop(turns)
            self._num_turns -= 1
        return None

    def _heaps(self) -> dict[int, list[tuple[int, int, Watch]]]:
        """The watches by turn, in a heap for each tier."""
        if self._turns is None or self._num_turns > 2 * self.size + SPARE:
            self._turns, self._num_turns = {}, self.size
            for watch in self:
                self._turns.setdefault(watch.tier, []).append((watch.turn, watch.serial, watch))
            for turns in self._turns.values():
                heapq.heapify(turns)
        return self._turns

    def common(self, watch: Watch, page_size: int) -> int:
        """The most tokens that a watch has in common with another one here, end marks too; `matched` if it is alone."""
        first, *_ = self._search(watch.tokens, page_size, is_whole=True)  # of equal ones
        here, most = self.watches.index(watch, first), self.matched
        for step in (-1, 1):
            index, shared = here, len(watch.tokens) + page_size
            while 0 <= index + step < len(self.watches):
                shared = min(shared, self._shared[max(index, index + step)])
                index += step
                if self.watches[index].group is self:
                    most = max(most, shared)
                    break
        return most

    def next_page(self, page_size: int) -> bytes:
        """The page of tokens that would lengthen the match; empty where whole prompts match."""
        matched = self.matched
        return self.watches[0].tokens[matched : matched + page_size].tobytes()

    # Watches come and go.

    def add(self, watch: Watch, page_size: int) -> None:
        """Adds a new watch, which ends here and needs the same page next."""
        index, before, after = self._search(watch.tokens, page_size, is_whole=True)
        self.watches.insert(index, watch)
        self._shared.insert(index, before)
        if index + 1 < len(self.watches):
            self._shared[index + 1] = after
        self._take((watch,))

    def end(self, watch: Watch) -> None:
        """Ends a watch. It stays among the others, unless it is at an end, until they are as many."""
        watch.group = None
        self.size -= 1
        watches = self.watches
        while watches and watches[-1].group is None:
            watches.pop()
            self._shared.pop()
        if watches and watches[0].group is None:
            count = next(index for index, other in enumerate(watches) if other.group is not None)
            del watches[:count], self._shared[:count]
        if len(watches) > 2 * self.size + SPARE:
            kept = np.array([index for index, other in enumerate(watches) if other.group is not None])
            ends = np.minimum.reduceat(np.frombuffer(self._shared, np.int64), np.concatenate([kept[:1], kept[:-1] + 1]))
            self.watches = [watches[index] for index in kept.tolist()]
            self._shared = array("q", ends.tolist())

    def _take(self, watches: Sequence[Watch]) -> None:
        """Makes this the group of watches that are in the list already."""
        for watch in watches:
            watch.group = self
        self.size += len(watches)
        if self._turns is None or 4 * len(watches) > self.size:
            self._turns = None
            return
        for watch in watches:
            heapq.heappush(self._turns.setdefault(watch.tier, []), (watch.turn, watch.serial, watch))
        self._num_turns += len(watches)

    # The tree changes.

    def divide(self, edge: np.ndarray, page_size: int) -> list[tuple[int, "WatchGroup"]]:
        """Divides the group by how far its watches go along a new edge, and by the page that they need then.

        Args:
            edge: int32, the tokens of the edge. It begins at the group's place, with the page that the group needs.
            page_size: Tokens in a page.

        Returns:
            The parts with the tokens that match of each. The largest part is this group. Nobody knows the place of the
            others yet.
        """
        end = self.matched + len(edge)
        index, before, after = self._search(edge, page_size, is_whole=False)
        starts, borders = self._blocks(end)
        first = bisect.bisect_left(starts, index)  # the block after the edge
        reach = [end] * len(starts)
        if first < len(starts):
            reach[first:] = itertools.accumulate([min(after, end), *borders[first + 1 :]], min)
        if first:
            reach[:first] = [*itertools.accumulate([min(before, end), *borders[first - 1 : 0 : -1]], min)][::-1]
        cuts = [b for b in range(1, len(starts)) if reach[b] != reach[b - 1] or borders[b] <= reach[b]]
        return self._cut([0, *(starts[b] for b in cuts)], [reach[0], *(reach[b] for b in cuts)])

    def _blocks(self, end: int) -> tuple[list[int], list[int]]:
        """Where watches begin that have `end` tokens or fewer in common with those before, and how many those are."""
        shared = np.frombuffer(self._shared, np.int64)  # while it lives, the array cannot change
        starts = np.flatnonzero(shared <= end)
        if not len(starts) or starts[0]:
            starts = np.append(0, starts)
        return starts.tolist(), shared[starts].tolist()

    def _cut(self, starts: list[int], reach: list[int]) -> "list[tuple[int, WatchGroup]]":
        """Makes parts that begin at these indices, and gives each with its reach. This group stays the largest part."""
        watches, stops = self.watches, [*starts[1:], len(self.watches)]
        largest = max(range(len(starts)), key=lambda part: stops[part] - starts[part])
        parts: list[tuple[int, WatchGroup]] = []
        for part, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            if part == largest:
                parts.append((reach[part], self))
                continue
            start, stop = self._live(start, stop)
            if stop - start == 1:
                parts.append((reach[part], WatchGroup(self.place, watches[start:stop])))
                self.size -= 1
            elif start < stop:
                group = WatchGroup(self.place, [], self._shared[start:stop])
                group.watches = watches[start:stop]
                group._take([watch for watch in group.watches if watch.group is self])
                self.size -= group.size
                parts.append((reach[part], group))
        start, stop = self._live(starts[largest], stops[largest])
        del watches[stop:], watches[:start]
        del self._shared[stop:], self._shared[:start]
        return parts if self.size else [part for part in parts if part[1] is not self]

    def _live(self, start: int, stop: int) -> tuple[int, int]:
        """The range without the watches at its ends that have ended."""
        while start < stop and self.watches[start].group is not self:
            start += 1
        while start < stop and self.watches[stop - 1].group is not self:
            stop -= 1
        return start, stop

    def absorb(self, before: "Sequence[WatchGroup]", behind: "Sequence[WatchGroup]") -> None:
        """Takes all watches of other groups, each from a place of its own or for a page of its own.

        Args:
            before: Those whose tokens come before those of this group, in the order of their tokens.
            behind: Those whose tokens come after, in their order.
        """
        for upper, lower in itertools.pairwise((*before, self, *behind)):  # they part at the upper of the two places
            lower._shared[0] = min(upper.matched, lower.matched)
        shared = array("q")
        for other in before:
            shared.extend(other._shared)
        self.watches[:0] = [watch for other in before for watch in other.watches]
        self._shared[:0] = shared
        for other in behind:
            self.watches.extend(other.watches)
            self._shared.extend(other._shared)
        others = (*before, *behind)
        self._take([watch for other in others for watch in other])
        for other in others:
            other.size = 0
            other.watches.clear()

    def _search(self, tokens: np.ndarray, page_size: int, *, is_whole: bool) -> tuple[int, int, int]:
        """Where tokens belong, and how many tokens their path has in common with the watches before and after.

        Args:
            tokens: int32. The whole tokens of a new watch, or those of an edge that begins at this place.
            page_size: Tokens in a page.
            is_whole: Whether they are whole. If so, they end with the end mark. An edge comes before all watches that
                begin with it.
        """
        matched = self.matched
        offset = 0 if is_whole else matched
        low, high = 0, len(self.watches)
        before = after = matched
        while low < high:
            middle = (low + high) // 2
            other = self.watches[middle].tokens
            count = num_common(tokens, other[offset:], min(before, after) - offset)
            count -= count % page_size
            at = offset + count
            is_at_end, is_other_at_end = count == len(tokens), at == len(other)
            if is_at_end and is_other_at_end:
                goes_up = False
                at += page_size if is_whole else 0
            elif is_at_end or is_other_at_end:
                goes_up = is_other_at_end
            else:
                own = tokens[count : count + page_size].tobytes()
                goes_up = own > other[at : at + page_size].tobytes()
            if goes_up:
                low, before = middle + 1, at
            else:
                high, after = middle, at
        return low, before, after


def num_common(one: np.ndarray, other: np.ndarray, start: int) -> int:
    """How many leading tokens are equal. The first `start` are known to be."""
    end, step = min(len(one), len(other)), FIRST_COMPARED
    while start < end:
        stop = min(start + step, end)
        differs = one[start:stop] != other[start:stop]
        index = int(differs.argmax())
        if differs[index]:
            return start + index
        start, step = stop, 8 * step
    return end
