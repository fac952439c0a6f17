"""Files from URLs, against a real server on this machine: only from allowed hosts, and never without a limit."""

import asyncio
import ipaddress
import shutil
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable

import anyio
import pytest

from jsg.errors import ConfigError, RequestError
from jsg.server import media_fetch
from jsg.server.media_fetch import FetchPolicy, MediaFetcher, is_public

FILE = bytes(range(256)) * 400
NAME = "media.test"
NO_TRUST = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # quickly made: it knows no authorities

ANSWERS: dict[str, bytes] = {
    "/file": b"200 OK\r\nContent-Type: text/html\r\nContent-Length: %d\r\n\r\n" % len(FILE) + FILE,
    "/chunks": b"200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"2\r\nab\r\n" + b"3\r\ncde\r\n0\r\n\r\n",
    "/endless": b"200 OK\r\n\r\n" + FILE * 20,
    "/lie": b"200 OK\r\nContent-Length: 999999999\r\n\r\nab",
    "/short": b"200 OK\r\nContent-Length: 10\r\n\r\nab",
    "/empty": b"200 OK\r\nContent-Length: 0\r\n\r\n",
    "/packed": b"200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab",
    "/redirect": b"302 Found\r\nLocation: /file\r\nContent-Length: 0\r\n\r\n",
    "/unchanged": b"304 Not Modified\r\nLocation: /file\r\n\r\n",
    "/cookie": b"200 OK\r\nSet-Cookie: secret=1\r\nContent-Length: 2\r\n\r\nab",
    "/gone": b"404 Not Found\r\nContent-Length: 4\r\n\r\ngone",
    "/noise": b"\x00\x01",
    "/headers": b"200 OK\r\n" + b"X: %s\r\n" % (b"y" * 200_000) + b"\r\n",
}


class Far:
    """A server at some port of this machine, and what it was asked."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[bytes] = []

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.requests.append(head)
        path = head.split()[1].decode()
        if path == "/silence":
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 " + ANSWERS[path])
        writer.close()


def _with_server[T](use: Callable[[Far], Awaitable[T]], ssl_context: ssl.SSLContext | None = None) -> tuple[T, Far]:
    async def run() -> tuple[T, Far]:
        far = Far()
        async with await asyncio.start_server(far.answer, "127.0.0.1", ssl=ssl_context) as server:
            far.port = server.sockets[0].getsockname()[1]
            return await use(far), far

    return asyncio.run(run())


def _fetch(path: str, **limits) -> tuple[bytes, Far]:
    def use(far: Far) -> Awaitable[bytes]:
        policy = FetchPolicy(allowed_hosts=(f"127.0.0.1:{far.port}",), **limits)
        return MediaFetcher(policy, NO_TRUST).fetch(f"http://127.0.0.1:{far.port}{path}")

    return _with_server(use)


def _fetch_by_name(*, url: str = "http://{name}:{port}/file", ssl_contexts=(None, None), **limits) -> tuple[bytes, Far]:
    def use(far: Far) -> Awaitable[bytes]:
        policy = FetchPolicy(allowed_hosts=(f"{NAME}:{far.port}",), **limits)
        return MediaFetcher(policy, ssl_contexts[1] or NO_TRUST).fetch(url.format(name=NAME, port=far.port))

    return _with_server(use, ssl_contexts[0])


@pytest.fixture
def names(monkeypatch) -> dict[str, list[str]]:
    """Name → its addresses; each look-up takes the first away, until one is left, as a name server may do."""
    table: dict[str, list[str]] = {}
    asked = table.setdefault("asked", [])

    def look_up(host, port, *args, **kwargs):
        asked.append(host)
        if host not in table:
            raise socket.gaierror("no such name")
        found = table[host].pop(0) if len(table[host]) > 1 else table[host][0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found.split()]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return table


def test_a_file_is_fetched_whatever_its_type_is_said_to_be():
    data, far = _fetch("/file")
    assert data == FILE
    assert _fetch("/chunks")[0] == b"abcde"
    assert far.requests[0].startswith(b"GET /file HTTP/1.1\r\n")
    assert f"host: 127.0.0.1:{far.port}\r\n".encode() in far.requests[0].lower()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/endless", "more than 200000 bytes"),
        ("/lie", "more than 200000 bytes"),
        ("/short", "broke off"),
        ("/empty", "empty file"),
        ("/packed", "packed its answer"),
        ("/redirect", r"a redirect \(302\), which is not followed"),
        ("/unchanged", "answered with status 304"),
        ("/gone", "answered with status 404"),
        ("/noise", "broke off"),
        ("/headers", "broke off"),
    ],
)
def test_an_answer_that_is_no_file_is_refused(path, message):
    with pytest.raises(RequestError, match=message):
        _fetch(path, max_bytes=200_000)


def test_a_file_of_just_the_size_allowed():
    assert _fetch("/file", max_bytes=len(FILE))[0] == FILE
    with pytest.raises(RequestError, match="more than"):
        _fetch("/file", max_bytes=len(FILE) - 1)


def test_silence_ends_when_the_time_is_up():
    with pytest.raises(RequestError, match=r"must be fetched within 0\.2 s"):
        _fetch("/silence", timeout_s=0.2)


def test_nothing_goes_along(monkeypatch, tmp_path):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login someone password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))

    async def use(far: Far) -> None:
        fetcher = MediaFetcher(FetchPolicy(allowed_hosts=(f"127.0.0.1:{far.port}",)), NO_TRUST)
        for path in ("/cookie", "/cookie"):
            await fetcher.fetch(f"http://127.0.0.1:{far.port}{path}")

    _, far = _with_server(use)
    assert len(far.requests) == 2
    assert not any(word in request.lower() for request in far.requests for word in (b"cookie:", b"authorization:"))


def test_without_hosts_nothing_is_fetched():
    with pytest.raises(RequestError, match="this server allows none"):
        asyncio.run(MediaFetcher(FetchPolicy(), NO_TRUST).fetch("http://127.0.0.1/"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://other.test/a", "'other.test' at port 80 is not"),
        ("http://good.test:81/a", "port 81 is not"),
        ("https://good.test:80/a", "port 80 is not"),
        ("http://good.test.evil.test/a", "is not"),
        ("http://xgood.test/a", "is not"),
        ("http://below.test/a", "is not"),
        ("http://evilbelow.test/a", "is not"),
        ("http://good.test./a", "is not"),
        ("http://127.0.0.1/a", "is not"),
        ("http://10.0.0.1/a", "is not"),
        ("http://[::1]/a", "is not"),
        ("http://2130706433/a", "is not"),
        ("http://good.test@evil.test/a", "no user and no password"),
        ("http://user:word@good.test/a", "no user and no password"),
        ("http://evil.test\\@good.test/a", "no user and no password"),
        ("http://evil.test#@good.test/a", "is not"),
        ("file:///etc/passwd", "must begin with https"),
        ("ftp://good.test/a", "must begin with https"),
        ("data:;base64,AAEC", "must begin with https"),
        ("//good.test/a", "must begin with https"),
        ("good.test/a", "must begin with https"),
        ("http:///a", "must begin with https"),
        ("http://good.test:99999/a", "port 99999 is not"),
        ("http://good.test/\x00", "must begin with https"),
        ("http://good.test/" + "a" * 9000, "at most 8192 characters"),
    ],
)
def test_other_urls_are_refused_before_anything_is_looked_up(url, message, names):
    fetcher = MediaFetcher(FetchPolicy(allowed_hosts=("good.test", ".below.test", ".0.0.1")), NO_TRUST)
    with pytest.raises(RequestError, match=message):
        asyncio.run(fetcher.fetch(url))
    assert names["asked"] == []


def test_the_list_of_hosts():
    policy = FetchPolicy(allowed_hosts=("good.test", ".below.test", "port.test:8080", "[2001:db8::1]", "[::1]:90"))
    for host, port, default in (
        ("good.test", 443, 443),
        ("a.below.test", 80, 80),
        ("a.b.below.test", 80, 80),
        ("port.test", 8080, 80),
        ("2001:db8::1", 80, 80),
        ("::1", 90, 80),
    ):
        assert policy.allows(host, port, default)
    for host, port, default in (
        ("port.test", 80, 80),
        ("::1", 80, 80),
        ("2001:db8::1", 90, 80),
        ("good.test", 80, 443),
    ):
        assert not policy.allows(host, port, default)


@pytest.mark.parametrize("host", ["", ".", "http://a.test", "a.test/", "A.test", "*.a.test", "a.test:", "::1", "a b"])
def test_a_host_that_is_not_written_so_is_refused(host):
    with pytest.raises(ConfigError, match="an allowed media host must be"):
        FetchPolicy(allowed_hosts=(host,))


@pytest.mark.parametrize("addresses", ["127.0.0.1", "93.184.215.14 10.0.0.1"])
def test_a_name_that_leads_to_a_private_address_is_refused(addresses, names):
    names[NAME] = [addresses]
    with pytest.raises(RequestError, match="has an address that is not public") as error:
        _fetch_by_name()
    assert not any(address in str(error.value) for address in addresses.split())


def test_the_address_that_was_checked_is_the_one_connected_to(names, monkeypatch):
    """A name server that answers with another address the second time is never asked a second time."""
    names[NAME] = ["127.0.0.1", "127.0.0.2"]
    checked: list[str] = []
    monkeypatch.setattr(media_fetch, "is_public", lambda address: checked.append(str(address)) or True)
    data, far = _fetch_by_name()
    assert data == FILE
    assert checked == ["127.0.0.1"] and names["asked"] == [NAME]
    assert f"host: {NAME}:{far.port}\r\n".encode() in far.requests[0].lower()


def test_the_next_address_is_tried_where_one_cannot_be_reached(names, monkeypatch):
    names[NAME] = ["127.0.0.2 127.0.0.1"]  # nobody listens at the first
    monkeypatch.setattr(media_fetch, "is_public", lambda address: True)
    assert _fetch_by_name()[0] == FILE
    names[NAME] = ["127.0.0.2"]
    with pytest.raises(RequestError, match="cannot be reached"):
        _fetch_by_name()


def test_an_address_that_swallows_everything_leaves_time_for_the_next(names, monkeypatch):
    names[NAME] = ["127.0.0.2 127.0.0.1"]
    monkeypatch.setattr(media_fetch, "is_public", lambda address: True)
    connect = anyio.connect_tcp

    async def swallow(remote_host, *args, **kwargs):
        if remote_host == "127.0.0.2":
            await asyncio.sleep(60)
        return await connect(remote_host, *args, **kwargs)

    monkeypatch.setattr(anyio, "connect_tcp", swallow)
    assert _fetch_by_name(timeout_s=0.6)[0] == FILE
    names[NAME] = ["127.0.0.2"]
    with pytest.raises(RequestError, match="cannot be reached"):
        _fetch_by_name(timeout_s=0.3)


def test_a_name_that_nobody_has_is_refused(names):
    with pytest.raises(RequestError, match=f"'{NAME}' cannot be found"):
        _fetch_by_name()


@pytest.mark.parametrize("certified", [NAME, "other.test"])
def test_a_certificate_is_of_the_name_and_not_of_the_address(certified, names, monkeypatch, tmp_path):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        [
            *"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2".split(),
            *("-subj", f"/CN={certified}", "-addext", f"subjectAltName=DNS:{certified}"),
            *("-keyout", key, "-out", certificate),
        ],
        check=True,
        capture_output=True,
    )
    names[NAME] = ["127.0.0.1"]
    monkeypatch.setattr(media_fetch, "is_public", lambda address: True)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(certificate, key)
    contexts = serving, ssl.create_default_context(cafile=certificate)
    url = "https://{name}:{port}/file"
    if certified == NAME:
        assert _fetch_by_name(url=url, ssl_contexts=contexts)[0] == FILE
    else:
        with pytest.raises(RequestError, match="cannot be reached"):
            _fetch_by_name(url=url, ssl_contexts=contexts)


@pytest.mark.parametrize(
    "address",
    "0.0.0.0 0.1.2.3 10.1.2.3 100.64.0.1 127.0.0.1 127.8.8.8 169.254.169.254 172.16.0.1 172.31.255.255 192.0.0.8 "
    "192.0.2.1 192.168.1.1 198.18.0.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 :: ::1 fe80::1 fe80::1%eth0 "
    "fc00::1 fd00:ec2::254 fec0::1 ff02::1 2001:db8::1 2002:7f00:1:: 2001:0:1::1 ::ffff:10.0.0.1 ::ffff:127.0.0.1 "
    "::127.0.0.1 64:ff9b::10.0.0.1 64:ff9b::7f00:1 64:ff9b:1::1 100::1".split(),
)
def test_addresses_that_belong_to_no_stranger(address):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", "1.1.1.1 93.184.215.14 2606:4700::1111 64:ff9b::1.1.1.1 ::ffff:1.1.1.1".split())
def test_addresses_of_the_internet(address):
    assert is_public(ipaddress.ip_address(address))
