"""In what order waiting requests are admitted. A policy gives each request a key, and the smallest key goes first.

Each key begins with the client's priority, negated, so a policy orders requests of equal priority. No policy lets a
request wait for ever: the bound on passing (`bypass.py`) stands above all keys.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from jsg.cache.node import Node, Root
from jsg.cache.watch import Watch
from jsg.sched.request import RunningRequest

Key = tuple[int, ...]


class Policy(Protocol):
    """Orders waiting requests by priority, and those of one priority in its own way. Changes nothing."""

    depends_on_others: bool
    """Whether a change of one request may change the keys of others, so that all keys must be made anew."""

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """The key of each request. It ends with the arrival number, so no two keys are equal."""
        ...


class OneByOne:
    """Orders requests by a number that each of them has by itself, and equal ones by arrival."""

    depends_on_others = False

    def __init__(self, number_of: Callable[[RunningRequest], int]):
        self._number_of = number_of

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """See `Policy`."""
        return {r: (-r.request.priority, self._number_of(r), r.arrival) for r in waiting}


class DfsWeight:
    """Walks the radix tree depth first, and enters the child with most waiting requests below it first.

    A key has the index of its request in that walk. The requests at a node come after those below it. Requests of all
    priorities have the same weight.
    """

    depends_on_others = True

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """See `Policy`."""
        requests_at: dict[Node, list[RunningRequest]] = {}
        for running in waiting:
            requests_at.setdefault(_watch(running).node, []).append(running)
        weights: Counter[Node] = Counter()
        children: dict[Node | None, list[Node]] = {}
        for end, requests in requests_at.items():
            for node in _path_up(end):
                if node not in weights:
                    children.setdefault(node.parent, []).append(node)
                weights[node] += len(requests)
        children.get(None, []).sort(key=_namespace)  # roots have no serials
        for siblings in children.values():
            siblings.sort(key=lambda node: (-weights[node], node.serial))
        walk = _depth_first(children)
        ordered = (r for node in walk for r in sorted(requests_at.get(node, ()), key=lambda r: r.arrival))
        return {running: (-running.request.priority, index, running.arrival) for index, running in enumerate(ordered)}


def make_policy(name: str, seed: int) -> Policy:
    """The policy that the command line calls `name`."""
    match name:
        case "lpm":  # the longest cached prefix costs least now, and may be evicted later
            return OneByOne(lambda running: -_watch(running).matched)
        case "dfs-weight":
            return DfsWeight()
        case "fcfs":
            return OneByOne(lambda running: running.arrival)
        case "random":  # a shuffle, against which the other orders are measured
            return OneByOne(lambda running: _hash(seed, running.arrival))
        case _:
            raise AssertionError(f"no policy is called {name!r}")


def _watch(running: RunningRequest) -> Watch:
    assert running.watch is not None, "only a waiting request has a watch"
    return running.watch


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
