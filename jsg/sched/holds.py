"""Prefixes that stay in the cache because a client said that more requests with them will come.

A hold has no row and costs no step; it only keeps pages from being evicted. So it is a hint, and gives way: where a
request that computes something wants the pages, holds end, the oldest first, before any request is retracted.
"""

import dataclasses
from collections import Counter

from jsg.cache.node import Node
from jsg.errors import QueueFullError
from jsg.sched.records import HeldPrefix, RunningRequest
from jsg.sched.table import RequestTable

MAX_HOLDS = 4096


class Holds:
    """The prompts that are held, oldest first.

    Invariant: `num_to_come` is how many requests in the scheduler will be holds once their prompt is computed.
    """

    def __init__(self, table: RequestTable, limit: int = MAX_HOLDS):
        self.num_to_come = 0
        self._table = table
        self._limit = limit
        self._held: dict[str, tuple[RunningRequest, HeldPrefix]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, rid: str) -> bool:
        return rid in self._held

    def check_room(self) -> None:
        """Raises QueueFullError where one more would be too many."""
        if len(self._held) + self.num_to_come >= self._limit:
            raise QueueFullError(f"at most {self._limit} prompts may be held, and so many are; end some of them")

    def keep(self, running: RunningRequest, prefix: HeldPrefix) -> None:
        """Takes over a prefix, to be held for a request until `end`. Nothing reads its pixels any more: they go."""
        if running.request.media:
            self._table.vision.release(running.request.rid)
            running.request = dataclasses.replace(running.request, media=())
        self._held[running.request.rid] = running, prefix

    def end(self, rid: str) -> RunningRequest:
        """Ends a hold."""
        running, prefix = self._held.pop(rid)
        self._table.drop(prefix)
        return running

    def oldest(self, count: int) -> list[str]:
        """The rids of so many holds, those that were kept first."""
        return [rid for rid, _ in zip(self._held, range(count), strict=False)]

    def num_to_end(self, num_pages: int) -> int:
        """How many of the oldest must end until so many pages more are available; 0 where even all do not give them.

        Takes time for every node of the prefixes that are looked at.
        """
        ended: Counter[Node] = Counter()
        num_freed = 0
        for count, (_, prefix) in enumerate(self._held.values(), 1):
            node = prefix.lock.node
            while node.parent is not None:
                ended[node] += 1
                num_freed += node.num_pages * (ended[node] == node.num_locks)
                node = node.parent
            if num_freed >= num_pages:
                return count
        return 0
