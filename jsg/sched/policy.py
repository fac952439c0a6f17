"""In what order waiting requests are admitted. An order gives each request a key, and the smallest key goes first.

Each key begins with the client's priority, negated, so an order is one of requests of equal priority. No order lets a
request wait for ever: the bound on passing (`bypass.py`) overrules all keys.
"""

from typing import Protocol, final

from jsg.cache.radix import RadixCache
from jsg.sched.key_heap import KeyHeap
from jsg.sched.longest import LongestFirst
from jsg.sched.request import RunningRequest


class Order(Protocol):
    """Orders waiting requests, each of which has a watch."""

    def add(self, running: RunningRequest) -> None:
        """Takes a request."""
        ...

    def remove(self, running: RunningRequest) -> None:
        """Takes a request out, whose watch has not ended yet."""
        ...

    def first(self) -> RunningRequest | None:
        """The request to admit next."""
        ...


@final
class ByArrival:
    """Orders requests by priority, then by arrival."""

    def __init__(self, cache: RadixCache):
        self._cache = cache
        self._heap = KeyHeap[RunningRequest]()

    def add(self, running: RunningRequest) -> None:
        """See `Order`."""
        self._heap.put(running, (-running.request.priority, running.arrival))

    def remove(self, running: RunningRequest) -> None:
        """See `Order`."""
        self._heap.discard(running)

    def first(self) -> RunningRequest | None:
        """See `Order`. What has changed in the tree is of no use here, and is forgotten."""
        self._cache.drain_changed()
        return self._heap.first()


def make_order(name: str, cache: RadixCache) -> Order:
    """The order that the command line calls `name`."""
    match name:
        case "lpm":  # the longest cached prefix costs least now, and may be evicted later
            return LongestFirst(cache)
        case "fcfs":
            return ByArrival(cache)
        case _:
            raise AssertionError(f"no order is called {name!r}")
