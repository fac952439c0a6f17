"""What a reader sees of a radix tree: nodes, and what is folded into them."""

import collections
import dataclasses
import hashlib
import heapq
from collections.abc import Iterable, Sequence
from typing import Any

from jsg.engine.front.tree_copy import TreeNode
from jsg.errors import NotFoundError

LOCKED = 1
FOLDED = 2
UNUSABLE = 4
TOP = 0
"""The parent of the first nodes of all namespaces."""


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """Which part of the tree a reader sees.

    Attributes:
        limit: The most nodes to show.
        root: The node whose subtree is shown; None for the whole tree.
        namespace: The only namespace that is shown; None for all of them. Nothing that is shown depends on the others.
        secret: With a namespace, what its nodes are named by. The tree numbers all nodes in turn, so the numbers would
            tell how many nodes others have.
    """

    limit: int
    root: int | None
    namespace: str | None
    secret: bytes = b""

    def name(self, number: int) -> int:
        """The number by which a reader knows a node. It has 48 bits, because a script reads larger ones inexactly."""
        if self.namespace is None or number == TOP:
            return number
        data = f"{number} {self.namespace}".encode()
        return int.from_bytes(hashlib.blake2b(data, digest_size=6, key=self.secret).digest())

    def draw(self, nodes: Sequence[TreeNode], now_s: float) -> tuple[list[TreeNode], dict[str, Any]]:
        """The nodes to show, parents first, and the part of a snapshot that is made of nodes.

        Of more than `limit` nodes, those with the most tokens at and below them are shown. A node has fewer than its
        parent, so all above a shown node are shown too.

        Raises:
            NotFoundError: The root is not in the tree, or not in what the reader may see.
        """
        order = self.seen(nodes)
        weights: collections.defaultdict[int, int] = collections.defaultdict(int)
        for node in reversed(order):
            weights[node.id] += node.length
            weights[node.parent] += weights[node.id]
        shown = order
        if len(order) > self.limit:
            heaviest = heapq.nlargest(self.limit, order, key=lambda node: weights[node.id])
            ids = {node.id for node in heaviest}
            shown = [node for node in order if node.id in ids]
        aggregates = self._fold(order, {node.id for node in shown})
        rows = [self._row(node, now_s, is_folded=node.id in aggregates) for node in shown]
        named = {self.name(number): aggregate for number, aggregate in aggregates.items()}
        return shown, {"nodes": rows, "num_nodes": len(order), "aggregates": named}

    def seen(self, nodes: Sequence[TreeNode]) -> list[TreeNode]:
        """The nodes that may be seen, parents first."""
        children: collections.defaultdict[int, list[TreeNode]] = collections.defaultdict(list)
        for node in nodes:
            children[node.parent].append(node)
        order = [node for node in children[TOP] if self.namespace in (None, node.namespace)]
        order = _with_all_below(order, children)
        if self.root is None:
            return order
        found = [node for node in order if self.name(node.id) == self.root]
        if not found:
            raise NotFoundError(
                f"root must be the id of a cached node, but no node {self.root} is here; it may have been evicted, so "
                "look at the tree without root"
            )
        return _with_all_below(found, children)

    def _fold(self, order: Iterable[TreeNode], shown: set[int]) -> collections.defaultdict[int, dict[str, int]]:
        """What is not shown, by the nearest shown node above it."""
        aggregates = collections.defaultdict[int, dict[str, int]](lambda: {"nodes": 0, "tokens": 0, "evictable": 0})
        owners: dict[int, int] = {}
        for node in order:
            if node.id not in shown:
                owners[node.id] = owners.get(node.parent, node.parent)
                _add(aggregates[owners[node.id]], (node,))
        return aggregates

    def _row(self, node: TreeNode, now_s: float, *, is_folded: bool) -> list[int]:
        flags = (LOCKED if node.holders else 0) + (FOLDED if is_folded else 0) + (0 if node.is_usable else UNUSABLE)
        age_s = max(int(now_s - node.used_at), 0)
        return [self.name(node.id), self.name(node.parent), node.length, node.holders, age_s, node.hits, flags]


def _with_all_below(nodes: list[TreeNode], children: dict[int, list[TreeNode]]) -> list[TreeNode]:
    order = [*nodes]
    for node in order:  # it grows meanwhile
        order += children.get(node.id, ())
    return order


def _add(aggregate: dict[str, int], nodes: Iterable[TreeNode]) -> None:
    for node in nodes:
        aggregate["nodes"] += 1
        aggregate["tokens"] += node.length
        aggregate["evictable"] += 0 if node.holders else node.length
