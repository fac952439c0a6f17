"""What a client may do with one connection: raw sockets against the protocol, with short times and a small app."""

import asyncio
import contextlib
import http.client
import io
import json
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from jsg.server.http.http_protocol import SPARE_FILES, HttpLimits, http_protocol, most_connections
from tests.server.running import RunningServer
from tests.server.threads import ServerMaker

DEADLINE_S = 10
PATIENT = HttpLimits(head_s=30, body_s=30, body_idle_s=30)
HASTY = HttpLimits(head_s=0.8, body_s=1.6, body_idle_s=0.8, write_s=0.5)
GET = b"GET /size HTTP/1.1\r\nHost: a\r\n\r\n"


def post(path: str, *headers: str, body: bytes = b"") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode() + body


async def size(request: Request) -> Response:
    return Response(json.dumps({"bytes": len(await request.body())}), media_type="application/json")


async def where(request: Request) -> Response:
    path = str(request.url).partition(request.headers["host"])[2]
    return Response(json.dumps({"path": path, "host": request.headers["host"]}), media_type="application/json")


async def early(_request: Request) -> Response:
    return Response('{"early": true}', 413, media_type="application/json")


async def endless(_request: Request) -> Response:
    async def pieces():
        while True:
            yield b"x" * 2**16
            await asyncio.sleep(0)

    return StreamingResponse(pieces())


@contextlib.contextmanager
def serve(limits: HttpLimits) -> Iterator[int]:
    """The port of a server with these limits."""
    routes = [Route(path, size, methods=["GET", "POST"]) for path in ("/size", "/v1/completions", "/v1/messages")]
    routes += [Route(path, where) for path in ("/", "/where")]
    app = Starlette(routes=[*routes, Route("/early", early, methods=["POST"]), Route("/endless", endless)])
    config = uvicorn.Config(
        app, http=http_protocol(limits), log_config=None, lifespan="off", ws="none", timeout_keep_alive=1
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield listener.getsockname()[1]
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def patient_port() -> Iterator[int]:
    with serve(PATIENT) as port:
        yield port


@pytest.fixture(scope="module")
def hasty_port() -> Iterator[int]:
    with serve(HASTY) as port:
        yield port


class Client:
    """A socket, and what it has read ahead."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._reader = connected.makefile("rb")

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def has_answer(self, wait_s: float = 0.0) -> bool:
        return bool(select.select([self.socket], [], [], wait_s)[0])

    def answer(self) -> "Answer":
        return Answer(self._reader)

    def is_closed(self) -> bool:
        """Whether the server ends the connection; waits for it."""
        try:
            return self._reader.read(1) == b""
        except ConnectionResetError:
            return True


class Answer:
    def __init__(self, reader: io.BufferedReader) -> None:
        response = http.client.HTTPResponse(_Kept(reader))  # type: ignore[arg-type]
        response.begin()
        self.status, self.headers, self.content = response.status, response.headers, response.read()

    @property
    def json(self) -> dict:
        return json.loads(self.content)


class _Kept:
    """A socket for `HTTPResponse`. Bytes that it reads ahead stay with the client."""

    def __init__(self, reader: io.BufferedReader) -> None:
        self._reader = reader

    def makefile(self, _mode: str) -> "_Kept":
        return self

    def close(self) -> None:
        pass

    def flush(self) -> None:
        pass

    def __getattr__(self, name: str):
        return getattr(self._reader, name)


@contextlib.contextmanager
def connect(port: int) -> Iterator[Client]:
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connected:
        yield Client(connected)


@pytest.fixture
def client(patient_port: int) -> Iterator[Client]:
    with connect(patient_port) as made:
        yield made


@pytest.fixture
def hasty(hasty_port: int) -> Iterator[Client]:
    """A client of the server that waits for nothing long."""
    with connect(hasty_port) as made:
        yield made


def assert_refused(client: Client, status: int, *said: str) -> Answer:
    answer = client.answer()
    assert answer.status == status, answer.content
    assert answer.headers["connection"] == "close" and answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    message = answer.json["error"]["message"]
    for words in said:
        assert words in message
    assert client.is_closed()
    return answer


def test_an_ordinary_connection_serves_one_request_after_the_other(client):
    for body in (b"abc", b"", b"x" * 300_000):
        client.send(post("/size", f"Content-Length: {len(body)}", body=body))
        assert client.answer().json == {"bytes": len(body)}


def test_pipelined_requests_are_answered_in_order(client):
    client.send(b"".join(post("/size", f"Content-Length: {n}", body=b"x" * n) for n in (3, 1, 2)) + GET)
    assert [client.answer().json["bytes"] for _ in range(4)] == [3, 1, 2, 0]


def test_a_connection_without_another_request_is_closed(client):
    client.send(GET)
    assert client.answer().status == 200 and client.is_closed()


class TestHead:
    @pytest.mark.parametrize(
        "head",
        [
            b"nonsense\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET /size HTTP/1.1\r\n\r\n",
            b"GET /size HTTP/9\r\nHost: a\r\n\r\n",
            b"GET /size HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n",
            b"GET /size HTTP/1.1\r\nHost: a\r\nname : space\r\n\r\n",
            b"GET /size HTTP/1.1\r\nHost: a\r\nnul: \0\r\n\r\n",
            b"GET /s ize HTTP/1.1\r\nHost: a\r\n\r\n",
            b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        ],
        ids=["words", "TLS", "no host", "version", "no colon", "space", "NUL", "path", "bytes"],
    )
    def test_what_is_no_http_is_refused(self, client, head):
        client.send(head)
        assert_refused(client, 400, "HTTP/1.1")

    @pytest.mark.parametrize("head", [b"GET /size HTTP/2.0\r\nHost: a\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
    def test_another_version_is_refused(self, client, head):
        client.send(head)
        assert_refused(client, 505, "HTTP/1.1")

    def test_a_refusal_quotes_no_python(self, client):
        client.send(b"GET /size\r\n\r\n")
        assert "bytearray" not in assert_refused(client, 400, "illegal request line").json["error"]["message"]

    def test_empty_lines_before_a_request_are_ignored(self, client):
        client.send(b"\r\n\r\n" + GET + b"\r\n" + GET + b"\r")
        client.send(b"\n" + post("/size", "Content-Length: 3", body=b"\r\na") + b"\n\n")
        client.send(GET)
        assert [client.answer().json["bytes"] for _ in range(4)] == [0, 0, 3, 0]

    @pytest.mark.parametrize(
        ("target", "path", "host"),
        [
            (b"http://a.example:80/where?q=/#", "/where?q=/#", "a.example:80"),
            (b"HTTPS://a.example", "/", "a.example"),
            (b"http://a.example?q", "/?q", "a.example"),
            (b"/where?u=http://b/", "/where?u=http://b/", "b"),
        ],
    )
    def test_a_target_may_be_a_whole_url(self, client, target, path, host):
        """Its host counts, and not the header's (RFC 9112 §3.2.2)."""
        client.send(b"GET " + target + b" HTTP/1.1\r\nHost: b\r\n\r\n")
        assert client.answer().json == {"path": path, "host": host}

    def test_headers_of_5_mb_are_refused_while_they_come(self, client):
        client.send(b"GET /size HTTP/1.1\r\nHost: a\r\nx: ")
        send_until_answered(client, b"a" * 2**16, 5 * 2**20)
        assert_refused(client, 431, "65536 bytes")

    def test_a_long_head_in_one_piece_is_refused(self, client):
        client.send(post("/v1/completions", "x: " + "a" * 66_000, "Content-Length: 0"))
        error = assert_refused(client, 431, "65536 bytes").json["error"]
        assert error["type"] == "invalid_request_error"

    @pytest.mark.parametrize(("count", "status"), [(98, 200), (300, 431)])
    def test_headers_are_counted(self, client, count, status):
        client.send(post("/size", "Content-Length: 0", *(f"x{i}: a" for i in range(count))))
        if status == 200:
            assert client.answer().status == 200
        else:
            assert_refused(client, 431, "at most 100 headers, but got 302")

    def test_a_slow_head_is_refused(self, hasty):
        started = time.monotonic()
        hasty.send(b"GET /size HTTP/1.1\r\n")
        drip(hasty, b"x: 1\r\n")
        assert_refused(hasty, 408, "0.8 s")
        assert time.monotonic() - started > 0.7

    def test_a_slow_head_after_an_answer_is_refused(self, hasty):
        hasty.send(GET)
        assert hasty.answer().status == 200
        hasty.send(b"GET /size HT")
        assert_refused(hasty, 408)

    def test_a_pipelined_half_of_a_head_is_refused(self, hasty):
        hasty.send(GET + b"GET /size HT")
        assert hasty.answer().status == 200
        assert_refused(hasty, 408)

    def test_half_a_head_and_an_end_is_refused(self, client):
        client.send(b"GET /size HT")
        client.end()
        assert_refused(client, 400)

    def test_a_connection_without_a_byte_is_closed(self, hasty):
        assert hasty.is_closed()

    @pytest.mark.parametrize("path", ["/size", "/v1/completions", "/v1/messages"])
    def test_the_refusal_has_the_form_of_the_api(self, client, path):
        client.send(post(path, "Content-Length: 1", "Transfer-Encoding: chunked"))
        body = assert_refused(client, 400, "Content-Length or Transfer-Encoding").json
        native = {"error", "object", "message", "code"}
        forms = {"/size": native, "/v1/completions": {"error"}, "/v1/messages": {"type", "error", "request_id"}}
        assert set(body) == forms[path] and ("param" in body["error"]) == (path == "/v1/completions")

    def test_a_websocket_is_refused(self, client):
        head = b"GET /size HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
        client.send(head)
        assert_refused(client, 400, "websockets")

    def test_other_upgrades_are_not_taken(self, client):
        client.send(b"GET /size HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n")
        assert client.answer().status == 200


class TestBody:
    @pytest.mark.parametrize("length", ["-1", "1.5", "", "abc", "0x10", "+3", "3, 4", "9" * 30])
    def test_a_length_that_is_none_is_refused(self, client, length):
        client.send(post("/size", f"Content-Length: {length}", body=b"abc"))
        assert_refused(client, 400, "Content-Length")

    def test_two_lengths_are_refused(self, client):
        client.send(post("/size", "Content-Length: 3", "Content-Length: 4", body=b"abc"))
        assert_refused(client, 400, "Content-Length")

    def test_other_codings_are_refused(self, client):
        client.send(post("/size", "Transfer-Encoding: gzip, chunked"))
        assert_refused(client, 400, "chunked")

    def test_old_http_has_no_chunks(self, client):
        client.send(b"POST /size HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")
        assert_refused(client, 400, "Content-Length")

    def test_less_than_was_said_is_refused(self, client):
        client.send(post("/size", "Content-Length: 10", body=b"abc"))
        client.end()
        assert_refused(client, 400, "received 3 bytes, expected 10")

    def test_what_is_more_than_was_said_is_another_request(self, client):
        client.send(post("/size", "Content-Length: 3", body=b"abcdef\r\n\r\n"))
        assert client.answer().json == {"bytes": 3}
        assert_refused(client, 400)

    @pytest.mark.parametrize("chunk", [b"zz\r\nabc\r\n", b"-3\r\nabc\r\n", b"3\r\nabcdef", b"f" * 40 + b"\r\n"])
    def test_a_malformed_chunk_is_refused(self, client, chunk):
        client.send(post("/size", "Transfer-Encoding: chunked", body=chunk))
        assert_refused(client, 400)

    def test_a_body_that_stops_is_refused(self, hasty):
        hasty.send(post("/v1/completions", "Content-Length: 10", body=b"abc"))
        assert_refused(hasty, 408, "never pause for 0.8 s")

    def test_a_body_that_drips_is_refused(self, hasty):
        hasty.send(post("/size", "Content-Length: 10000"))
        drip(hasty, b"a")
        assert_refused(hasty, 408, "within 1.6 s")

    def test_a_million_tiny_chunks_are_refused_early(self, client):
        client.send(post("/size", "Transfer-Encoding: chunked"))
        send_until_answered(client, b"1\r\na\r\n" * 1000, 6_000_000)
        assert_refused(client, 400, "64 bytes or more on average")

    def test_chunks_of_usual_size_are_taken(self, client):
        chunk = b"64\r\n" + b"a" * 100 + b"\r\n"
        client.send(post("/size", "Transfer-Encoding: chunked", body=chunk * 5000 + b"0\r\n\r\n"))
        assert client.answer().json == {"bytes": 500_000}

    def test_an_answer_before_the_body_ends_the_connection_and_is_not_lost(self, client):
        client.send(post("/early", f"Content-Length: {300 * 2**20}"))
        send_until_answered(client, b"a" * 2**16, 50 * 2**20)
        for _ in range(10):
            client.send(b"a" * 2**16)  # a client that first sends and then reads is not reset
        answer = client.answer()
        assert (answer.status, answer.json) == (413, {"early": True})
        assert answer.headers["connection"] == "close"
        assert client.is_closed()

    def test_a_client_that_waits_for_100_is_told_to_go_on(self, client):
        client.send(post("/size", "Content-Length: 3", "Expect: 100-continue"))
        assert client.socket.recv(100).startswith(b"HTTP/1.1 100")
        client.send(b"abc")
        assert client.answer().json == {"bytes": 3}


def test_a_client_that_never_reads_is_dropped(hasty):
    hasty.send(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
    deadline = time.monotonic() + DEADLINE_S
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while time.monotonic() < deadline:
            hasty.send(b"x")
            time.sleep(0.05)
    assert time.monotonic() < deadline


@pytest.fixture
def crowded_port() -> Iterator[int]:
    with serve(HttpLimits(connections=4)) as port:
        yield port


def test_the_longest_idle_connection_gives_way(crowded_port: int, caplog: pytest.LogCaptureFixture):
    """Silent, with half a head, between two requests, and refused: all are closed before one that is served."""
    with contextlib.ExitStack() as stack:

        def new(sends: bytes = b"") -> Client:
            client = stack.enter_context(connect(crowded_port))
            client.send(sends)
            return client

        busy = new(post("/size", "Content-Length: 3"))
        idle = [new(), new(b"GET /si"), new(GET)]
        assert idle[2].answer().status == 200
        for each in idle:
            later = new(GET)
            assert each.is_closed() and later.answer().status == 200
        refused = new(b"?\r\n\r\n")
        assert refused.answer().status == 400
        assert [new(GET).answer().status for _ in range(10)] == [200] * 10
        busy.send(b"abc")
        assert busy.answer().json == {"bytes": 3}
    assert caplog.text.count("all 4 connections are taken") == 1


def test_where_none_is_idle_another_connection_is_refused(crowded_port: int):
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(crowded_port)) for _ in range(4)]
        for each in clients:
            each.send(post("/size", "Content-Length: 3", "Expect: 100-continue"))
            assert each.socket.recv(100).startswith(b"HTTP/1.1 100")
        with connect(crowded_port) as one_more:
            one_more.send(GET)
            assert_refused(one_more, 503, "connections")
        for each in clients:
            each.send(b"abc")
            assert each.answer().json == {"bytes": 3}
        with connect(crowded_port) as later:
            later.send(GET)
            assert later.answer().status == 200


def test_the_front_has_these_limits(server: RunningServer):
    with connect(server.http.base_url.port or 0) as client:
        client.send(post("/v1/messages", *(f"x{i}: a" for i in range(300))))
        error = assert_refused(client, 431, "at most 100 headers").json
        assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")


def drip(client: Client, piece: bytes) -> None:
    """Sends pieces until the server answers."""
    deadline = time.monotonic() + DEADLINE_S
    while not client.has_answer(0.05):
        assert time.monotonic() < deadline
        client.send(piece)


def send_until_answered(client: Client, piece: bytes, total: int) -> int:
    """Sends `total` bytes, or fewer when the server answers or takes no more."""
    sent = 0
    with contextlib.suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
        while sent < total and not client.has_answer():
            client.send(piece)
            sent += len(piece)
    return sent


def test_a_refused_client_that_stays_does_not_spoil_the_end(make_server: ServerMaker):
    with make_server(server={"shutdown_timeout": 600}) as server:
        url = server.http.base_url
        with contextlib.closing(socket.create_connection((url.host, url.port), DEADLINE_S)) as connection:
            client = Client(connection)
            client.send(b"GET /health HTTP/1.1\r\nHost: a\r\n" + b"x: 1\r\n" * 200 + b"\r\n")
            assert client.answer().status == 431
            server.terminate()
            assert server.join() is None


def test_connections_of_two_kinds_share_the_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (2000, 2000))
    one, each = most_connections(), most_connections(2)
    assert 1000 < one < 2000 - SPARE_FILES
    assert 2 * each in (one, one - 1)
