"""How the front knows that the engine process is not frozen: a pipe that the engine writes to twice a second.

A beat is the number of turns that the step loop has made so far. If no beats come, the whole process stands still: it
was stopped, or the machine swaps. If beats carry the same number, the process lives but the loop hangs. The beats go
through a pipe, because a write to it never waits and because the message socket may hold a backlog. A thread writes
them, because the step loop cannot beat during a step, which may take seconds.

This module uses the standard library only.
"""

import dataclasses
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import final

INTERVAL_S = 0.5
TIMEOUT_S = 3.0
"""An engine that has sent no beat for so long is stalled."""
MOST_UNSEEN_S = 1.0
"""The front looks at least so often. Of a longer time between two looks it did not run itself, or the machine did not,
so the rest says nothing of the engine."""

_BEAT = struct.Struct("<Q")
_READ_BYTES = _BEAT.size * 512


@dataclasses.dataclass(slots=True)
class LoopClock:
    """How often the step loop turned, and how it spent its time: see `protocol.LOOP_STATS`. The loop writes it."""

    num_turns: int = 0
    idle_s: float = 0.0
    busy_s: float = 0.0

    def add(self, *, idle_s: float, busy_s: float) -> None:
        """Ends a turn."""
        self.idle_s += idle_s
        self.busy_s += busy_s
        self.num_turns += 1


@final
class HeartbeatSender:
    """The engine's end: a daemon thread that writes a beat every `INTERVAL_S` until the front is gone."""

    def __init__(self, fd: int, clock: LoopClock) -> None:
        """Starts the thread, which owns `fd` from now on."""
        os.set_blocking(fd, False)
        os.set_inheritable(fd, False)
        self._fd = fd
        self._clock = clock
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jsg-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the pipe."""
        self._is_stopped.set()
        self._thread.join()
        os.close(self._fd)

    def _run(self) -> None:
        while True:
            try:
                os.write(self._fd, _BEAT.pack(self._clock.num_turns))
            except BlockingIOError:
                pass  # the front has not read for an hour, and the beats in the pipe are enough for it
            except OSError:
                return  # the front is gone; the step loop notices that
            if self._is_stopped.wait(INTERVAL_S):
                return


@final
class HeartbeatMonitor:
    """The front's end: it knows how long no beat has come, and how long the step loop has not turned.

    Only time in which the front ran counts, and a beat that waits in the pipe has come.
    """

    def __init__(self, fd: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Owns `fd` from now on. `clock` gives seconds."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._clock = clock
        self._num_turns: int | None = None
        self._looked_at = clock()
        self._silent_s = 0.0
        self._stuck_s = 0.0

    def read(self) -> bool:
        """Reads the beats that have arrived; False when there will be no more."""
        now = self._clock()
        passed_s, self._looked_at = min(now - self._looked_at, MOST_UNSEEN_S), now
        self._silent_s += passed_s
        self._stuck_s += passed_s
        data, is_open = b"", True
        try:
            while chunk := os.read(self._fd, _READ_BYTES):
                data = chunk  # a write of a beat is whole or fails, so these are whole beats
            is_open = False
        except BlockingIOError:
            pass
        if data:
            (num_turns,) = _BEAT.unpack(data[-_BEAT.size :])
            self._silent_s = 0.0
            if num_turns != self._num_turns:
                self._num_turns, self._stuck_s = num_turns, 0.0
        return is_open

    def fileno(self) -> int:
        """The file descriptor that an event loop watches."""
        return self._fd

    def close(self) -> None:
        """Closes the pipe. The event loop must have stopped watching it."""
        os.close(self._fd)

    def start_watch(self) -> None:
        """Says that the engine is ready, so that its loop has to turn from now on."""
        self.read()
        self._stuck_s = 0.0

    @property
    def is_stalled(self) -> bool:
        """Whether beats have come, but none in the last `TIMEOUT_S`."""
        self.read()
        return self._num_turns is not None and self._silent_s > TIMEOUT_S

    @property
    def stuck_s(self) -> float:
        """Seconds since the step loop was last seen to turn, or since `start_watch`."""
        self.read()
        return self._stuck_s
