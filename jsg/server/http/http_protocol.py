"""HTTP/1.1 on one connection, with a limit for everything that a client may send or withhold.

Uvicorn's protocol on h11 does the work. This module adds limits: heads and chunks have a bounded size, a request must
arrive in time, and a client that does not read its response loses the connection. Where there are too many connections,
the one that has been idle longest gives way to a new one. A refusal is JSON in the form of the API that was called.
"""

import asyncio
import dataclasses
import functools
import logging
import os
import re
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast, final
from urllib.parse import unquote

import h11
import msgspec
from h11._writers import ChunkedWriter
from uvicorn.protocols.http.h11_impl import H11Protocol as UvicornConnection

from jsg.server.caller import state_of
from jsg.server.http.failures import told_failure
from jsg.server.http.request_id import fresh_request_id, request_id_headers

logger = logging.getLogger(__name__)

ACCEPTED_AT_ONCE = 16
"""Connections that the event loop accepts before it does anything else. None of them is counted until then."""
SPARE_FILES = 64 + 4 * ACCEPTED_AT_ONCE
"""Descriptors for what the front opens later, and for connections that are accepted but not counted, or on their way
out. If none were left, asyncio would accept nothing for a second and log a traceback for each try."""

FRAMES = (b"content-length", b"transfer-encoding")
ABSOLUTE_TARGET = re.compile(rb"https?://(?P<host>[^/?#@]+)(?P<path>.*)", re.IGNORECASE)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Limits of one connection. Times are in seconds.

    Attributes:
        head_bytes: Most bytes of the request line and the headers together.
        headers: Most headers.
        chunk_bytes: Fewest bytes that the chunks of a body have on average, once there are more than `free_chunks`.
        free_chunks: Number of chunks that may have any size.
        head_s: Longest time from a connection, or the first byte of a request, to the end of the request's head.
        body_s: Longest time from the end of the head to the end of the body.
        body_idle_s: Longest time between two pieces of a body.
        write_s: Longest time for which a client may leave a response unread.
        linger_s: Time after a refusal in which further input is thrown away, so that the client can read the refusal.
        connections: Most connections at once. For a further one the longest idle one is closed; where none is idle, the
            further one is answered with 503.
    """

    head_bytes: int = 64 * 2**10
    headers: int = 100
    chunk_bytes: int = 64
    free_chunks: int = 1000
    head_s: float = 10.0
    body_s: float = 120.0
    body_idle_s: float = 15.0
    write_s: float = 300.0
    linger_s: float = 2.0
    connections: int = 10_000


def http_protocol(
    limits: HttpLimits | None = None,
    is_ending: Callable[[], bool] = lambda: False,
    on_refusal: Callable[[dict[str, Any]], None] = lambda state: None,
    connection: "Callable[..., HttpConnection] | None" = None,
) -> type[asyncio.Protocol]:
    """What `uvicorn.Config(http=...)` takes. The default limits allow only connections for which files are left.

    `on_refusal` is called for a refusal that the application does not see, with the ASGI state that a request has.
    Connections are of the class `connection`.

    While `is_ending` gives True, each response ends its connection. A client that keeps connections, and a load
    balancer that only chooses servers for new ones, would otherwise send requests here until the last moment.
    """
    limits = limits or HttpLimits(connections=most_connections())
    return cast(
        type[asyncio.Protocol],
        functools.partial(connection or HttpConnection, limits, _Idle(), is_ending, on_refusal),
    )


def most_connections(num_kinds: int = 1) -> int:
    """The most connections of each of so many kinds, for which files of this process are left."""
    num_files, most = resource.getrlimit(resource.RLIMIT_NOFILE)[0], HttpLimits().connections
    if num_files != resource.RLIM_INFINITY:
        most = min(most, (num_files - len(os.listdir("/dev/fd")) - SPARE_FILES) // num_kinds)
    return max(1, most)


def allow_more_files(num_kinds: int = 1) -> None:
    """Raises this process's limit of open files to what the connections can use, as far as its user may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_kinds * HttpLimits().connections + 1024
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


@final
class _Parser(h11.Connection):
    """h11 with limits; it remembers what a refusal must say.

    Attributes:
        target: The target of the request that is being read; None until its head has been read.
        error: The reason why the input was refused.
    """

    def __init__(self, limits: HttpLimits, is_ending: Callable[[], bool]) -> None:
        super().__init__(h11.SERVER, limits.head_bytes)
        self.target: bytes | None = None
        self.error: h11.RemoteProtocolError | None = None
        self._limits = limits
        self._is_ending = is_ending
        self._num_chunks = 0
        self._num_bytes = 0
        self._head = b""  # of a response, which is not written yet

    def next_event(self) -> Any:
        """The next event, as in h11. Raises RemoteProtocolError for input that is malformed or over a limit."""
        try:
            if self.their_state is h11.IDLE:
                self._skip_empty_lines()
            event: Any = super().next_event()
            kind = type(event)  # to ask `isinstance` of h11's abstract classes takes several calls
            if kind is h11.Request:
                self._check_head(event)
                event = _in_origin_form(event)
            elif kind is h11.Data:
                self._check_data(event)
            return event
        except h11.RemoteProtocolError as error:
            self.error = error
            raise

    def start_next_cycle(self) -> None:
        """Prepares for the next request, as in h11."""
        super().start_next_cycle()
        self.target = None

    def send(self, event: h11.Event) -> Any:
        """The bytes of an event, as in h11.

        A response ends the connection if its request has not arrived whole, and if the server ends. Its head waits for
        what follows it at once, and both are written together. A piece of a stream changes no state, so it does not go
        through h11, which takes longer than all else that becomes of an event.
        """
        if type(event) is h11.Data and event.data and self.is_streaming:
            return self.piece(event.data)
        if type(event) is h11.Response and (self.their_state is h11.SEND_BODY or self._is_ending()):
            event = h11.Response(
                status_code=event.status_code,
                headers=[*event.headers.raw_items(), (b"connection", b"close")],
                reason=event.reason,
            )
        written = super().send(event)
        if type(event) is h11.Response:
            self._head = written
            return b""
        if self._head and written is not None:
            written, self._head = self._head + written, b""
        return written

    @property
    def is_streaming(self) -> bool:
        """Whether a response without a length has begun."""
        return type(self._writer) is ChunkedWriter

    def piece(self, data: bytes) -> bytes:
        """The bytes of a piece of a stream that has begun. The piece is not empty."""
        head, self._head = self._head, b""
        return b"%b%x\r\n%b\r\n" % (head, len(data), data)

    def _clean_up_response_headers_for_sending(self, response: h11.Response) -> h11.Response:
        """As in h11, which checks all headers of a stream twice more to add the one that frames it."""
        has_body = response.status_code == 200 and self._request_method in (b"GET", b"POST")
        if has_body and self.their_http_version == b"1.1" and self._cstate.keep_alive:
            items = response.headers._full_items
            if not any(name in FRAMES for _, name, _ in items):
                items.append((b"Transfer-Encoding", b"transfer-encoding", b"chunked"))
                return response
        return super()._clean_up_response_headers_for_sending(response)

    def _skip_empty_lines(self) -> None:
        """Drops empty lines before a request, as RFC 9112 §2.2 asks: old clients end a body with one."""
        data = self.trailing_data[0]
        if num_blank := len(data) - len(data.lstrip(b"\r\n")):
            self._receive_buffer.maybe_extract_at_most(num_blank)

    def _check_head(self, request: h11.Request) -> None:
        self.target = request.target
        self._num_chunks = self._num_bytes = 0
        headers = [*request.headers]
        names = [name for name, _ in headers]
        if not request.http_version.startswith(b"1."):
            version = request.http_version.decode("ascii")
            raise _refused(505, f"the server speaks HTTP/1.1, but the request says HTTP/{version}")
        if request.http_version == b"1.0" and b"transfer-encoding" in names:
            raise _refused(400, "HTTP/1.0 has no Transfer-Encoding, but got one; send Content-Length")
        num_bytes = len(request.target) + sum([len(name) + len(value) + 4 for name, value in headers])
        if len(names) > self._limits.headers:
            raise _refused(431, f"a request must have at most {self._limits.headers} headers, but got {len(names)}")
        if num_bytes > self._limits.head_bytes:
            raise _refused(
                431, f"a request's head must have at most {self._limits.head_bytes} bytes, but has {num_bytes}"
            )
        if b"content-length" in names and b"transfer-encoding" in names:
            raise _refused(400, "a request must have Content-Length or Transfer-Encoding, but got both; send one")
        if b"upgrade" in names and any(value.lower() == b"websocket" for name, value in headers if name == b"upgrade"):
            raise _refused(400, "the server has no websockets; send an ordinary request, with stream for events")

    def _check_data(self, data: h11.Data) -> None:
        self._num_chunks += data.chunk_start
        self._num_bytes += len(data.data)
        num_more = self._num_chunks - self._limits.free_chunks
        if num_more > 0 and self._num_bytes < num_more * self._limits.chunk_bytes:
            rule = f"chunks must have {self._limits.chunk_bytes} bytes or more on average"
            raise _refused(400, f"{rule}, but {self._num_chunks} have {self._num_bytes} bytes; send larger ones")


def _in_origin_form(request: h11.Request) -> h11.Request:
    """A request as it would come without a proxy: of `http://host/path` the host is its `Host` (RFC 9112 §3.2.2)."""
    if not (match := ABSOLUTE_TARGET.fullmatch(request.target)):
        return request
    others = [(name, value) for name, value in request.headers if name != b"host"]
    path = match["path"] if match["path"].startswith(b"/") else b"/" + match["path"]
    return h11.Request(
        method=request.method,
        target=path,
        headers=[(b"host", match["host"]), *others],
        http_version=request.http_version,
    )


def _refused(status: int, message: str) -> h11.RemoteProtocolError:
    return h11.RemoteProtocolError(message, error_status_hint=status)


@final
class _Transport:
    """A transport whose `close` lets a client that is still sending read the last response.

    Closing a socket with unread input resets the connection, and the client may lose the response.
    """

    def __init__(self, transport: asyncio.Transport, is_receiving: Callable[[], bool], linger_s: float) -> None:
        self._transport = transport
        self.write = transport.write
        self._is_receiving = is_receiving
        self._linger_s = linger_s
        self.is_lingering = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more will be sent or read."""
        return self.is_lingering or self._transport.is_closing()

    def close_at_once(self) -> None:
        """Sends what was written and ends the connection, even if the client may lose it."""
        self._transport.close()

    def close(self) -> None:
        """Sends what was written and ends the connection: at once, or after `linger_s` where the client still sends."""
        if self.is_closing():
            return
        if not self._is_receiving():
            self._transport.close()
            return
        self.is_lingering = True
        self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(self._linger_s, self._transport.abort)


@final
class _Idle:
    """The connections of a server on which no request is under way: no whole head has arrived, or it was refused."""

    def __init__(self) -> None:
        self._since: dict[HttpConnection, None] = {}  # the longest idle one is the first
        self._is_told = False

    def note(self, connection: "HttpConnection", *, is_idle: bool) -> None:
        """Notes whether a connection is idle. One that stays idle keeps its turn."""
        if is_idle:
            self._since.setdefault(connection)
        else:
            self._since.pop(connection, None)

    def give_way(self, num_connections: int) -> bool:
        """Closes the longest idle connection. False if there is none."""
        if not self._is_told:
            self._is_told = True
            logger.warning("all %d connections are taken; from now on idle ones give way to new ones", num_connections)
        oldest = next(iter(self._since), None)
        if oldest is None:
            return False
        del self._since[oldest]
        oldest.transport.abort()
        return True


class HttpConnection(UvicornConnection):
    """One connection of a client."""

    def __init__(
        self,
        limits: HttpLimits,
        idle: _Idle,
        is_ending: Callable[[], bool],
        on_refusal: Callable[[dict[str, Any]], None],
        *args: Any,
        begin: bytes = b"",
        **kwargs: Any,
    ) -> None:
        """`begin` is what has been read of the connection already."""
        super().__init__(*args, **kwargs)
        self._begin = begin
        self.conn = _Parser(limits, is_ending)
        self.app_state = {**self.app_state, "write_piece": self._write_piece}
        self._limits = limits
        self._idle = idle
        self._on_refusal = on_refusal
        self._reading: object = h11.IDLE  # the part of a request that must arrive in time; None between requests
        self._read_deadline = 0.0
        self._last_data_at = 0.0
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    # ---- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        wrapped = _Transport(cast(asyncio.Transport, transport), self._is_receiving, self._limits.linger_s)
        super().connection_made(cast(asyncio.Transport, wrapped))
        most = self._limits.connections
        if len(self.connections) > most and not self._idle.give_way(most):
            self._refuse(503, f"at most {most} connections are served at once; try again later", lingers=False)
            return
        self._idle.note(self, is_idle=True)
        self._await(h11.IDLE, self._limits.head_s)
        if self._begin:
            begin, self._begin = self._begin, b""
            self.data_received(begin)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self.transport.is_closing():
            return
        self._last_data_at = self.loop.time()
        super().data_received(data)
        self._watch(has_begun=True)

    def eof_received(self) -> None:
        """The client sends no more. An incomplete request is refused; after a complete one the client has left."""
        if not self.transport.is_closing() and self._reading is not None and self._last_data_at:
            self.conn.receive_data(b"")
            self.handle_events()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._idle.note(self, is_idle=False)
        self._await(None)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read what it is sent."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client reads again."""
        if self._write_timer is not None:
            self._write_timer.cancel()
        super().resume_writing()

    def _write_piece(self, piece: bytes) -> bool:
        """Sends a piece of a stream without the calls that a message takes. False where it must be a message."""
        if self.flow.write_paused or self.cycle.disconnected or not self.conn.is_streaming:
            return False
        self.transport.write(self.conn.piece(piece))
        return True

    # ---- what uvicorn calls

    def send_400_response(self, msg: str) -> None:
        """Refuses input that the parser refused. `msg` comes from uvicorn and says less than the parser's message."""
        error = self.conn.error
        assert error is not None
        status = error.error_status_hint
        if status == 431 and self.conn.target is None:
            limit = self._limits.head_bytes
            self._refuse(431, f"a request's head must have at most {limit} bytes, but has more; send shorter headers")
        else:
            # A transfer coding that is unknown is the client's fault too, and h11 quotes input as Python writes it.
            rule = (str(error) or msg).partition(": bytearray")[0]
            self._refuse(400 if status == 501 else status, f"{rule}; send well-formed HTTP/1.1")

    def on_response_complete(self) -> None:
        """A response has been written."""
        super().on_response_complete()
        self._watch(has_begun=bool(self.conn.trailing_data[0]))

    def shutdown(self) -> None:
        """The server ends. A connection that is closing already, perhaps after a refusal, needs no more."""
        if not self.transport.is_closing():
            super().shutdown()

    # ---- time

    def _is_receiving(self) -> bool:
        """Whether a part of a request is still to come, or was refused."""
        return self.conn.their_state in (h11.SEND_BODY, h11.ERROR) or self.conn.error is not None

    def _watch(self, *, has_begun: bool) -> None:
        """Sets the deadline of the part of a request that is being read."""
        state = self.conn.their_state
        self._idle.note(self, is_idle=state is h11.IDLE and not self.transport.is_closing())
        if self.transport.is_closing() or state not in (h11.IDLE, h11.SEND_BODY) or not has_begun:
            self._await(None)
        elif state is not self._reading:
            self._await(state, self._limits.head_s if state is h11.IDLE else self._limits.body_s)

    def _await(self, part: object, limit_s: float = 0.0) -> None:
        self._reading = part
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None
        if part is not None:
            self._read_deadline = self.loop.time() + limit_s
            self._check_time()

    def _check_time(self) -> None:
        """Refuses a request that is late; otherwise checks again at the deadline."""
        due = self._read_deadline
        if self._reading is h11.SEND_BODY and not self.flow.read_paused:
            due = min(due, self._last_data_at + self._limits.body_idle_s)
        if self.loop.time() < due:
            self._read_timer = self.loop.call_at(due, self._check_time)
        elif not self._last_data_at:
            self.transport.close()  # nothing was ever sent on this connection
        elif self._reading is h11.IDLE:
            rule = f"a request's head must arrive within {self._limits.head_s:g} s"
            self._refuse(408, f"{rule}, but does not; send it at once")
        else:
            limits = f"{self._limits.body_s:g} s, and never pause for {self._limits.body_idle_s:g} s"
            self._refuse(408, f"a request's body must arrive within {limits}, but does not; send it at once")

    # ---- refusals

    def _refuse(self, status: int, message: str, *, lingers: bool = True) -> None:
        """Sends a failure in the form of the API, unless a response has begun, and ends the connection."""
        self._await(None)
        self.conn.error = self.conn.error or _refused(status, message)
        cycle = self.cycle
        is_running = cycle is not None and not cycle.response_complete
        state = state_of(cast(dict[str, Any], cycle.scope)) if is_running else {}
        state.setdefault("request_id", fresh_request_id())
        if not (is_running and cycle.response_started):
            self.transport.write(_response(status, message, self.conn.target, state))
        if is_running:
            cycle.disconnected = True
            cycle.message_event.set()
        else:
            self._on_refusal(state)
        if lingers:
            self.transport.close()
            self._idle.note(self, is_idle=True)  # it only waits for its client to read the refusal
        else:
            cast(_Transport, self.transport).close_at_once()


def _response(status: int, message: str, target: bytes | None, state: dict[str, Any]) -> bytes:
    """The bytes of a refusal, which the state keeps for the request log."""
    path = "/" if target is None else unquote(target.partition(b"?")[0].decode("ascii"))
    scope = {"path": path, "state": state}
    body = msgspec.json.encode(told_failure(scope, status, message))
    head = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in request_id_headers(scope).items()),
    ]
    return "\r\n".join([*head, "", ""]).encode("ascii") + body
