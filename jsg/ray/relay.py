"""Carries requests to a replica and its answers back as bytes. It needs no Ray.

A request is tried again on another replica only while nothing of an answer was sent to the client. Where no connection
came about, or the replica shuts down, it may be tried as often as the time allows. A replica that breaks with the
request, or refuses it with another 503, may do so because of the request, so this happens once. A stream that breaks
later ends with an error event.
"""

import asyncio
import dataclasses
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import NamedTuple, final

import aiohttp
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jsg.server.http.failures import failure_body

logger = logging.getLogger(__name__)

MAX_MOVES = 1
CONNECT_TIMEOUT_S = 5.0
PAUSE_S = 0.1  # between tries, while no other replica is known
UNAVAILABLE = 503
HOP_BY_HOP = frozenset(
    {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
)
EVENT_END = b"\n\n"
NUM_TOKENS = re.compile(rb'"(?:completion|output)_tokens": *(\d{1,7})\b')
Broken = (aiohttp.ClientError, ConnectionError, TimeoutError)


@dataclasses.dataclass(slots=True)
class Lease:
    """A replica that a request may be sent to.

    Attributes:
        begin: Notes that the answer has begun.
        url: Its address.
        replica: Its name.
        num_tokens: About how many tokens its answer has so far: those that it says, or the events of a stream.
    """

    begin: Callable[[], None]
    url: str = ""
    replica: str = ""
    num_tokens: int = 0


Acquire = Callable[[bytes, frozenset[str]], AbstractAsyncContextManager[Lease]]
"""Leases a replica for a body, if possible none of the named ones. Raises NoReplicaError where none is known."""


class NoReplicaError(Exception):
    """There is no replica now, or the one that was asked shuts down."""


class _Begun(NamedTuple):
    """An answer of which at least the beginning is here, and what must be closed after it."""

    upstream: aiohttp.ClientResponse
    first: bytes
    lease: Lease
    open: AsyncExitStack


@final
class Relay:
    """Answers requests with what replicas answer."""

    def __init__(self, acquire: Acquire, wait_s: float) -> None:
        """Must be made on the event loop that will use it.

        Args:
            acquire: Leases a replica.
            wait_s: How long a request may wait until a replica takes it.
        """
        self._acquire = acquire
        self._wait_s = wait_s
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)

    async def close(self) -> None:
        """Closes all connections."""
        await self._http.close()

    async def answer(self, request: Request) -> Response:
        """The response of a replica, or one that says why there is none."""
        content = await request.body()
        begun = await self._begin(request, content)
        if isinstance(begun, str):
            return _failure(request.url.path, begun)
        headers = _passed_on(begun.upstream.headers)
        if begun.upstream.content_type == "text/event-stream":
            return StreamingResponse(_events(begun, request.url.path), begun.upstream.status, headers)
        async with begun.open:
            begun.lease.num_tokens = sum(map(int, NUM_TOKENS.findall(begun.first)[:1]))
            return Response(begun.first, begun.upstream.status, headers)

    async def _begin(self, request: Request, content: bytes) -> _Begun | str:
        """The first answer that begins, or why none does."""
        deadline, avoid, num_moves = time.monotonic() + self._wait_s, frozenset[str](), 0
        while (left := deadline - time.monotonic()) > 0:
            stack, lease = AsyncExitStack(), None
            try:
                async with asyncio.timeout(left):
                    lease = await stack.enter_async_context(self._acquire(content, avoid))
                begun = await self._send(stack, lease, request, content)
                if begun.upstream.status == UNAVAILABLE and begun.upstream.headers.get("Connection") == "close":
                    raise NoReplicaError  # it shuts down
                if begun.upstream.status != UNAVAILABLE or num_moves == MAX_MOVES:
                    lease.begin()
                    return begun
                num_moves += 1
            except (NoReplicaError, aiohttp.ClientConnectorError, TimeoutError):  # nothing has been sent
                avoid = avoid if lease is not None else frozenset()  # all have failed it: they may be better by then
                await asyncio.sleep(PAUSE_S)
            except Broken as error:
                if num_moves == MAX_MOVES:
                    await stack.aclose()
                    return f"two replicas ended while they had this request ({type(error).__name__}); send it again"
                num_moves += 1
            except BaseException:
                await stack.aclose()
                raise
            await stack.aclose()
            avoid |= {lease.replica} if lease is not None else frozenset()
        return f"no replica took the request within {self._wait_s:g} s; send it again later"

    async def _send(self, stack: AsyncExitStack, lease: Lease, request: Request, content: bytes) -> _Begun:
        """Sends the request and waits for the whole answer, or for the first part of a stream of events."""
        query = f"?{request.url.query}" if request.url.query else ""
        upstream = await stack.enter_async_context(
            self._http.request(
                request.method,
                lease.url + request.url.path + query,
                data=content or None,
                headers=_passed_on(request.headers),
                allow_redirects=False,
            )
        )
        is_stream = upstream.content_type == "text/event-stream"
        first = await (upstream.content.readany() if is_stream else upstream.read())
        return _Begun(upstream, first, lease, stack)


async def _events(begun: _Begun, path: str) -> AsyncGenerator[bytes]:
    """The bytes of a stream of events, in whole events; if it breaks, an error event is the last one."""
    async with begun.open:
        rest = begun.first
        try:
            while True:
                whole = rest.rfind(EVENT_END) + len(EVENT_END)
                if whole >= len(EVENT_END):
                    begun.lease.num_tokens += rest.count(EVENT_END)
                    yield rest[:whole]
                    rest = rest[whole:]
                if not (more := await begun.upstream.content.readany()):
                    break
                rest += more
        except Broken:
            logger.warning("a replica ended while it streamed an answer")
            yield _error_event(path)
            return
    if rest:
        yield rest


def _error_event(path: str) -> bytes:
    """The end of a broken stream, in the form in which the API of the path ends one."""
    body = failure_body(
        path, UNAVAILABLE, "the replica of this request ended after its answer had begun; send it again"
    )
    if path.startswith("/v1/responses"):
        body = body["error"] | {"type": "error"}
    event = b"data: " + json.dumps(body).encode() + EVENT_END
    is_named = path.startswith(("/v1/messages", "/v1/responses"))
    return b"event: error\n" + event if is_named else event + b"data: [DONE]" + EVENT_END


def _failure(path: str, message: str) -> Response:
    content = json.dumps(failure_body(path, UNAVAILABLE, message))
    return Response(content, UNAVAILABLE, {"Retry-After": "1"}, "application/json")


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP_BY_HOP}
