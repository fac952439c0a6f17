"""In what order waiting requests are admitted. A policy gives each a key; the smallest goes first.

Each key begins with the client's priority, the larger the smaller, so a policy orders those of equal priority. Nobody
starves by it: the bound on being passed (`bypass.py`) is above every key.
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
    """Orders the waiting queue: by priority, then in a way of its own. Changes nothing."""

    depends_on_others: bool
    """Whether one request's change may change another's key, so that all must be made anew."""

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """The key of each request. It ends with the arrival number, so no two are equal."""
        ...


class LongestPrefixMatch:
    """The longest cached prefix first: it costs least now and may be evicted later. Then order of arrival."""

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
    """A seeded shuffle: the ablation that shows what order is worth."""

    depends_on_others = False

    def __init__(self, seed: int):
        self._seed = seed

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """See `Policy`."""
        return {r: (-r.request.priority, _hash(self._seed, r.arrival), r.arrival) for r in waiting}


class DfsWeight:
    """Depth first through the radix tree, the child with most waiting requests below it first.

    A request's key is its place in that walk. A node's own requests come after its children's. Requests of every
    priority weigh the same.
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
        return {running: (-running.request.priority, place, running.arrival) for place, running in enumerate(ordered)}


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
    """`node` and all above it, the root too."""
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent


def _depth_first(children: dict[Node | None, list[Node]]) -> Iterator[Node]:
    """Every node after its children, from the roots, which are the children of None."""
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
