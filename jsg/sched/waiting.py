"""The waiting queue, kept in policy order as the radix tree changes underneath it."""

import heapq

from jsg.cache.radix import RadixCache
from jsg.sched.policy import Key, Policy
from jsg.sched.records import RunningRequest


class WaitingQueue:
    """Requests that wait, in policy order.

    Each holds a watch on the radix tree, so a change of the tree re-orders exactly the requests that it concerns.

    Invariant: the heap holds the current key of every waiting request; other keys in it are stale. A key ends with the
    request's arrival number, which names the request.
    """

    def __init__(self, policy: Policy, cache: RadixCache):
        self._policy = policy
        self._cache = cache
        self._by_arrival: dict[int, RunningRequest] = {}
        self._by_watch: dict[int, RunningRequest] = {}
        self._keys: dict[int, Key] = {}
        self._heap: list[Key] = []
        self._arrivals: list[int] = []
        self._is_stale = False

    def __len__(self) -> int:
        return len(self._by_arrival)

    def add(self, running: RunningRequest) -> None:
        """Puts a request in its place and starts to watch its cached prefix."""
        tokens = running.tokens[: running.num_known]
        running.watch = self._cache.watch(tokens, running.request.namespace, limit=running.match_limit)
        self._by_watch[running.watch.serial] = running
        self._by_arrival[running.arrival] = running
        heapq.heappush(self._arrivals, running.arrival)
        self._rekey([running])

    def remove(self, running: RunningRequest) -> None:
        """Takes a waiting request out."""
        assert running.watch is not None, "only a waiting request can be removed"
        self._cache.unwatch(running.watch)
        del self._by_watch[running.watch.serial]
        del self._by_arrival[running.arrival]
        self._keys.pop(running.arrival, None)
        running.watch = None
        self._is_stale |= self._policy.depends_on_others

    def first(self) -> RunningRequest | None:
        """The request to admit next."""
        self._refresh()
        while self._heap and self._keys.get(self._heap[0][-1]) != self._heap[0]:
            heapq.heappop(self._heap)
        return self._by_arrival[self._heap[0][-1]] if self._heap else None

    def oldest(self) -> RunningRequest | None:
        """The waiting request that arrived first."""
        while self._arrivals and self._arrivals[0] not in self._by_arrival:
            heapq.heappop(self._arrivals)
        return self._by_arrival[self._arrivals[0]] if self._arrivals else None

    def check_integrity(self) -> None:
        """Asserts the invariant; for tests."""
        self._refresh()
        expected = {r.arrival: key for r, key in self._policy.keys(self._by_arrival.values()).items()}
        assert self._keys == expected, "a key is out of date"
        assert expected.items() <= {key[-1]: key for key in self._heap if self._keys.get(key[-1]) == key}.items()
        assert len(self._by_watch) == len(self._by_arrival)

    def _refresh(self) -> None:
        changed = [self._by_watch[w.serial] for w in self._cache.drain_changed() if w.serial in self._by_watch]
        self._rekey(changed)
        if self._is_stale:
            self._keys = {r.arrival: key for r, key in self._policy.keys(self._by_arrival.values()).items()}
            self._heap = list(self._keys.values())
            heapq.heapify(self._heap)
            self._is_stale = False

    def _rekey(self, changed: list[RunningRequest]) -> None:
        if self._policy.depends_on_others:
            self._is_stale |= bool(changed)
            return
        for running, key in self._policy.keys(changed).items():
            if self._keys.get(running.arrival) != key:
                self._keys[running.arrival] = key
                heapq.heappush(self._heap, key)
