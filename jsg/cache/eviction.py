"""Which leaf to evict next: the least recently used one that nobody has locked."""

import heapq
from collections.abc import Iterator

from jsg.cache.node import Node


class EvictionQueue:
    """A heap of leaves that is put right only where it is read.

    A leaf that is used, locked or given a child keeps its entry, which is then out of date: `pop` moves it back or
    drops it. That is one heap operation per use at most, and the tree is never walked.

    Invariants: each evictable leaf has exactly one entry, any other node at most one (`Node.is_queued`), and no entry
    is younger than its node.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def offer(self, node: Node) -> None:
        """Notes that `node` may have become an evictable leaf."""
        if node.is_evictable_leaf and not node.is_queued:
            node.is_queued = True
            heapq.heappush(self._heap, (node.last_used, node.serial, node))

    def pop(self) -> Node | None:
        """Takes out the evictable leaf that was used least recently, or None when there is none."""
        while self._heap:
            queued_at, _, node = self._heap[0]
            if node.is_evictable_leaf and node.last_used > queued_at:
                heapq.heapreplace(self._heap, (node.last_used, node.serial, node))
                continue
            heapq.heappop(self._heap)
            node.is_queued = False
            if node.is_evictable_leaf:
                return node
        return None

    def __iter__(self) -> Iterator[tuple[int, Node]]:
        """Each entry's time and node, in no order."""
        return ((queued_at, node) for queued_at, _, node in self._heap)
