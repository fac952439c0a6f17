"""In what order waiting requests are admitted. A policy gives each request a key, and the smallest key goes first.

Each key begins with the client's priority, negated, so a policy orders requests of equal priority. No policy starves
anybody: the bound on passing (`bypass.py`) stands above all keys.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol

from jsg.cache.node import Node, Root
from jsg.cache.watch import Watch
from jsg.errors import ConfigError
from jsg.sched.request import RunningRequest

Key = tuple[int, ...]


class Policy(Protocol):
    """Orders the waiting queue by priority, then in its own way. Changes nothing."""

    depends_on_others: bool
    """Whether a change of one request may change keys of others, so that all must be made anew."""

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """The key of each request. It ends with the arrival number, so no two keys are equal."""
        ...


class LongestPrefixMatch:
    """The longest cached prefix goes first: it costs least now and may be evicted later. Then order of arrival."""

    depends_on_others = False

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """See `Policy`."""
        return {r: (-r.request.priority, -_watch(r).matched, r.arrival) for r in waiting}


class FirstComeFirstServed:
    """Order of arrival."""

    depends_on_others = False

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """See `Policy`."""
        return {r: (-r.request.priority, r.arrival) for r in waiting}


class Random:
    """A seeded shuffle, against which the other orders are measured."""

    depends_on_others = False

    def __init__(self, seed: int):
        self._seed = seed

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """See `Policy`."""
        return {r: (-r.request.priority, _hash(self._seed, r.arrival), r.arrival) for r in waiting}


class DfsWeight:
    """Depth first through the radix tree, and first into the child with most waiting requests below it.

    A key is an index in that walk. The requests at a node come after those below it. Requests of all priorities weigh
    the same.
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
    """The policy called `name` on the command line."""
    if name == "random":
        return Random(seed)
    policies = {"lpm": LongestPrefixMatch, "dfs-weight": DfsWeight, "fcfs": FirstComeFirstServed}
    if name not in policies:
        raise ConfigError(f"--schedule-policy must be one of {', '.join(policies)}, random, but got {name!r}")
    return policies[name]()


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
