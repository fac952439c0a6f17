"""A connection that the hub has accepted and a worker serves, as long as its requests are for endpoints of workers."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from typing import Any, cast, final, override

import h11

from jsg.server.http.http_protocol import HttpConnection
from jsg.server.workers.table import IDLE, MIDDLE, ConnectionTable

MOST_LINE = 8192
"""Of a request line. In longer ones the hub looks for faults."""
CONTINUE = b"HTTP/1.1 100 "


@final
class WorkerConnections:
    """What the connections of a worker share.

    Attributes:
        table: How far each is.
        states: The bytes of this worker.
        give_back: As `HubClient.give_back`.
        paths: What a request line names → the path of the endpoint.
    """

    def __init__(
        self, table: ConnectionTable, number: int, give_back: Callable[[int, bytes | None], None], root_path: str
    ) -> None:
        self.table = table
        self.states = table.of_worker(number)
        self.give_back = give_back
        self.paths: Mapping[bytes, str] = {
            (prefix + path).encode(): path for prefix in {"", root_path} for path in table.paths
        }

    def path_of(self, line: bytes) -> str | None:
        """The path of a request line, if a worker answers it."""
        method, _, rest = line.lstrip(b"\r\n").partition(b" ")
        target = rest.partition(b" ")[0].partition(b"?")[0]
        return self.paths.get(target) if method == b"POST" else None


class HubConnection(HttpConnection):
    """One connection of the hub. After a response it goes to a worker again, so that connections stay balanced."""

    def __init__(self, give: Callable[[socket.socket], bool], *args: Any, **kwargs: Any) -> None:
        """`give` gives a socket to a worker, or says that none can have it."""
        super().__init__(*args, **kwargs)
        self._give = give

    @override
    def on_response_complete(self) -> None:
        """A response has been written."""
        super().on_response_complete()
        is_whole = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        if not is_whole or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return
        with contextlib.suppress(OSError):  # no descriptor is left
            connection = self.transport.get_extra_info("socket").dup()
            if self._give(connection):
                self.transport.abort()
            else:
                connection.close()


class WorkerConnection(HttpConnection):
    """One connection of a worker. Of each request it reads the first line, which says who answers it."""

    def __init__(self, shared: WorkerConnections, *args: Any, slot: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shared = shared
        self._slot = slot
        self._line = b""  # the begin of a request whose first line is not whole
        self._path: str | None = None
        self._has_begun = False  # the response
        self._whole = MIDDLE  # the state while all that was written has been sent
        self._is_moved = False

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is this worker's."""
        super().connection_made(transport)
        self._send = self.transport.write
        self._num_unsent = cast(asyncio.Transport, transport).get_write_buffer_size
        self.transport.write = self._write  # pyright: ignore[reportAttributeAccessIssue] # of the transport around it

    @override
    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.conn.their_state is not h11.IDLE or self.conn.trailing_data[0] or self.transport.is_closing():
            super().data_received(data)
            return
        self._line += data
        if b"\n" not in self._line.lstrip(b"\r\n") and len(self._line) < MOST_LINE:
            self._shared.states[self._slot] = MIDDLE
            self._unset_keepalive_if_required()
            self._last_data_at = self.loop.time()
            self._watch(has_begun=True)
            return
        begin, self._line = self._line, b""
        path = self._shared.path_of(begin)
        if path is None and not self._num_unsent():  # else `_only` refuses it after the rest of a response
            self._is_moved = True
            self._shared.give_back(self._slot, begin)
            self.transport.abort()  # the hub has a descriptor of its own
            return
        self._ask(path)
        super().data_received(begin)

    @override
    def handle_events(self) -> None:
        """What has come is read: perhaps a request that came before the response to another one had been sent."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self._has_begun:
            self._ask(self._shared.paths.get(self.scope["raw_path"]))

    @override
    def eof_received(self) -> None:
        """The client sends no more."""
        if self._line:
            begin, self._line = self._line, b""
            super().data_received(begin)
        super().eof_received()

    @override
    def on_response_complete(self) -> None:
        """A response has been written."""
        is_between = not (self._num_unsent() or self.conn.trailing_data[0] or self.transport.is_closing())
        self._shared.states[self._slot] = IDLE if is_between else MIDDLE
        super().on_response_complete()

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone. The hub's descriptor would keep it open for the client."""
        if not self._is_moved:
            with contextlib.suppress(OSError):
                self.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self._shared.give_back(self._slot, None)
        super().connection_lost(exc)

    def _ask(self, path: str | None) -> None:
        """A request has come, for an endpoint of workers or for another one."""
        self._path, self._has_begun = path, False
        self._shared.states[self._slot] = MIDDLE if path is None else self._shared.table.asked(path)

    def _write(self, data: bytes) -> None:
        if data and not self._has_begun and not data.startswith(CONTINUE):
            head = data.partition(b"\r\n\r\n")[0].lower()
            is_stream = b"content-type: text/event-stream" in head and b"transfer-encoding: chunked" in head
            self._has_begun = True
            self._whole = self._shared.table.streams(self._path) if is_stream and self._path else MIDDLE
            # Before it is sent: whoever has read it may end this process before the next line runs.
            self._shared.states[self._slot] = self._whole
        self._send(data)
        if data and self._has_begun:
            self._shared.states[self._slot] = MIDDLE if self._num_unsent() else self._whole
