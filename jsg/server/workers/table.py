"""How far each connection of the workers is, in memory that the hub shares, so that a worker's death loses no client.

A worker writes one byte for each step of an exchange. When it has died, the hub, which has kept the sockets, reads them
and ends each exchange in a way that its client understands.
"""

import mmap
import os
import tempfile
from collections.abc import Sequence
from typing import final

import msgspec
import numpy as np

from jsg.errors import JsgError
from jsg.server.http.event_stream import failure_events
from jsg.server.http.failures import status_of, told_error

SLOTS = 2**14
"""The most connections of one worker."""
IDLE, MIDDLE, NEW = 0, 254, 255
"""Between two exchanges, all of which has been sent; inside one that cannot be ended well; and still unread."""


@final
class ConnectionTable:
    """A byte for each slot of each worker: IDLE, MIDDLE, NEW, or what `asked` and `streams` give for a path."""

    def __init__(self, fd: int, paths: Sequence[str]) -> None:
        """Maps the memory of `fd`. `paths` are those that workers answer, in the same order in all processes."""
        self.fd = fd
        self.paths = tuple(paths)
        self._bytes = np.frombuffer(mmap.mmap(fd, 0), np.uint8)

    @classmethod
    def make(cls, num_workers: int, paths: Sequence[str]) -> "ConnectionTable":
        """A new table, in memory that has no name."""
        with tempfile.TemporaryFile() as file:
            file.truncate(num_workers * SLOTS)
            return cls(os.dup(file.fileno()), paths)

    def of_worker(self, number: int) -> np.ndarray:
        """The bytes of the worker with this number, which counts from 1."""
        return self._bytes[(number - 1) * SLOTS : number * SLOTS]

    def asked(self, path: str) -> int:
        """The byte for a request whose response has not begun."""
        return 1 + 2 * self.paths.index(path)

    def streams(self, path: str) -> int:
        """The byte for a stream of events of which whole events have been sent."""
        return 2 + 2 * self.paths.index(path)

    def last_words(self, state: int, error: JsgError) -> bytes:
        """What the client of a connection in this state shall still get: a response, a last event, or nothing."""
        if state in (IDLE, MIDDLE, NEW):
            return b""
        path, is_stream = self.paths[(state - 1) // 2], state % 2 == 0
        scope = {"path": path, "state": {}}
        if is_stream:
            events = failure_events(scope, error)
            return b"%x\r\n%b\r\n0\r\n\r\n" % (len(events), events)
        body = msgspec.json.encode(told_error(scope, error))
        head = f"HTTP/1.1 {status_of(error)} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        return f"{head}\r\nconnection: close\r\n\r\n".encode() + body
