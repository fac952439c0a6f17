"""What a front does with replicas that answer, refuse and break. They are scripted sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from jsg.ray.relay import Lease, NoReplicaError, Relay

WHOLE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\nX-Own: 1\r\n\r\n" + b'{"answer": 1}'
)
CUT = WHOLE[:-4]
REFUSAL = b"HTTP/1.1 503 Busy\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = {"model": "tiny", "prompt": "hello"}


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


class Replicas:
    """Replicas by name, each with the bytes that it answers before it closes the connection; None is a dead one.

    Attributes:
        requests: What each was sent, in order.
        begun, released: How many leases began an answer, and how many have ended.
    """

    def __init__(self, **scripts: bytes | None) -> None:
        self.scripts = scripts
        self.requests: list[tuple[str, bytes]] = []
        self.begun = 0
        self.released = 0
        self.num_tokens = 0
        self._urls: dict[str, str] = {}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            for name, script in self.scripts.items():
                server = await asyncio.start_server(self._answering(name, script or b""), "127.0.0.1", 0)
                port = server.sockets[0].getsockname()[1]
                self._urls[name] = f"http://127.0.0.1:{port}"
                if script is None:
                    server.close()
                    await server.wait_closed()
                else:
                    await stack.enter_async_context(server)
            yield

    def _answering(self, name: str, script: bytes) -> Callable[..., Awaitable[None]]:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append((name, head + await reader.readexactly(len(json.dumps(BODY, separators=(",", ":"))))))
            writer.write(script)
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        return answer

    @contextlib.asynccontextmanager
    async def acquire(self, content: bytes, avoid: frozenset[str]) -> AsyncIterator[Lease]:
        names = [name for name in self._urls if name not in avoid] or list(self._urls)
        if not names:
            raise NoReplicaError
        try:
            yield (lease := Lease(self._begin, self._urls[names[0]], names[0]))
            self.num_tokens = lease.num_tokens
        finally:
            self.released += 1

    def _begin(self) -> None:
        self.begun += 1


def ask(replicas: Replicas, path: str = "/v1/completions", wait_s: float = 30) -> httpx.Response:
    async def run() -> httpx.Response:
        async with replicas.running():
            relay = Relay(replicas.acquire, wait_s)

            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                response = await relay.answer(Request(scope, receive))
                await response(scope, receive, send)

            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front") as client:
                response = await client.post(path + "?a=1", json=BODY, headers={"Authorization": "Bearer key"})
            await relay.close()
            return response

    return asyncio.run(run())


def test_request_and_answer_pass_through():
    whole = WHOLE.replace(b": 13", b": 36").replace(b'{"answer": 1}', b'{"usage": {"completion_tokens": 17}}')
    replicas = Replicas(a=whole)
    response = ask(replicas)
    answer = {"usage": {"completion_tokens": 17}}
    assert (response.status_code, response.json(), response.headers["x-own"]) == (200, answer, "1")
    ((_, sent),) = replicas.requests
    assert sent.startswith(b"POST /v1/completions?a=1 HTTP/1.1\r\n")
    assert b"authorization: Bearer key\r\n" in sent and sent.endswith(b'{"model":"tiny","prompt":"hello"}')
    assert (replicas.begun, replicas.released, replicas.num_tokens) == (1, 1, 17)


def test_another_replica_answers_while_nothing_was_sent():
    for broken in (None, b"", CUT, REFUSAL, STREAM):
        replicas = Replicas(a=broken, b=WHOLE)
        assert ask(replicas).json() == {"answer": 1}, broken
        assert (replicas.begun, replicas.released) == (1, 2)


def test_a_request_moves_once():
    replicas = Replicas(a=b"", b=b"", c=WHOLE)
    response = ask(replicas)
    assert response.status_code == 503 and "two replicas ended" in response.json()["error"]["message"]
    assert [name for name, _ in replicas.requests] == ["a", "b"]
    assert ask(Replicas(a=REFUSAL, b=REFUSAL, c=WHOLE)).json() == {}  # the refusal itself


def test_replicas_that_cannot_be_reached_or_shut_down_are_passed_over_as_often_as_the_time_allows():
    ending = REFUSAL.replace(b"Content-Length", b"Connection: close\r\nContent-Length")
    for broken in (None, ending):
        replicas = Replicas(a=broken, b=broken, c=broken, d=WHOLE)
        assert ask(replicas).json() == {"answer": 1}
        assert replicas.released == 4


def test_a_request_fails_where_no_replica_lives():
    response = ask(Replicas(), wait_s=0.05)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["message"].startswith("no replica took the request within 0.05 s")


def test_a_stream_passes_and_one_that_breaks_ends_with_an_error_event():
    events = b'data: {"n": 1}\n\n', b'data: {"n": 2}\n\n'
    replicas = Replicas(a=STREAM + b"".join(map(chunk, events)) + chunk(b""))
    assert ask(replicas).content == b"".join(events)
    assert replicas.num_tokens == len(events)
    replicas = Replicas(a=STREAM + chunk(events[0]) + chunk(events[1][:9]), b=WHOLE)
    first, error, done, rest = ask(replicas).text.split("\n\n")
    assert (first, done, rest) == ('data: {"n": 1}', "data: [DONE]", "")  # and no half event
    assert json.loads(error.removeprefix("data: "))["error"]["message"].endswith("send it again")
    assert (replicas.begun, replicas.released) == (1, 1)


def test_an_error_event_has_the_form_of_its_interface():
    broken = STREAM + chunk(b"event: x\ndata: {}\n\n")
    for path, names in (("/v1/messages", {"type", "error"}), ("/v1/responses", {"type", "message", "param", "code"})):
        _, error, rest = ask(Replicas(a=broken), path).text.split("\n\n")
        name, data = error.split("\n")
        assert (name, rest) == ("event: error", "")
        assert set(json.loads(data.removeprefix("data: "))) == names
        assert json.loads(data.removeprefix("data: "))["type"] == "error"
