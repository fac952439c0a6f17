"""The waiting queue, kept in policy order while the radix tree changes."""

import heapq

from jsg.cache.radix import RadixCache
from jsg.sched.policy import Key, Policy
from jsg.sched.request import RunningRequest

CHANGES_PER_REORDER = 1 / 32
"""The fraction of the requests that must change before all keys are made anew, if keys depend on each other."""

SPARE_KEYS = 1024
"""How many stale keys the heap may have, beside one for each request, before it is made anew."""


class WaitingQueue:
    """Requests that wait, in policy order.

    Each request has a watch on the radix tree, so a change of the tree gives new keys to exactly the requests that it
    concerns. If keys depend on each other, `reorder` makes all of them together when enough has changed, and a new
    request has no key until then.

    Invariants: `_keys` has each key that counts, and the heap has these and stale keys. A key ends with the arrival
    number of its request.
    """

    def __init__(self, policy: Policy, cache: RadixCache):
        self._policy = policy
        self._cache = cache
        self._by_arrival: dict[int, RunningRequest] = {}
        self._by_watch: dict[int, RunningRequest] = {}
        self._keys: dict[int, Key] = {}
        self._heap: list[Key] = []
        self._arrivals: list[int] = []
        self._num_changes = 0

    def __len__(self) -> int:
        return len(self._by_arrival)

    def add(self, running: RunningRequest) -> None:
        """Puts a request into the order and starts to watch its cached prefix."""
        tokens = running.key[: running.num_known]
        running.watch = self._cache.watch(tokens, running.request.namespace, limit=running.match_limit)
        self._by_watch[running.watch.serial] = running
        self._by_arrival[running.arrival] = running
        heapq.heappush(self._arrivals, running.arrival)
        self._num_changes += 1
        if not self._policy.depends_on_others:
            self._rekey([running])

    def remove(self, running: RunningRequest) -> None:
        """Takes a waiting request out."""
        assert running.watch is not None, "only a waiting request can be removed"
        self._cache.unwatch(running.watch)
        del self._by_watch[running.watch.serial]
        del self._by_arrival[running.arrival]
        self._keys.pop(running.arrival, None)
        running.watch = None
        self._num_changes += 1

    def reorder(self) -> None:
        """Makes keys that depend on each other anew, if enough has changed. Call it before a round of admissions.

        Such keys change at no other time: if one admission moved other requests, a round would not be depth first.
        """
        if not self._policy.depends_on_others:
            return
        self._num_changes += len(self._cache.drain_changed())
        if self._num_changes > CHANGES_PER_REORDER * len(self):
            self._keys = {r.arrival: key for r, key in self._policy.keys(self._by_arrival.values()).items()}
            self._rebuild_heap()
            self._num_changes = 0

    def first(self) -> RunningRequest | None:
        """The request to admit next."""
        if not self._policy.depends_on_others:
            self._rekey([self._by_watch[watch.serial] for watch in self._cache.drain_changed()])
        while self._heap and self._keys.get(self._heap[0][-1]) != self._heap[0]:
            heapq.heappop(self._heap)
        return self._by_arrival[self._heap[0][-1]] if self._heap else None

    def oldest(self) -> RunningRequest | None:
        """The waiting request that arrived first."""
        while self._arrivals and self._arrivals[0] not in self._by_arrival:
            heapq.heappop(self._arrivals)
        return self._by_arrival[self._arrivals[0]] if self._arrivals else None

    def _rekey(self, changed: list[RunningRequest]) -> None:
        for running, key in self._policy.keys(changed).items():
            if self._keys.get(running.arrival) != key:
                self._keys[running.arrival] = key
                heapq.heappush(self._heap, key)
        if len(self._heap) > 2 * len(self._keys) + SPARE_KEYS:
            self._rebuild_heap()

    def _rebuild_heap(self) -> None:
        """Drops the stale keys."""
        self._heap = list(self._keys.values())
        heapq.heapify(self._heap)
