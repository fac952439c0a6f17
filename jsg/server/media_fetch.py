"""Files from `http` and `https` URLs that clients name: only from hosts that whoever runs the server has allowed.

A server that opens what strangers name can be sent into the network that it stands in. So: the host must be allowed;
its addresses are looked up once, every one is checked, and the very address that was checked is connected to, whatever
the name means a moment later; a redirect is an error; no proxy, cookie, key or password goes along; size and time are
bounded while reading. What comes back is a file like any other: its bytes decide its type.
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

from jsg.checks import quote
from jsg.errors import ConfigError, RequestError

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
    """From where files are fetched, and how much of them.

    Attributes:
        allowed_hosts: Each `host` or `host:port`, without a port the scheme's own: a name; a name with a dot in front,
            for every name below it but not itself; or an address, IPv6 in brackets. A private address is only ever
            connected to where it stands here itself: a name that leads to one is refused.
        max_bytes: Of one file.
        timeout_s: Seconds for one file, the look-up of its host included.

    Raises:
        ConfigError: A host is not written so, or a limit is below its least.
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
    """Fetches files as one policy allows. Any number of tasks may use it; no connection outlives its file."""

    def __init__(self, policy: FetchPolicy, ssl_context: ssl.SSLContext | None = None):
        """`ssl_context` says whom https trusts; by default those that httpx trusts, without the environment's."""
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
                "this server fetches no URLs; send the file as a data: URL, or start the server with hosts allowed"
            )
        target = self._checked(url)
        try:
            async with asyncio.timeout(self._policy.timeout_s):
                addresses = await _look_up(target.raw_host.decode("ascii"), _port(target))
                return await self._read(target, addresses)
        except TimeoutError:
            raise RequestError(
                f"fetching a URL may take at most {self._policy.timeout_s:g} s, but {target.host} takes longer; send "
                "the file as a data: URL"
            ) from None

    def _checked(self, url: str) -> httpx.URL:
        """The URL as it will be asked for: what is checked and what is asked come from one reading of it."""
        if len(url) > MAX_URL_LENGTH:
            raise RequestError(f"a URL may have at most {MAX_URL_LENGTH} characters, but has {len(url)}; shorten it")
        try:
            target = httpx.URL(url)
            port = _port(target)
        except (httpx.InvalidURL, ValueError, KeyError):
            raise RequestError(
                f"a URL must begin with https:// or http:// and a host, but got {quote(url[:80])}"
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
        """What the first address that can be reached answers."""
        # `fetch` watches the time; but an address that swallows what is sent to it leaves some for the next.
        timeout = httpx.Timeout(None, connect=self._policy.timeout_s / (len(addresses) + 1))
        # A client of its own, so no cookie and no connection of one file serves another.
        options = {"trust_env": False, "follow_redirects": False, "timeout": timeout}
        async with httpx.AsyncClient(verify=self._ssl, **options) as client:
            for address in addresses:
                # The name stays where the far side looks: in the Host header and in the certificate.
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
        """The bytes as they come: nothing is unpacked."""
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
    """The port of a URL, written or not. Raises KeyError where its scheme is another, ValueError without a host."""
    default = PORTS[url.scheme]
    if not url.raw_host:
        raise ValueError("a URL without a host")
    return url.port or default


def _is_below(host: str, suffix: str) -> bool:
    """Whether a name ends in `.suffix` and has more in front. An address is below nothing."""
    return host.endswith(suffix) and len(host) > len(suffix) and _literal(host) is None


def _literal(host: str) -> _Address | None:
    """The address that a host is, where it is no name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


async def _look_up(host: str, port: int) -> list[_Address]:
    """The addresses of a host, all of them checked.

    Raises:
        RequestError: It has none, or it is a name and one of them is not public.
    """
    if (literal := _literal(host)) is not None:
        return [literal]  # only an entry that is this very address lets it come here
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise _failed(host, "cannot be found") from None
    addresses = [ipaddress.ip_address(address[0]) for *_, address in found]
    if not all(map(is_public, addresses)):
        raise _failed(host, "leads to an address that is not public; whoever runs the server can allow that address")
    return addresses


def is_public(address: _Address) -> bool:
    """Whether an address belongs to the internet, and not to this machine, its network or no one at all."""
    if address.version == 4:
        return address.is_global and not address.is_multicast and not address.is_reserved and address not in _ASSIGNED
    inside = address.ipv4_mapped
    if address in _NAT64:  # how networks without IPv4 reach all of it
        inside = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    if inside is not None:
        return is_public(inside)
    # Tunnels carry an IPv4 address too, and hardly anybody has one by now.
    return address in _UNICAST and address.is_global and address.sixtofour is None and address.teredo is None


def _failed(host: str, what: str) -> RequestError:
    rule = f"the file of a URL must be there to be fetched, but {quote(host[:80])} {what}"
    return RequestError(f"{rule}; check the URL, or send the file as a data: URL")
