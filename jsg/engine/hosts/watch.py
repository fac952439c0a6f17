"""How hosts notice that another one is gone, stands still, or does not keep up. Standard library only.

Twice a second each follower sends a beat to the leader, and the leader to each follower, over connections of their own.
A step of several hosts cannot be ended from outside: if one host takes no part, the others wait inside XLA until its
time-outs, which are minutes. So a thread beside the step loop watches, and ends the process.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, final, runtime_checkable

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
FIND_OUT_S = 2.0
HOST_LOST = 3
"""Exit status of a process that has lost another host."""

_BEAT = struct.Struct("<QQQ")
FIRST_BEAT = _BEAT.pack(0, 0, 0)
"""The beat of a host that has begun nothing."""


@runtime_checkable
class Computed(Protocol):
    """A result of a step that may not be computed yet: a `jax.Array`."""

    def is_ready(self) -> bool:
        """Whether the step has computed it or has failed."""
        ...

    def block_until_ready(self) -> object:
        """Waits until it is computed. Raises the error of a step that failed."""
        ...


@final
class Standing:
    """How far this host has come: steps that it has begun and computed, and programs that it has compiled.

    One thread begins steps and makes calls, and another one reads.

    Attributes:
        count_programs: Gives `Executables.num_in_order`.
        begun_at: When each step began that is not computed on all hosts yet.
        failure: The error of a step that failed here.
    """

    def __init__(self) -> None:
        self.num_begun = 0
        self.count_programs: Callable[[], int] = int
        self.begun_at: collections.deque[float] = collections.deque()
        self.failure: Exception | None = None
        self._results: collections.deque[Computed] = collections.deque()
        self._called_at: float | None = None
        self._progressed_at = 0.0

    def begin(self, result: Computed) -> None:
        """Counts a step that will compute this result."""
        self._results.append(result)  # first, so that the other thread sees too few computed steps rather than too many
        self.num_begun += 1
        self.begun_at.append(time.monotonic())

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Marks a call that should return soon. Sending it waits for a host that does not read."""
        self._called_at = time.monotonic()
        try:
            yield
        finally:
            self._called_at = None

    @property
    def num_done(self) -> int:
        """Steps that are computed here, up to the first that failed."""
        while self.failure is None and self._results and self._results[0].is_ready():
            try:
                self._results[0].block_until_ready()
            except Exception as error:  # of any kind, from the device
                self.failure = error
            else:
                self._results.popleft()
        return max(0, self.num_begun - len(self._results))

    def forget(self, num_done: int) -> None:
        """Forgets the first `num_done` steps, which are computed on all hosts."""
        while self.begun_at and self.num_begun - len(self.begun_at) < num_done:
            self.begun_at.popleft()
            self._progressed_at = time.monotonic()

    @property
    def waiting_since(self) -> float | None:
        """When the call or the oldest step began that is under way; None if there is none.

        A step counts from the end of the step before it, because it waits for that on the devices.
        """
        waiting = [at for at in (self._called_at, *list(self.begun_at)[:1]) if at is not None]
        return max(min(waiting), self._progressed_at) if waiting else None


@dataclasses.dataclass(slots=True)
class _Other:
    """Another host as its beats show it."""

    name: str
    seen_at: float
    num_begun: int = 0
    num_done: int = 0
    num_programs: int = 0
    rest: bytes = b""


def end_process(reason: str) -> None:
    """Logs the reason and ends the process at once, because its step loop may wait for a host that is gone."""
    logger.error(reason)
    logging.shutdown()
    os._exit(HOST_LOST)


@final
class Watch:
    """A daemon thread that sends beats, reads those of others, and calls `lost` when a host is lost."""

    def __init__(
        self,
        connections: Mapping[str, socket.socket],
        standing: Standing,
        timeout_s: float,
        *,
        judges_steps: bool,
        lost: Callable[[str], None] = end_process,
    ) -> None:
        """Starts the thread.

        Args:
            connections: The connections to the other hosts, by their names in messages.
            standing: How far this host has come.
            timeout_s: How long another host may be silent, or a step may take.
            judges_steps: Whether the others must keep up with the steps of this host, as with those of the leader.
            lost: Called with the reason on the thread, at most once.
        """
        self._others = {connection: _Other(name, time.monotonic()) for name, connection in connections.items()}
        self._standing = standing
        self._timeout_s = timeout_s
        self._judges_steps = judges_steps
        self._lost = lost
        self._is_stopped = threading.Event()
        self._selector = selectors.DefaultSelector()
        for connection in self._others:
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="jsg-hosts", daemon=True)
        self._thread.start()

    @property
    def num_programs(self) -> int:
        """The least number of compiled programs in the last beats of the other hosts."""
        return min(other.num_programs for other in self._others.values())

    def find_out(self) -> None:
        """Waits after a failure here, so that the thread can see whether another host was the cause."""
        self._thread.join(FIND_OUT_S)

    def stop(self) -> None:
        """Stops the watch. Connections stay open, because the other hosts may still watch."""
        self._is_stopped.set()
        self._thread.join()

    def close(self) -> None:
        """Stops, and ends the connections."""
        self.stop()
        for connection in self._others:
            connection.close()
        self._selector.close()

    def _run(self) -> None:
        try:
            self._look_on()
        except Exception as error:  # else nobody would watch any more
            logger.exception("the watch over other hosts has failed")
            self._lost(f"nobody watches the other hosts: {error}")

    def _look_on(self) -> None:
        next_beat = time.monotonic()
        while not self._is_stopped.is_set():
            if time.monotonic() >= next_beat:
                next_beat = time.monotonic() + INTERVAL_S
                self._beat()
            reason = self._take_beats(max(0.0, next_beat - time.monotonic())) or self._judge()
            if reason is not None and not self._is_stopped.is_set():
                self._lost(reason)
                return

    def _beat(self) -> None:
        mine = self._standing
        beat = _BEAT.pack(mine.num_begun, mine.num_done, mine.count_programs())
        for connection in self._others:
            with contextlib.suppress(OSError):  # the host has not read for hours, or is gone, which the next read shows
                connection.send(beat)  # all 24 bytes go out, or none

    def _take_beats(self, wait_s: float) -> str | None:
        """Reads the beats that have arrived; returns the reason if a connection has ended."""
        for key, _ in self._selector.select(wait_s):
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            other = self._others[connection]
            try:
                data = connection.recv(_BEAT.size * 256)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                return f"{other.name} is gone: its process has ended, or the network between"
            data = other.rest + data
            whole = len(data) // _BEAT.size * _BEAT.size
            other.rest = data[whole:]
            if whole:
                other.seen_at = time.monotonic()
                last = _BEAT.unpack(data[whole - _BEAT.size : whole])
                other.num_begun, other.num_done, other.num_programs = last
        return None

    def _judge(self) -> str | None:
        """The reason to end this process, or None."""
        now = time.monotonic()
        for other in self._others.values():
            if now - other.seen_at > self._timeout_s:
                return f"{other.name} has given no sign of life for {self._timeout_s:g} s (--dist-timeout)"
        if self._judges_steps:
            return self._judge_steps(now)
        self._standing.forget(self._standing.num_begun)
        return self._judge_own()

    def _judge_steps(self, now: float) -> str | None:
        """Judges the oldest step. A step that has failed here is left to the reader of its results."""
        mine = self._standing
        num_done = mine.num_done
        slowest = min(self._others.values(), key=lambda other: (other.num_begun, other.num_done))
        mine.forget(min(num_done, *(other.num_done for other in self._others.values())))
        since = mine.waiting_since
        if since is None or now - since <= self._timeout_s:
            return None
        number = mine.num_begun - len(mine.begun_at) + 1  # of the oldest step, or of the one that is being sent
        if slowest.num_begun < number:
            behind = f"{slowest.name} has not begun it"
        else:
            behind = f"{slowest.name if slowest.num_done < number else 'this host'} has not computed it"
        return f"a step has taken more than {self._timeout_s:g} s (--dist-timeout), and {behind}"

    def _judge_own(self) -> str | None:
        """Judges the steps of a follower, whose results nobody reads, so that nobody else would notice a failure."""
        if self._standing.failure is None:
            return None
        gone = self._take_beats(INTERVAL_S)  # a host that is gone may be the cause, and is the better reason
        return gone or f"a step has failed on this host: {self._standing.failure}"
