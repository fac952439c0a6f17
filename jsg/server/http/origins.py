"""Which web pages may use the server.

A browser sends `Origin` with every request of a page to another server, and with every POST. Without this check any
web page could use a server that runs on its reader's machine. Programs send no `Origin`, so the check lets them pass.
"""

import ipaddress
import re
from collections.abc import Sequence
from typing import final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from jsg.errors import ConfigError
from jsg.server.http.failures import failure_body, failure_response
from jsg.server.http.request_id import with_headers

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\-_\[\]:]+")
READING = ("GET", "HEAD", "OPTIONS")  # they change nothing, and the browser hides the response from the page
EXPOSED = b"x-request-id, retry-after"
PREFLIGHT_AGE_S = b"600"


def checked_origins(origins: Sequence[str]) -> frozenset[bytes]:
    """The origins of `--cors-allow-origin`. Raises ConfigError for a text that is no origin."""
    for origin in origins:
        if not ORIGIN.fullmatch(origin):
            raise ConfigError(
                "--cors-allow-origin must be one origin as browsers send it, such as https://chat.example.com (lower "
                f"case, no path, no slash at the end, and no *), but got {origin!r}; name each origin"
            )
    return frozenset(origin.encode() for origin in origins)


@final
class CheckOrigin:
    """Refuses requests of foreign pages that change or generate something, and tells browsers which pages are allowed.

    A page of the server's own address is not foreign, if this address is a number or `localhost`: a name may be an
    attacker's and point to this machine. The server uses no cookies, so none are allowed.
    """

    def __init__(self, app: ASGIApp, origins: frozenset[bytes]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        origin: bytes | None = headers.get(b"origin")
        if origin is None:
            await self._app(scope, receive, send)
            return
        is_preflight = scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        if origin in self._origins:
            granted = _grant(origin)
            if is_preflight:
                await _answer_preflight(granted, headers, send)
            else:
                await self._app(scope, receive, with_headers(send, granted))
        elif is_preflight or (scope["method"] not in READING and not _is_own(origin, headers.get(b"host", b""))):
            message = (
                "a web page may use this server only if its origin is allowed, but this page's is not; start the "
                "server with --cors-allow-origin and the origin that the browser sends"
            )
            await failure_response(scope, failure_body(scope["path"], 403, message), 403)(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _grant(origin: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"Origin"),
    ]


async def _answer_preflight(granted: list[tuple[bytes, bytes]], headers: dict[bytes, bytes], send: Send) -> None:
    granted = [
        *granted,
        (b"access-control-allow-methods", b"GET, HEAD, POST"),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", PREFLIGHT_AGE_S),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": granted})
    await send({"type": "http.response.body", "body": b""})


def _is_own(origin: bytes, host: bytes) -> bool:
    """Whether an origin is the address that the request was sent to, and is a number or `localhost`."""
    if origin not in (b"http://" + host, b"https://" + host):
        return False
    try:
        name = urlsplit(b"//" + host).hostname or b""
        if name == b"localhost":
            return True
        ipaddress.ip_address(name.decode("ascii"))
    except ValueError:
        return False
    return True
