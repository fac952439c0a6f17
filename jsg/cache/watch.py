"""Watches: the longest cached prefix of each waiting prompt, kept up to date while the tree changes."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jsg.cache.node import Node


@dataclasses.dataclass(slots=True, eq=False)
class Watch:
    """One waiting prompt. `RadixCache.watch` makes it, and only the cache changes it.

    Attributes:
        tokens: int32, the whole pages that may match. It is the caller's array, not a copy, and must not change.
        namespace: The namespace whose prefixes may match.
        serial: A number that grows with each watch that is made.
        node: The node at which the match ends.
        matched: How many tokens the longest cached prefix has.
    """

    tokens: np.ndarray
    namespace: str
    serial: int
    node: Node
    matched: int


class WatchIndex:
    """The watches that end at each node, grouped by the page of tokens that each watch needs next.

    So a new child finds exactly the watches that it lengthens. Dicts serve as sets that keep their order, so that equal
    histories give equal trees.
    """

    def __init__(self, page_size: int):
        self._page_size = page_size
        self._by_node: dict[Node, dict[bytes, dict[Watch, None]]] = {}
        self._changed: dict[Watch, None] = {}

    def add(self, watch: Watch) -> None:
        """Adds `watch` at `watch.node`."""
        self._by_node.setdefault(watch.node, {}).setdefault(self._next_page(watch), {})[watch] = None

    def remove(self, watch: Watch) -> None:
        """Removes `watch`, which must be here."""
        groups = self._by_node.get(watch.node, {})
        group = groups.get(self._next_page(watch), {})
        assert watch in group, "a watch must be ended once, by the cache that made it"
        del group[watch]
        if not group:
            del groups[self._next_page(watch)]
        if not groups:
            del self._by_node[watch.node]
        self._changed.pop(watch, None)

    def take(self, node: Node, next_page: bytes) -> list[Watch]:
        """Takes out the watches at `node` that wait for this page. The caller gives each to `put_back`."""
        groups = self._by_node.get(node, {})
        group = groups.pop(next_page, {})
        if group and not groups:
            del self._by_node[node]
        return list(group)

    def take_all(self, node: Node) -> list[Watch]:
        """Takes out all watches at `node`. The caller gives each to `put_back`."""
        return [watch for group in self._by_node.pop(node, {}).values() for watch in group]

    def put_back(self, watch: Watch, node: Node, matched: int) -> None:
        """Adds `watch` at `node` with its new length, and notes that it has changed."""
        watch.node = node
        watch.matched = matched
        self.add(watch)
        self._changed[watch] = None

    def drain_changed(self) -> list[Watch]:
        """The watches that were put back since the last call, the oldest watch first."""
        changed = sorted(self._changed, key=lambda watch: watch.serial)
        self._changed.clear()
        return changed

    def __contains__(self, node: Node) -> bool:
        """Whether any watch ends at `node`."""
        return node in self._by_node

    def __iter__(self) -> Iterator[Watch]:
        return (watch for groups in self._by_node.values() for group in groups.values() for watch in group)

    def _next_page(self, watch: Watch) -> bytes:
        """The page of tokens that would lengthen the match; empty where the whole prompt matches."""
        return watch.tokens[watch.matched : watch.matched + self._page_size].tobytes()
