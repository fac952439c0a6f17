"""When a thread beside the step loop may work: Python's interpreter lock is one, and the loop needs it too."""

import threading
import time
from collections.abc import Callable
from typing import final

FIRST_REQUEST_S = 1.0
"""An engine is left alone for so long when it is ready: the request that it was started for comes now."""
QUIET_S = 0.1
"""When no program was called for so long, no request runs, or steps are so long that the loop waits for the device."""
BUSY_SHARE = 0.2
"""Of the time while requests run, the part that pieces of work take at most."""


@final
class Pace:
    """Lets a thread do pieces of work while no request runs, and few of them while requests run."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wait: Callable[[float], bool] | None = None
    ) -> None:
        """No request runs yet.

        Args:
            clock: Gives seconds.
            wait: Waits so many seconds at most and says whether it is closed; for tests.
        """
        self._clock = clock
        self._called_at = 0.0
        self._rests_until = 0.0
        self._is_closed = threading.Event()
        self._wait = wait or self._is_closed.wait

    @property
    def is_closed(self) -> bool:
        """Whether no more work is wanted."""
        return self._is_closed.is_set()

    def begin(self) -> None:
        """The engine is ready."""
        self._rests_until = self._clock() + FIRST_REQUEST_S
        self._called_at = self._rests_until - QUIET_S

    def note_call(self) -> None:
        """A program is called: requests run. In every step, so it costs next to nothing."""
        self._called_at = self._clock()

    def do(self, work: Callable[[], object]) -> None:
        """Does a piece of work in its turn. Nothing is done once this is closed."""
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
