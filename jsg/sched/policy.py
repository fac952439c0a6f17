"""In what order waiting requests are admitted. A policy gives each a key; the smallest goes first."""

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from jsg.cache.node import Node
from jsg.errors import ConfigError
from jsg.sched.records import RunningRequest

Key = tuple[int, ...]


class Policy(Protocol):
    """Orders the waiting queue. Changes nothing."""

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
        return {r: (-_node_and_length(r)[1], r.arrival) for r in waiting}


class FirstComeFirstServed:
    """Order of arrival."""

    depends_on_others = False

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """See `Policy`."""
        return {r: (r.arrival,) for r in waiting}


class Random:
    """A seeded shuffle: the ablation that shows what order is worth."""

    depends_on_others = False

    def __init__(self, seed: int):
        self._seed = seed

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """See `Policy`."""
        return {r: (_hash(self._seed, r.arrival), r.arrival) for r in waiting}


class DfsWeight:
    """Depth first through the radix tree, the child with most waiting requests below it first.

    A request's key is its path of (minus weight, serial number) from the root, so sorting keys walks the tree. A node's
    own requests come after its children's.
    """

    depends_on_others = True

    def keys(self, waiting: Iterable[RunningRequest]) -> dict[RunningRequest, Key]:
        """See `Policy`."""
        paths = {r: _path_from_root(_node_and_length(r)[0]) for r in waiting}
        weights: Counter[Node] = Counter(node for path in paths.values() for node in path)
        return {
            r: (*(part for node in path for part in (-weights[node], node.serial)), 1, r.arrival)
            for r, path in paths.items()
        }


def make_policy(name: str, seed: int) -> Policy:
    """The policy called `name` on the command line."""
    if name == "random":
        return Random(seed)
    policies = {"lpm": LongestPrefixMatch, "dfs-weight": DfsWeight, "fcfs": FirstComeFirstServed}
    if name not in policies:
        raise ConfigError(f"--schedule-policy must be one of {', '.join(policies)}, random, but got {name!r}")
    return policies[name]()


def _node_and_length(running: RunningRequest) -> tuple[Node, int]:
    assert running.watch is not None, "only a waiting request has a watch"
    return running.watch.node, running.watch.matched


def _path_from_root(node: Node) -> list[Node]:
    path = [node]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _hash(seed: int, value: int) -> int:
    """SplitMix64 (Steele et al., 2014) of a seed and a counter."""
    mask = 2**64 - 1
    z = (seed + (value + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)
