"""Which leaf is evicted next: the least recently used one that nobody has locked."""

import heapq
from collections.abc import Iterator

from jsg.cache.node import Node


class EvictionQueue:
    """A heap of leaves by the time of their last use.

    A leaf that is used, locked or given a child keeps its entry, which is then out of date. `pop` moves such an entry
    back or drops it. So a use costs at most one heap operation, and the tree is never walked.

    Invariants: each evictable leaf has one entry and any other node at most one (`Node.is_queued`). The time of an
    entry is never later than the last use of its node.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def offer(self, node: Node) -> None:
        """Takes `node` if it has become an evictable leaf."""
        if node.is_evictable_leaf and not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._heap, (node.last_used, node.serial, node))

    def pop(self) -> Node | None:
        """Takes out the evictable leaf that was used least recently; None where there is none."""
        while self._heap:
            queued_at, _, node = self._heap[0]
            is_evictable = node.is_evictable_leaf
            if is_evictable and node.last_used > queued_at:
                heapq.heapreplace(self._heap, (node.last_used, node.serial, node))
                continue
            heapq.heappop(self._heap)
            node.is_queued = False
            if is_evictable:
                return node
        return None

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        """Time and node of each entry, in no order."""
        return ((queued_at, node) for queued_at, _, node in self._heap)
