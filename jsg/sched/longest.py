"""Longest cached prefix first, however many requests a change of the tree concerns.

All watches of a group (`jsg/cache/watch.py`) match equally many tokens, so the one that arrived first comes before the
others, and only groups are ordered. A group that moves as a whole gets one new key.
"""

from collections.abc import Iterable
from typing import final

from jsg.cache.radix import RadixCache
from jsg.cache.watch import Watch, WatchGroup
from jsg.sched.key_heap import KeyHeap
from jsg.sched.request import RunningRequest

MOST_LOWERED = 64
"""For how many groups, at most, it is worked out how many of their cached tokens can be used."""
SPARE_CHANGES = 1024
"""How many changes are remembered, beside four for each request. A priority that has missed more begins anew."""


class _Priority:
    """The requests of one priority.

    Attributes:
        waiting: The requests, by their watches.
        groups: The groups of these watches. A key is the number of matching tokens that can be used, negated, and the
            arrival of the group's first request. The number may be too large, never too small.
        num_seen: How many changes the keys of groups have taken in.
    """

    __slots__ = ("groups", "num_seen", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[Watch, RunningRequest] = {}
        self.groups = KeyHeap[WatchGroup]()
        self.num_seen = -1


@final
class LongestFirst:
    """Orders requests by priority, then by the tokens of their cached prefix that can be used, then by arrival.

    Only the keys of the largest priority are exact. Another priority takes in the changes that it has missed when its
    turn comes. So a change costs the same however many priorities its group has.
    """

    def __init__(self, cache: RadixCache):
        self._cache = cache
        self._priorities: dict[int, _Priority] = {}
        self._tiers = KeyHeap[int]()
        self._changes: list[WatchGroup] = []
        self._num_forgotten = 0
        self._num_waiting = 0

    def add(self, running: RunningRequest) -> None:
        """See `Order`."""
        watch = _watch(running)
        if (priority := self._priorities.get(watch.tier)) is None:
            self._priorities[watch.tier] = priority = _Priority()
            self._tiers.put(watch.tier, (watch.tier,))
        priority.waiting[watch] = running
        self._num_waiting += 1
        self._note(watch)

    def remove(self, running: RunningRequest) -> None:
        """See `Order`."""
        watch = _watch(running)
        waiting = self._priorities[watch.tier].waiting
        del waiting[watch]
        if not waiting:
            del self._priorities[watch.tier]
            self._tiers.discard(watch.tier)
        self._num_waiting -= 1
        self._note(watch)

    def _note(self, watch: Watch) -> None:
        assert watch.group is not None, "the watch of a waiting request has not ended"
        self._changes.append(watch.group)
        self._forget()

    def _forget(self) -> None:
        """Forgets all changes if there are too many."""
        if len(self._changes) > 4 * self._num_waiting + SPARE_CHANGES:
            self._num_forgotten += len(self._changes)
            self._changes.clear()

    def first(self) -> RunningRequest | None:
        """See `Order`."""
        tier = self._tiers.first()
        self._changes += self._cache.drain_changed()
        if tier is None:
            return None
        priority = self._priorities[tier]
        self._refresh(tier, priority)
        watch = self._first(tier, priority.groups)
        for _ in range(MOST_LOWERED):  # a key is exact, or too good as long as nobody has looked
            assert watch.group is not None, "the watch of a waiting request has not ended"
            if not priority.groups.put(watch.group, (-self._cache.usable_of(watch.group), watch.turn)):
                break
            watch = self._first(tier, priority.groups)
        return priority.waiting[watch]

    @staticmethod
    def _first(tier: int, groups: KeyHeap[WatchGroup]) -> Watch:
        group = groups.first()
        assert group is not None, "each watch has a group"
        watch = group.first(tier)
        assert watch is not None, "the key of a group has the first of its watches"
        return watch

    def _refresh(self, tier: int, priority: _Priority) -> None:
        """Takes in what has changed since the last time."""
        missed = priority.num_seen - self._num_forgotten
        changed: Iterable[WatchGroup]
        if missed < 0 or len(self._changes) - missed > len(priority.waiting):
            priority.groups = KeyHeap()
            changed = dict.fromkeys(watch.group for watch in priority.waiting if watch.group is not None)
        else:
            changed = self._changes[missed:]
        for group in changed:
            watch = group.first(tier)
            if watch is None:
                priority.groups.discard(group)
            else:
                priority.groups.put(group, (-group.matched, watch.turn))
        self._forget()
        priority.num_seen = self._num_forgotten + len(self._changes)


def _watch(running: RunningRequest) -> Watch:
    assert running.watch is not None, "only a waiting request has a watch"
    return running.watch
