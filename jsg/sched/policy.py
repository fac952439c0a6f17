"""In what order waiting requests are admitted. An order gives each request a key, and the smallest key goes first.

Each key begins with the client's priority, negated, so an order is one of requests of equal priority. No order lets a
request wait for ever: the bound on passing (`bypass.py`) stands above all keys.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, final

from jsg.cache.node import Node, Root
from jsg.cache.radix import RadixCache
from jsg.cache.watch import Watch
from jsg.sched.key_heap import Key, KeyHeap
from jsg.sched.longest import LongestFirst
from jsg.sched.request import RunningRequest

CHANGES_PER_REORDER = 1 / 32
"""The fraction of the requests that must change before all keys are made anew, if keys depend on each other."""


class Order(Protocol):
    """Orders waiting requests, each of which has a watch."""

    is_whole: bool
    """Whether a round has only the requests that were there when it began, since their keys depend on each other."""

    def add(self, running: RunningRequest) -> None:
        """Takes a request."""
        ...

    def remove(self, running: RunningRequest) -> None:
        """Takes a request out, whose watch has not ended yet."""
        ...

    def begin_round(self) -> None:
        """Begins a round of admissions."""
        ...

    def first(self) -> RunningRequest | None:
        """The request to admit next."""
        ...


@final
class OneByOne:
    """Orders requests by a number that each of them has by itself, and equal ones by arrival."""

    is_whole = False

    def __init__(self, cache: RadixCache, number_of: Callable[[RunningRequest], int]):
        self._cache = cache
        self._number_of = number_of
        self._heap = KeyHeap[RunningRequest]()

    def add(self, running: RunningRequest) -> None:
        """See `Order`."""
        self._heap.put(running, (-running.request.priority, self._number_of(running), running.arrival))

    def remove(self, running: RunningRequest) -> None:
        """See `Order`."""
        self._heap.discard(running)

    def begin_round(self) -> None:
        """Forgets what has changed in the tree, which is of no use here."""
        self._cache.drain_changed()

    def first(self) -> RunningRequest | None:
        """See `Order`."""
        return self._heap.first()


@final
class DfsWeight:
    """Walks the radix tree depth first, and enters the child with most waiting requests below it first.

    A key has the index of its request in that walk. The requests at a node come after those below it. Requests of all
    priorities have the same weight.
    """

    is_whole = True

    def __init__(self, cache: RadixCache):
        self._cache = cache
        self._waiting: dict[RunningRequest, None] = {}
        self._heap = KeyHeap[RunningRequest]()
        self._num_changes = 0

    def add(self, running: RunningRequest) -> None:
        """Takes a request, which has no key until the next time that keys are made."""
        self._waiting[running] = None
        self._num_changes += 1

    def remove(self, running: RunningRequest) -> None:
        """See `Order`."""
        del self._waiting[running]
        self._heap.discard(running)
        self._num_changes += 1

    def begin_round(self) -> None:
        """Makes all keys anew, if enough has changed.

        They change at no other time: if one admission moved other requests, a round would not be depth first.
        """
        self._num_changes += sum(group.size for group in self._cache.drain_changed())
        if self._num_changes > CHANGES_PER_REORDER * len(self._waiting):
            self._heap.replace(self.keys(self._waiting))
            self._num_changes = 0

    def first(self) -> RunningRequest | None:
        """See `Order`."""
        return self._heap.first()

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """The key of each request. It ends with the arrival number, so no two keys are equal."""
        requests_at: dict[Node, list[RunningRequest]] = {}
        for running in waiting:
            requests_at.setdefault(_watch(running).node, []).append(running)
        children: dict[Node | None, list[Node]] = {}
        seen: set[Node] = set()
        for end in requests_at:
            for node in itertools.takewhile(lambda node: node not in seen, _path_up(end)):
                seen.add(node)
                children.setdefault(node.parent, []).append(node)
        children.get(None, []).sort(key=_namespace)  # roots have no serials
        weights: Counter[Node] = Counter()
        for node in _depth_first(children):
            weights[node] = len(requests_at.get(node, ())) + sum(weights[child] for child in children.get(node, ()))
        for siblings in children.values():
            siblings.sort(key=lambda node: (-weights[node], node.serial))
        ordered = (r for node in _depth_first(children) for r in sorted(requests_at.get(node, ()), key=_deepest_first))
        return {running: (-running.request.priority, index, running.arrival) for index, running in enumerate(ordered)}


def make_order(name: str, seed: int, cache: RadixCache) -> Order:
    """The order that the command line calls `name`."""
    match name:
        case "lpm":  # the longest cached prefix costs least now, and may be evicted later
            return LongestFirst(cache)
        case "dfs-weight":
            return DfsWeight(cache)
        case "fcfs":
            return OneByOne(cache, lambda running: running.arrival)
        case "random":  # a shuffle, against which the other orders are measured
            return OneByOne(cache, lambda running: _hash(seed, running.arrival))
        case _:
            raise AssertionError(f"no order is called {name!r}")


def _watch(running: RunningRequest) -> Watch:
    assert running.watch is not None, "only a waiting request has a watch"
    return running.watch


def _deepest_first(running: RunningRequest) -> tuple[int, int]:
    """Those inside of an edge come after those at its end, as if the edge were split where their matches end."""
    return -_watch(running).matched, running.arrival


def _namespace(root: Node) -> str:
    assert isinstance(root, Root), "only a root has nothing above it"
    return root.namespace


def _path_up(node: Node) -> Iterator[Node]:
    """`node` and all nodes above it, the root included."""
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent


def _depth_first(children: dict[Node | None, list[Node]]) -> Iterator[Node]:
    """Every node after its children. The roots are the children of None."""
    stack = [iter(children.get(None, ()))]
    path: list[Node] = []
    while stack:
        node = next(stack[-1], None)
        if node is not None:
            path.append(node)
            stack.append(iter(children.get(node, ())))
        else:
            stack.pop()
            if path:
                yield path.pop()


def _hash(seed: int, value: int) -> int:
    """SplitMix64 (Steele et al., 2014) of a seed and a counter."""
    mask = 2**64 - 1
    z = (seed + (value + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
