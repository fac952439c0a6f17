"""What can watch a radix tree change."""

from typing import Protocol

from jsg.cache.node import Node


class TreeObserver(Protocol):
    """Is told of each change of the tree, by the cache that makes it. It must not change the tree."""

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

    def held(self, node: Node) -> None:
        """Notes that the locks of `node` and of all nodes above it have changed."""
        ...
