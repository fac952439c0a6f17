"""The waiting queue, kept in its order while the radix tree changes."""

import heapq

from jsg.cache.radix import RadixCache
from jsg.sched.policy import Order
from jsg.sched.request import RunningRequest


class WaitingQueue:
    """Requests that wait, in order. Each has a watch on the radix tree, which keeps its cached prefix exact."""

    def __init__(self, order: Order, cache: RadixCache):
        self._order = order
        self._cache = cache
        self._by_arrival: dict[int, RunningRequest] = {}
        self._arrivals: list[int] = []

    def __len__(self) -> int:
        return len(self._by_arrival)

    def add(self, running: RunningRequest) -> None:
        """Puts a request into the order and starts to watch its cached prefix."""
        request = running.request
        running.watch = self._cache.watch(
            running.key[: running.num_known],
            request.namespace,
            running.match_limit,
            tier=-request.priority,
            turn=running.arrival,
        )
        self._by_arrival[running.arrival] = running
        heapq.heappush(self._arrivals, running.arrival)
        self._order.add(running)

    def remove(self, running: RunningRequest) -> None:
        """Takes a waiting request out."""
        assert running.watch is not None, "only a waiting request can be removed"
        self._order.remove(running)
        self._cache.unwatch(running.watch)
        del self._by_arrival[running.arrival]
        running.watch = None

    def first(self) -> RunningRequest | None:
        """The request to admit next."""
        return self._order.first()

    def oldest(self) -> RunningRequest | None:
        """The waiting request that arrived first."""
        while self._arrivals and self._arrivals[0] not in self._by_arrival:
            heapq.heappop(self._arrivals)
        return self._by_arrival[self._arrivals[0]] if self._arrivals else None
