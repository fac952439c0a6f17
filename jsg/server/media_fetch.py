"""Fetches files from `http` and `https` URLs that clients name, from hosts that the operator has allowed and no others.

A server that opens the URLs of strangers can be made to reach into its own network. Therefore:

- The host must be allowed. Its addresses are looked up once, and every one is checked.
- The server connects to an address that was checked, even if the name leads elsewhere a moment later.
- A redirect is an error. No proxy, cookie, key or password is sent.
- Size and time are bounded while the file is read. The bytes of the file decide its type.
"""

import asyncio
import contextlib
import dataclasses
import ipaddress
import re
import socket
import ssl
from collections.abc import Sequence
from typing import final

import httpx

from jsg.errors import ConfigError, RequestError, quote

MAX_URL_LENGTH = 8192
CHUNK_BYTES = 2**16
PORTS = {"http": 80, "https": 443}

_ALLOWED_FORM = re.compile(r"\.?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?(:[0-9]{1,5})?|\[[0-9a-f:.]+\](:[0-9]{1,5})?")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")  # RFC 6052
_ASSIGNED = ipaddress.ip_network("192.0.0.0/24")  # RFC 6890; older Pythons call it global
_UNICAST = ipaddress.ip_network("2000::/3")  # all that IPv6 has given out
_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """Which hosts files are fetched from, and how large a file may be.

    Attributes:
        allowed_hosts: Each is `host` or `host:port`; without a port the scheme's own is meant. A host is a name; a name
            with a dot in front, which allows every name below it but not the name itself; or an address, IPv6 in
            brackets. The server connects to a private address only where this address itself is allowed: a name that
            leads to one is refused.
        max_bytes: Most bytes of one file.
        timeout_s: Most seconds for one file, with the look-up of its host.

    Raises:
        ConfigError: A host has another form, or a limit is too low.
    """

    allowed_hosts: tuple[str, ...] = ()
    max_bytes: int = 64 * 2**20
    timeout_s: float = 20.0

    def __post_init__(self) -> None:
        for host in self.allowed_hosts:
            if not _ALLOWED_FORM.fullmatch(host):
                raise ConfigError(
                    "an allowed media host must be a name, .name for all names below it, or an address (IPv6 in "
                    f"brackets), in small letters and perhaps with :port, but got {quote(host)}"
                )
        if not (self.max_bytes >= 1 and self.timeout_s > 0):
            raise ConfigError(f"max_bytes and timeout_s must be positive, but got {self.max_bytes}, {self.timeout_s}")

    def allows(self, host: str, port: int, default_port: int) -> bool:
        """Whether a host, as httpx writes it, is one of those allowed at this port."""
        written = f"[{host}]" if ":" in host else host
        for entry in self.allowed_hosts:
            name, separator, digits = entry.rpartition(":")
            if not separator or entry.endswith("]"):
                name, digits = entry, str(default_port)
            if int(digits) == port and (written == name or (name.startswith(".") and _is_below(written, name))):
                return True
        return False


@final
class MediaFetcher:
    """Fetches files within one policy. Any number of tasks may use it. Each file has a connection of its own."""

    def __init__(self, policy: FetchPolicy, ssl_context: ssl.SSLContext | None = None):
        """`ssl_context` says whom https trusts: by default whom httpx trusts, whatever the environment names."""
        self._policy = policy
        self._ssl = httpx.create_ssl_context(trust_env=False) if ssl_context is None else ssl_context

    async def fetch(self, url: str) -> bytes:
        """The file at a URL.

        Raises:
            RequestError: The URL is not allowed; its host cannot be found or reached, or leads to a private address;
                the answer is not 200, larger or slower than the policy allows.
        """
        if not self._policy.allowed_hosts:
            raise RequestError(
                "a URL must be of a host that --allowed-media-host names, but this server allows none; send the file "
                "as a data: URL"
            )
        target = self._checked(url)
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                addresses = await _look_up(target.raw_host.decode("ascii"), _port(target))
                return await self._read(target, addresses)
        except TimeoutError:
            raise RequestError(
                f"a URL must be fetched within {self._policy.timeout_s:g} s, but {quote(target.host[:80])} takes "
                "longer; send the file as a data: URL"
            ) from None

    def _checked(self, url: str) -> httpx.URL:
        """The URL, parsed once: the same parsed URL is checked and then fetched. Raises RequestError."""
        if len(url) > MAX_URL_LENGTH:
            raise RequestError(f"a URL may have at most {MAX_URL_LENGTH} characters, but has {len(url)}; shorten it")
        try:
            target = httpx.URL(url)
            port = _port(target)
        except (httpx.InvalidURL, ValueError, KeyError):
            raise RequestError(
                f"a URL must begin with https:// or http:// and a host, but got {quote(url[:80])}; correct it"
            ) from None
        if target.userinfo:
            raise RequestError("a URL must have no user and no password in it, but this one has; leave them out")
        if not self._policy.allows(target.raw_host.decode("ascii"), port, PORTS[target.scheme]):
            raise RequestError(
                f"a URL must be of a host that this server allows, but {quote(target.host[:80])} at port {port} is "
                "not; send the file as a data: URL"
            )
        return target

    async def _read(self, url: httpx.URL, addresses: Sequence[_Address]) -> bytes:
        """The file from the first address that can be reached."""
        # `fetch` limits the whole time. This limit leaves time for the next address where one does not answer at all.
        timeout = httpx.Timeout(None, connect=self._policy.timeout_s / (len(addresses) + 1))
        # Each file has its own client, so that no cookie and no connection of one file serves another.
        options = {"trust_env": False, "follow_redirects": False, "timeout": timeout}
        async with httpx.AsyncClient(verify=self._ssl, **options) as client:
            for address in addresses:
                # The other side looks for the name in the Host header and in the certificate, so it stays there.
                request = client.build_request(
                    "GET",
                    url.copy_with(host=str(address)),
                    headers={"Host": url.netloc.decode("ascii"), "Accept-Encoding": "identity"},
                    extensions={"sni_hostname": url.raw_host.decode("ascii")},
                )
                with contextlib.suppress(httpx.ConnectError, httpx.ConnectTimeout):
                    return await self._answer(client, request, url.host)
        raise _failed(url.host, "cannot be reached")

    async def _answer(self, client: httpx.AsyncClient, request: httpx.Request, host: str) -> bytes:
        try:
            response = await client.send(request, stream=True)
            async with contextlib.aclosing(response):
                return await self._body(response, host)
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise
        except httpx.HTTPError:
            raise _failed(host, "broke off its answer") from None

    async def _body(self, response: httpx.Response, host: str) -> bytes:
        """The bytes of the body, as they were sent: nothing is decompressed."""
        if response.has_redirect_location:
            raise _failed(host, f"answered with a redirect ({response.status_code}), which is not followed")
        if response.status_code != 200:
            raise _failed(host, f"answered with status {response.status_code}")
        if response.headers.get("content-encoding", "identity") != "identity":
            raise _failed(host, "packed its answer, although it was told not to")
        most = self._policy.max_bytes
        declared = response.headers.get("content-length", "")
        parts: list[bytes] = []
        num_bytes = int(declared[:20]) if declared.isdecimal() else 0
        if num_bytes <= most:
            num_bytes = 0
            async for part in response.aiter_raw(CHUNK_BYTES):
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > most:
                    break
        if num_bytes > most:
            raise _failed(host, f"answered with more than {most} bytes")
        if not num_bytes:
            raise _failed(host, "answered with an empty file")
        return b"".join(parts)


def _port(url: httpx.URL) -> int:
    """The port of a URL, or its scheme's. Raises KeyError for another scheme, ValueError where there is no host."""
    default = PORTS[url.scheme]
    if not url.raw_host:
        raise ValueError("a URL without a host")
    return url.port or default


def _is_below(host: str, suffix: str) -> bool:
    """Whether a name ends in `.suffix` and has more in front. An address is never below a name."""
    return host.endswith(suffix) and len(host) > len(suffix) and _literal(host) is None


def _literal(host: str) -> _Address | None:
    """The host as an address; None where it is a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def _look_up(host: str, port: int) -> list[_Address]:
    """The addresses of a host, all of them checked.

    Raises:
        RequestError: The host has none, or it is a name and one of its addresses is not public.
    """
    if (literal := _literal(host)) is not None:
        return [literal]  # it was allowed as this very address
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _failed(host, "cannot be found") from None
    addresses = [ipaddress.ip_address(address[0]) for *_, address in found]
    if not all(map(is_public, addresses)):
        raise _failed(host, "has an address that is not public; the operator of the server can allow this address")
    return addresses


def is_public(address: _Address) -> bool:
    """Whether an address is on the internet: not on this machine, not in a private network, and not unassigned."""
    if address.version == 4:
        return address.is_global and not address.is_multicast and not address.is_reserved and address not in _ASSIGNED
    inside = address.ipv4_mapped
    if address in _NAT64:  # networks without IPv4 reach IPv4 addresses in this way
        inside = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if inside is not None:
        return is_public(inside)
    # Addresses of 6to4 and Teredo tunnels contain an IPv4 address too; they are refused, for hardly anybody uses them.
    return address in _UNICAST and address.is_global and address.sixtofour is None and address.teredo is None


def _failed(host: str, what: str) -> RequestError:
    rule = f"the server must be able to fetch the file of a URL, but {quote(host[:80])} {what}"
    return RequestError(f"{rule}; check the URL, or send the file as a data: URL")
