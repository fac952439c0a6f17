"""What can watch a radix tree change."""

from collections.abc import Sequence
from typing import Protocol, final

import numpy as np

from jsg.cache.kinds import StateKind
from jsg.cache.node import Node


class TreeObserver(Protocol):
    """Learns of each change of the tree from the cache that makes it. It must not change the tree."""

    def added(self, leaf: Node) -> None:
        """Notes that `leaf` is new, below its parent."""
        ...

    def split(self, upper: Node, lower: Node) -> None:
        """Notes that the upper part of the edge of `lower` is the edge of `upper` now, which is new."""
        ...

    def removed(self, leaf: Node) -> None:
        """Notes that `leaf` is taken out of the tree; its parent is still known."""
        ...

    def cleared(self) -> None:
        """Notes that all nodes are about to be removed. `removed` is called for each of them nevertheless."""
        ...

    def hit(self, node: Node) -> None:
        """Notes that a match ended at `node`."""
        ...

    def changed(self, node: Node) -> None:
        """Notes that the locks of `node` and of all above have changed, or what can be used of the path to `node`."""
        ...


@final
class Observers(TreeObserver):
    """All who observe one tree. It knows whose pages are whose, since other kinds of state know pages only."""

    def __init__(self, kinds: Sequence[StateKind], num_pages: int) -> None:
        """The tree is empty. `num_pages` counts page 0 too."""
        self._each: tuple[TreeObserver, ...] = ()  # a new one for each change, since one may end in its own call
        self._owners = np.full(num_pages if kinds else 0, None)
        for kind in kinds:
            kind.observe(self._states_changed)

    def add(self, observer: TreeObserver) -> None:
        """Tells `observer` of each change from now on."""
        self._each += (observer,)

    def remove(self, observer: TreeObserver) -> None:
        """Tells `observer` no more."""
        self._each = tuple(other for other in self._each if other is not observer)

    def added(self, leaf: Node) -> None:
        """See `TreeObserver`."""
        self._own(leaf, leaf)
        for observer in self._each:
            observer.added(leaf)

    def split(self, upper: Node, lower: Node) -> None:
        """See `TreeObserver`."""
        self._own(upper, upper)
        for observer in self._each:
            observer.split(upper, lower)

    def removed(self, leaf: Node) -> None:
        """See `TreeObserver`."""
        self._own(leaf, None)
        for observer in self._each:
            observer.removed(leaf)

    def cleared(self) -> None:
        """See `TreeObserver`."""
        for observer in self._each:
            observer.cleared()

    def hit(self, node: Node) -> None:
        """See `TreeObserver`."""
        for observer in self._each:
            observer.hit(node)

    def changed(self, node: Node) -> None:
        """See `TreeObserver`."""
        for observer in self._each:
            observer.changed(node)

    def _own(self, node: Node, owner: Node | None) -> None:
        if len(self._owners):
            self._owners[np.frombuffer(node.pages, np.int32)] = owner

    def _states_changed(self, pages: np.ndarray, num_behind: int) -> None:
        """Reports the nodes of some pages, and those below whose edges begin within so many pages after these."""
        if not self._each:
            return
        owners: list[Node | None] = self._owners[pages].tolist()
        nodes = {node: num_behind for node in owners if node is not None}
        stack = [*nodes]
        while stack:
            left = nodes[node := stack.pop()]
            for child in node.children.values() if left > 0 else ():
                if nodes.get(child, 0) < left - child.num_pages:
                    nodes[child] = left - child.num_pages
                    stack.append(child)
                else:
                    nodes.setdefault(child, 0)
        for node in nodes:
            self.changed(node)
