"""Calls to one server over HTTP, with JSON and events. They are retried where that does no harm.

A call is tried again when the server could not be reached or was too busy, and when the connection broke before the
answer began. In these cases no part of the answer was seen, and the call has changed nothing at the server except its
cache. After an answer has begun the call is never tried again.
"""

import asyncio
import contextlib
import json
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, final
from urllib.parse import urlsplit

import httpx

from jsg.errors import BackendError, ConfigError, EngineDeadError, JsgError
from jsg.lang.http.errors import failure_in_stream, failure_of
from jsg.lang.streams.per_loop import PerLoop

CONNECT_S = 10.0
KEEP_ALIVE_S = 4.0  # less than the 5 s after which a server closes an idle connection
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 8.0
BUSY = (429, 503)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_EVENT_END = b"\n\n"
_DATA = b"data: "
_DONE = b"[DONE]"
_NOTHING_SEEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)
"""Errors after which a call may be sent again, because no answer had begun."""
_JITTER = random.Random()
"""A generator of its own: `random` belongs to the program, which may have seeded it."""


@final
class HttpClient:
    """Calls to one server, from any number of tasks; each event loop has its own connections.

    Attributes:
        base_url: The address of the server.
    """

    def __init__(
        self, base_url: str, *, api_key: str | None, timeout_s: float, max_retries: int, verify: bool | str
    ) -> None:
        """Makes no connection yet. `verify` is a file of certificates, or False to trust any. Raises ConfigError."""
        self.base_url = base_url.rstrip("/")
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"the URL of a server must begin with http:// or https://, but got {base_url!r}")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s), pool=None)
        self._max_retries = max_retries
        self._verify = _trusted(verify)
        self._trust_env = parts.hostname not in LOOPBACK  # a proxy would not reach this machine
        self._clients = PerLoop(self._new_client, httpx.AsyncClient.aclose)

    async def get(self, path: str) -> Any:
        """Gets the JSON at a path. Raises JsgError."""
        return await self._json("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Posts a request; gives the JSON of the answer. Raises JsgError."""
        return await self._json("POST", path, body)

    async def events(
        self, path: str, body: Mapping[str, Any], *, max_retries: int | None = None
    ) -> AsyncGenerator[Any]:
        """Posts a request; gives the events of the answer as they come. Closing the iterator early disconnects.

        Args:
            path: The path.
            body: The request.
            max_retries: The number of retries; None takes that of all calls.

        Raises:
            JsgError: The request is refused or fails; a BackendError also where the answer breaks off.
        """
        async with self._response("POST", path, body, max_retries) as response:
            try:
                async with contextlib.aclosing(_events(response)) as events:
                    async for event in events:
                        yield event
            except (httpx.HTTPError, ValueError) as error:
                raise self._broken(error) from error

    async def close(self) -> None:
        """Closes all connections, of all event loops. A second call does nothing."""
        await self._clients.close()

    def shutdown(self) -> None:
        """Does the same as `close`, for code that is no coroutine."""
        self._clients.shutdown()

    async def _json(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        async with self._response(method, path, body) as response:
            try:
                content = await response.aread()
            except httpx.HTTPError as error:
                raise self._broken(error) from error
        try:
            return json.loads(content)
        except ValueError:
            raise BackendError(
                f"{self.base_url}{path} must answer with JSON, but gave {content[:100]!r}; is it a jsg server?",
                response.status_code,
            ) from None

    @contextlib.asynccontextmanager
    async def _response(
        self, method: str, path: str, body: Mapping[str, Any] | None, max_retries: int | None = None
    ) -> AsyncIterator[httpx.Response]:
        """Gives the response, once its status says success. Raises JsgError."""
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {} if body is None else {"Content-Type": "application/json"}
        delay_s = FIRST_DELAY_S
        for num_left in range(self._max_retries if max_retries is None else max_retries, -1, -1):
            wait_s = delay_s
            client = self._clients.here()
            request = client.build_request(
                method, self.base_url + path, content=content, headers=self._headers | headers
            )
            try:
                response = await client.send(request, stream=True)
            except httpx.HTTPError as error:
                if client.is_closed:
                    raise _closed() from error
                if not num_left or not isinstance(error, _NOTHING_SEEN):
                    raise self._unreachable(error) from error
            else:
                async with _closing(response, client):
                    if response.is_success:
                        yield response
                        return
                    failure = await self._failure(response)
                if not num_left or response.status_code not in BUSY or isinstance(failure, EngineDeadError):
                    raise failure
                wait_s = max(wait_s, min(failure.retry_after_s or 0, MAX_DELAY_S))
            await asyncio.sleep(wait_s * _JITTER.uniform(0.75, 1.25))  # clients refused together come back apart
            if client.is_closed:  # another client would be made, and nobody would close it
                raise _closed()
            delay_s = min(2 * delay_s, MAX_DELAY_S)

    async def _failure(self, response: httpx.Response) -> JsgError:
        try:
            content = await response.aread()
        except httpx.HTTPError as error:
            return self._broken(error)
        return failure_of(response.status_code, content, response.headers.get("Retry-After"))

    def _unreachable(self, error: httpx.HTTPError) -> BackendError:
        if isinstance(error, httpx.ReadTimeout):
            return self._broken(error)
        reason = str(error) or type(error).__name__
        return BackendError(f"the server at {self.base_url} must answer, but: {reason}; is it running?")

    def _broken(self, error: Exception) -> BackendError:
        if isinstance(error, httpx.ReadTimeout):
            return BackendError(f"{self.base_url} must not be silent for {self._timeout.read:g} s; raise timeout_s")
        reason = str(error) or type(error).__name__
        return BackendError(f"the answer of {self.base_url} broke off: {reason}; see the log of the server")

    def _new_client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            timeout=self._timeout,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
            verify=self._verify,
            trust_env=self._trust_env,
        )


@contextlib.asynccontextmanager
async def _closing(response: httpx.Response, client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Closes a response at the end.

    Where the client was closed meanwhile this also closes the connection: httpx forgets one that is being opened while
    its client is closed.
    """
    try:
        yield
    finally:
        try:
            await response.aclose()
        finally:
            if client.is_closed:
                await response.extensions["network_stream"].aclose()


def _closed() -> BackendError:
    return BackendError("the endpoint was closed while a call was under way; close it after its last call")


def _trusted(verify: bool | str) -> bool | ssl.SSLContext:
    """Gives what httpx takes for a file of certificates. Raises ConfigError where the file is none."""
    if isinstance(verify, bool):
        return verify
    try:
        return ssl.create_default_context(cafile=verify)
    except OSError as error:
        raise ConfigError(f"verify must be a file of certificates in PEM form, but {verify!r}: {error}") from None


@final
class EventSplitter:
    """Splits the bytes of a stream into events, in time linear in their number."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._last = b""  # the last byte that came, because the end of an event may be in two chunks

    def push(self, chunk: bytes) -> list[bytes]:
        """Gives the events that end in this chunk."""
        *ends, rest = (self._last + chunk).split(_EVENT_END)
        if ends:
            ends[0] = b"".join((*self._parts, ends[0]))
            self._parts.clear()
        self._parts.append(rest[:-1])
        self._last = rest[-1:]
        return ends


async def _events(response: httpx.Response) -> AsyncGenerator[Any]:
    """Gives the data of each event up to [DONE], and reads to the end, so that the connection can be used again.

    Raises:
        JsgError: An event is an error.
        ValueError: An event is not a JSON object.
        httpx.HTTPError: The stream breaks off.
    """
    splitter, is_done = EventSplitter(), False
    async for chunk in response.aiter_bytes():
        for event in splitter.push(chunk):
            if not event.startswith(_DATA):
                continue  # a comment
            data = event[len(_DATA) :]
            if data == _DONE:
                is_done = True
                continue
            value = json.loads(data)
            if not isinstance(value, dict):
                raise ValueError(f"an event must be a JSON object, but got {data[:100]!r}")
            if "error" in value:
                raise failure_in_stream(value["error"])
            yield value
    if not is_done:
        raise httpx.RemoteProtocolError("the stream ended without saying so")
