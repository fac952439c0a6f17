"""Holds: prompts that stay in the cache because a client said that more requests with them will come.

A held prompt has no row and costs no step. It only protects pages from eviction. It is a hint, so it gives way: if a
request that computes something needs the pages, holds end, the oldest first, before any request is retracted.
"""

from collections import Counter

from jsg.cache.node import Node
from jsg.errors import QueueFullError
from jsg.sched.request import RunningRequest

MAX_HOLDS = 4096


class Holds:
    """The requests whose prompt is held, oldest first.

    Attributes:
        num_open: How many of the scheduler's requests are holds, whether their prompt is computed yet or not.
    """

    def __init__(self, limit: int = MAX_HOLDS):
        self.num_open = 0
        self._limit = limit
        self._held: dict[str, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    def __getitem__(self, rid: str) -> RunningRequest:
        return self._held[rid]

    def check_room(self) -> None:
        """Raises QueueFullError if one more hold would be too many."""
        if self.num_open >= self._limit:
            raise QueueFullError(f"at most {self._limit} prompts may be held, and so many are; end some of them")

    def add(self, running: RunningRequest) -> None:
        """Takes a request whose prompt is held from now on."""
        self._held[running.request.rid] = running

    def remove(self, running: RunningRequest) -> None:
        """Forgets a request whose prompt is held."""
        del self._held[running.request.rid]

    def oldest(self, count: int) -> list[RunningRequest]:
        """The requests that were added first, at most `count`."""
        return [running for running, _ in zip(self._held.values(), range(count), strict=False)]

    def num_to_end(self, num_pages: int) -> int:
        """How many of the oldest holds must end to free `num_pages` pages; 0 if even all are not enough.

        It takes time for every node of the prefixes that it looks at.
        """
        ended: Counter[Node] = Counter()
        num_freed = 0
        for count, running in enumerate(self._held.values(), 1):
            assert running.kept is not None, "a held prompt has its pages"
            node = running.kept.lock.node
            while node.parent is not None:
                ended[node] += 1
                num_freed += node.num_pages * (ended[node] == node.num_locks)
                node = node.parent
            if num_freed >= num_pages:
                return count
        return 0
