"""How the front knows that the engine process is not frozen: a pipe that the engine writes to twice a second.

A beat is the number of turns that the step loop has made so far. No beats means that the whole process stands still (it
was stopped, or the machine swaps); beats that carry the same number mean that the loop hangs while the process lives.
A pipe, because the kernel keeps it for nobody but the two processes, a write to it never waits, and the front reads it
without the message socket, which may hold a backlog. The writer is a thread of two short wake-ups a second; the step
loop itself could not beat while it waits for a step, and a step may take seconds.

Standard library only: `child.py` and `client.py` use it, and neither loads JAX.
"""

import os
import struct
import threading
import time
from collections.abc import Callable
from typing import final

INTERVAL_S = 0.5
TIMEOUT_S = 3.0
"""Without a beat for so long, the engine counts as stalled."""

_BEAT = struct.Struct("<Q")
_READ_BYTES = _BEAT.size * 512


@final
class LoopClock:
    """How often the step loop turns, and how it spends its time. Written by the loop, read by the heartbeat."""

    def __init__(self) -> None:
        self.num_turns = 0
        self.idle_s = 0.0
        self.busy_s = 0.0

    def add(self, *, idle_s: float, busy_s: float) -> None:
        """Ends a turn."""
        self.idle_s += idle_s
        self.busy_s += busy_s
        self.num_turns += 1

    def stats(self) -> dict[str, int | float]:
        """See `protocol.LOOP_STATS`."""
        return {"num_turns": self.num_turns, "idle_s": self.idle_s, "busy_s": self.busy_s}


@final
class HeartbeatSender:
    """The engine's end: a daemon thread that writes a beat each `INTERVAL_S`, until the front is gone."""

    def __init__(self, fd: int, clock: LoopClock) -> None:
        """Starts to beat. Owns `fd` from here on."""
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
                pass  # the front has not read for an hour; the beats that it will find are enough
            except OSError:
                return  # the front is gone, which others notice
            if self._is_stopped.wait(INTERVAL_S):
                return


@final
class HeartbeatMonitor:
    """The front's end: when the last beat came, and when the step loop last turned.

    Times are those of `clock`, in seconds.
    """

    def __init__(self, fd: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Owns `fd` from here on."""
        os.set_blocking(fd, False)
        self._fd = fd
        self._clock = clock
        self._num_turns: int | None = None
        self._beat_at: float | None = None
        self._turn_at = clock()

    def read(self) -> bool:
        """Takes the beats that have arrived; False when there will be no more."""
        data, is_open = b"", True
        try:
            while chunk := os.read(self._fd, _READ_BYTES):
                data = chunk  # a beat is written at once or not at all, so these are whole beats
            is_open = False
        except BlockingIOError:
            pass
        if data:
            (num_turns,) = _BEAT.unpack(data[-_BEAT.size :])
            self._beat_at = self._clock()
            if num_turns != self._num_turns:
                self._num_turns, self._turn_at = num_turns, self._beat_at
        return is_open

    def fileno(self) -> int:
        """What an event loop waits for."""
        return self._fd

    def close(self) -> None:
        """Closes the pipe; once, and after the event loop was told."""
        os.close(self._fd)

    def start_watch(self) -> None:
        """The engine is ready: from now on its loop has to turn."""
        self._turn_at = self._clock()

    @property
    def is_stalled(self) -> bool:
        """Whether beats have come, and none for `TIMEOUT_S`."""
        return self._beat_at is not None and self._clock() - self._beat_at > TIMEOUT_S

    @property
    def stuck_s(self) -> float:
        """Seconds since the step loop was last seen to turn, or since `start_watch`."""
        return self._clock() - self._turn_at
