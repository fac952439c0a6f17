"""Which web pages may use the server.

A browser sends `Origin` with every request of a page to another server, and with every POST. Without this check any
web page could use a server that runs on its reader's machine. Programs send no `Origin`, so the check lets them pass.

A page whose name its owner points to this machine (DNS rebinding) is of the server's own origin for the browser, which
then sends no `Origin` with a GET and shows the page the response. `Host` still has the page's name. So a server that
only this machine reaches takes only names that cannot be a stranger's.
"""

import functools
import ipaddress
import re
import socket
from collections.abc import Sequence
from typing import final
from urllib.parse import urlsplit

from starlette.responses import Response
from starlette.types import Scope

from jsg.config import ServerConfig
from jsg.errors import ConfigError
from jsg.server.http.failures import failure_response
from jsg.server.http.request_id import more_headers_of

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9.\-_\[\]:]+")
READING = ("GET", "HEAD", "OPTIONS")  # they change nothing, and the browser hides the response from the page
METHODS = b"GET, HEAD, POST, DELETE"
EXPOSED = b"x-request-id, x-jsg-warnings, retry-after"
OWN_SUFFIXES = (b".localhost", b".internal")
"""Ends of names that nobody can register: RFC 6761, and ICANN's decision of 2024. Containers call their host
`host.docker.internal`."""
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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on this address or name."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return False  # the server cannot listen there
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


@final
class CheckOrigin:
    """Refuses requests of foreign pages that change or generate something, and tells browsers which pages are allowed.

    A page of the server's own address is not foreign, if this address is a number or `localhost`: a name may be an
    attacker's and point to this machine. The server uses no cookies, so none are allowed.

    On a loopback address, requests to a name that may be a stranger's are refused whatever they do. The names of
    allowed origins are taken.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._origins = checked_origins(config.cors_allow_origin)
        self._names: frozenset[bytes] | None = None  # any
        if is_loopback(config.host):
            self._names = frozenset(_name(origin.partition(b"://")[2]) for origin in self._origins)

    def answer(self, scope: Scope) -> Response | None:
        """The response to a request that is refused, or that only asks; else None.

        The headers of the response to a page that is allowed are put into the state of the request.
        """
        headers = dict(scope["headers"])
        if b"host" in headers and not self._is_known(headers[b"host"]):
            message = (
                "this server listens for its own machine only, so a request's Host must be a number, localhost or the "
                "host of an allowed origin, but is another name, which may be a stranger's; start the server with "
                "--cors-allow-origin and the origin at which people reach it"
            )
            return failure_response(scope, 403, message)
        origin: bytes | None = headers.get(b"origin")
        if origin is None:
            return None
        if sum(name == b"origin" for name, _ in scope["headers"]) > 1:
            return failure_response(scope, 400, "a request must have one Origin, but got several; send one")
        is_preflight = scope["method"] == "OPTIONS" and b"access-control-request-method" in headers
        if origin in self._origins:
            more_headers_of(scope).extend(_grant(origin))
            return _preflight(headers) if is_preflight else None
        if is_preflight or (scope["method"] not in READING and not _is_own(origin, headers.get(b"host", b""))):
            message = (
                "a web page may use this server only if its origin is allowed, but this page's is not; start the "
                "server with --cors-allow-origin and the origin that the browser sends"
            )
            return failure_response(scope, 403, message)
        return None

    def _is_known(self, host: bytes) -> bool:
        name = _name(host)
        return self._names is None or _is_own_name(name) or name in self._names or name.endswith(OWN_SUFFIXES)


def _grant(origin: bytes) -> list[tuple[bytes, bytes]]:
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", EXPOSED),
        (b"vary", b"Origin"),
    ]


def _preflight(headers: dict[bytes, bytes]) -> Response:
    response = Response(status_code=204)
    response.raw_headers = [
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", headers.get(b"access-control-request-headers", b"")),
        (b"access-control-max-age", PREFLIGHT_AGE_S),
    ]
    return response


def _is_own(origin: bytes, host: bytes) -> bool:
    """Whether an origin is the address that the request was sent to, and is a number or `localhost`."""
    return origin in (b"http://" + host, b"https://" + host) and _is_own_name(_name(host))


@functools.lru_cache(64)
def _is_own_name(name: bytes) -> bool:
    """Whether a host is a number or `localhost`, which nobody else can point to this machine."""
    if name == b"localhost":
        return True
    try:
        ipaddress.ip_address(name.decode("ascii"))
    except ValueError:
        return False
    return True


@functools.lru_cache(64)
def _name(host: bytes) -> bytes:
    """The host of `HOST:PORT` in lower case and without a last dot; empty where there is none."""
    try:
        return (urlsplit(b"//" + host).hostname or b"").removesuffix(b".")
    except ValueError:
        return b""
