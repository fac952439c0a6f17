"""Holds: prompts that stay in the cache because a client said that more requests with them will come.

A held prompt has no row and costs no step. It only protects pages from eviction. It is a hint, so it gives way: if a
request that computes something needs the pages, holds end, the oldest first, before any request is retracted.
"""

from collections import Counter
from collections.abc import Iterable

from jsg.cache.node import Node
from jsg.sched.request import RunningRequest

MAX_HOLDS = 4096


def num_to_end(holds: Iterable[RunningRequest], num_pages: int) -> int:
    """How many of the holds, the oldest first, must end to free `num_pages` pages; 0 if even all are not enough.

    It takes time for every node of the prefixes that it looks at.
    """
    ended: Counter[Node] = Counter()
    num_freed = 0
    for count, running in enumerate(holds, 1):
        assert running.kept is not None, "a held prompt has its pages"
        node = running.kept.lock.node
        while node.parent is not None:
            ended[node] += 1
            num_freed += node.num_pages * (ended[node] == node.num_locks)
            node = node.parent
        if num_freed >= num_pages:
            return count
    return 0
