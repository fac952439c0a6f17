"""How hosts notice that another one is gone, stands still, or does not keep up.

Each host sends a beat twice a second to the leader, and the leader to each, over connections that carry nothing else. A
step of several hosts cannot be ended from outside: where one takes no part the others wait inside XLA for as long as
its own time-outs say, which is minutes. So a thread beside the step loop judges, and ends the process.

Standard library only.
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
from collections.abc import Callable, Mapping
from typing import Protocol, final, runtime_checkable

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5
FIND_OUT_S = 2.0
HOST_LOST = 3
"""Exit status of a process that has lost another host."""

_BEAT = struct.Struct("<QQQ")
FIRST_BEAT = _BEAT.pack(0, 0, 0)
"""Of a host that has begun nothing."""


@runtime_checkable
class Computed(Protocol):
    """What a step gives, which may not be there yet: a `jax.Array`."""

    def is_ready(self) -> bool:
        """Whether it is there."""
        ...


@final
class Standing:
    """How far this host has come: steps that it has begun, and computed, and programs that it has compiled.

    Attributes:
        count_programs: Gives `Executables.num_in_order`.
        begun_at: When each step began that is not computed everywhere.
    """

    def __init__(self) -> None:
        self.num_begun = 0
        self.count_programs: Callable[[], int] = int
        self.begun_at: collections.deque[float] = collections.deque()
        self._results: collections.deque[Computed] = collections.deque()

    def begin(self, result: Computed) -> None:
        """Counts a step by what it will give."""
        self._results.append(result)  # in this order: another thread looks on, and shall rather see too little done
        self.num_begun += 1
        self.begun_at.append(time.monotonic())

    @property
    def num_done(self) -> int:
        """Steps that are computed here. One thread may ask while another begins steps."""
        while self._results and self._results[0].is_ready():
            self._results.popleft()
        return max(0, self.num_begun - len(self._results))

    def forget(self, num_done: int) -> None:
        """So many are computed everywhere."""
        while self.begun_at and self.num_begun - len(self.begun_at) < num_done:
            self.begun_at.popleft()


@dataclasses.dataclass(slots=True)
class _Other:
    """What is known of another host."""

    name: str
    seen_at: float
    num_begun: int = 0
    num_done: int = 0
    num_programs: int = 0
    rest: bytes = b""


def end_process(reason: str) -> None:
    """Says why and ends the process at once: its step loop may wait for a host that is gone."""
    logger.error(reason)
    logging.shutdown()
    os._exit(HOST_LOST)


@final
class Watch:
    """A daemon thread that sends beats, reads those of others, and calls `lost` with the reason when one is lost."""

    def __init__(
        self,
        connections: Mapping[str, socket.socket],
        standing: Standing,
        timeout_s: float,
        *,
        judges_steps: bool,
        lost: Callable[[str], None] = end_process,
    ) -> None:
        """Begins to beat.

        Args:
            connections: Of the other hosts, by what they are called.
            standing: That of this host.
            timeout_s: How long another may be silent, or a step may take.
            judges_steps: Whether to hold the others to the steps of this host: the leader does.
            lost: Told why, on the thread, at most once.
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
        """The least that another host was last heard to have compiled."""
        return min(other.num_programs for other in self._others.values())

    def find_out(self) -> None:
        """After something has failed here: leaves the thread the time to see that another host was the cause."""
        self._thread.join(FIND_OUT_S)

    def stop(self) -> None:
        """From now on nobody is lost any more. Connections stay open: the others may still look."""
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
        except Exception as error:  # else nobody would notice anything any more
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
            with contextlib.suppress(OSError):  # it has not read for hours, or is gone, which reading tells
                connection.send(beat)  # of 24 bytes none or all go out

    def _take_beats(self, wait_s: float) -> str | None:
        """Reads all there is; the reason where a connection has ended."""
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
        """The reason to end, if there is one."""
        now = time.monotonic()
        for other in self._others.values():
            if now - other.seen_at > self._timeout_s:
                return f"{other.name} has given no sign of life for {self._timeout_s:g} s (--dist-timeout)"
        if self._judges_steps:
            return self._judge_steps(now)
        self._standing.forget(self._standing.num_begun)
        return None

    def _judge_steps(self, now: float) -> str | None:
        slowest = min(self._others.values(), key=lambda other: (other.num_begun, other.num_done))
        self._standing.forget(min(other.num_done for other in self._others.values()))
        begun_at = self._standing.begun_at
        if not begun_at or now - begun_at[0] <= self._timeout_s:
            return None
        behind = "has not begun it" if slowest.num_begun < self._standing.num_begun else "has not computed it"
        return f"a step has taken more than {self._timeout_s:g} s (--dist-timeout), and {slowest.name} {behind}"
