"""Says when a thread may work beside the step loop, which needs Python's interpreter lock too."""

import threading
import time
from collections.abc import Callable
from typing import final

FIRST_REQUEST_S = 1.0
"""No work begins for so long after the engine is ready, because the request that it was started for comes then."""
QUIET_S = 0.1
"""If no program was called for so long, no request runs, or steps are long and the loop waits for the device."""
BUSY_SHARE = 0.2
"""The largest part of the time that work may take while requests run."""


@final
class Pace:
    """Lets a thread work while no request runs, and seldom while requests run."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wait: Callable[[float], bool] | None = None
    ) -> None:
        """Makes the pace of an engine that runs no request yet.

        Args:
            clock: Gives seconds.
            wait: Waits at most so many seconds; says whether this was closed. For tests.
        """
        self._clock = clock
        self._called_at = 0.0
        self._rests_until = 0.0
        self._is_closed = threading.Event()
        self._wait = wait or self._is_closed.wait

    @property
    def is_closed(self) -> bool:
        """Whether no further work may begin."""
        return self._is_closed.is_set()

    def begin(self) -> None:
        """Says that the engine is ready."""
        self._rests_until = self._clock() + FIRST_REQUEST_S
        self._called_at = self._rests_until - QUIET_S

    def note_call(self) -> None:
        """Notes that a program is called, so requests run. Every step calls it, so it must cost next to nothing."""
        self._called_at = self._clock()

    def do(self, work: Callable[[], object]) -> None:
        """Waits for its turn and does a piece of work, unless this is closed."""
        while (left_s := min(self._called_at + QUIET_S, self._rests_until) - self._clock()) > 0:
            if self._wait(left_s):
                return
        if self.is_closed:
            return
        start = self._clock()
        try:
            work()
        finally:
            self._rests_until = self._clock() + (self._clock() - start) * (1 / BUSY_SHARE - 1)

    def close(self) -> None:
        """Ends a wait, and lets no further work begin."""
        self._is_closed.set()
