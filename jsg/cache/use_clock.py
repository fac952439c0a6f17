"""Counts the matches and inserts of a tree, and remembers about when each of them was."""

import bisect
import time
from collections.abc import Callable
from typing import final

MARK_S = 1.0
MAX_MARKS = 7200


@final
class UseClock:
    """A count that grows with each use, and marks of what it was when, one a second at most.

    Nothing but people who look at the tree reads the marks. They cost a use the reading of a clock.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.count = 0
        self.num_nodes = 0
        self.num_pages = 0  # those that matches returned
        self._clock = clock
        self._due = 0.0
        self._counts: list[int] = []
        self._times: list[float] = []

    def tick(self, num_nodes: int) -> int:
        """One more use, now, of a path of so many nodes. Returns the count."""
        self.count += 1
        self.num_nodes += num_nodes
        now = self._clock()
        if now >= self._due:
            self._due = now + MARK_S
            self._counts.append(self.count)
            self._times.append(now)
            if len(self._counts) > MAX_MARKS:
                del self._counts[: MAX_MARKS // 2], self._times[: MAX_MARKS // 2]
        return self.count

    def when(self, count: int) -> float:
        """When the count was this, to `MARK_S`; of one before the oldest mark, the time of that mark."""
        index = bisect.bisect_right(self._counts, count) - 1
        return self._times[max(index, 0)] if self._times else 0.0
