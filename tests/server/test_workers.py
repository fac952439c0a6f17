"""`--front-processes`: a hub and two workers around the scripted engine, whose clients see one server."""

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path

import httpx
import pytest

from jsg.config import ServerConfig
from jsg.server.workers.pool import PATHS, num_workers
from tests.server.battery import VALID
from tests.server.running import LONG_STREAMS, RunningServer, data_of, key
from tests.server.scrape import scrape, scrape_until
from tests.server.test_shutdown import FINISHES, check_cut_short
from tests.server.threads import ServerMaker, ServerThread

NUM, MOST = 2, 3
ALICE, ADMIN = key("alice"), key("root")
FIRST, *OTHERS = [path for path in PATHS if path in LONG_STREAMS]
SHORT = {"text": "ab", "sampling_params": {"max_new_tokens": 4}}


@pytest.fixture(scope="module")
def two(make_server: ServerMaker) -> Iterator[ServerThread]:
    limits = {"front_processes": NUM, "max_requests_per_key": MOST, "shutdown_timeout": 5}
    with make_server(server={**limits, "api_key": ("alice", "bob"), "admin_api_key": "root"}) as made:
        made.http.headers.update(ADMIN)
        yield made


@pytest.fixture
def server(two: ServerThread) -> ServerThread:
    two.reset()
    wait_for_workers(two)
    return two


def wait_for_workers(server: RunningServer) -> None:
    """Waits until all workers take connections and have nothing to do."""
    scrape_until(server.http, lambda result: (result.get("jsg:workers_up"), result.get("jsg:answers_open")) == (NUM, 0))


def pids() -> list[int]:
    """The worker processes of this process."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            is_child = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
            if is_child and b"jsg.server.workers.process" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return sorted(found)


@contextlib.contextmanager
def streaming(server: RunningServer, path: str, **others: object) -> Iterator[HTTPResponse]:
    """A stream on a connection of its own, of which the first line has been read."""
    connection = server.send(path, LONG_STREAMS[path] | others, ALICE)
    with contextlib.closing(connection), connection.getresponse() as response:
        assert response.status == 200, response.read()
        response.readline()
        yield response


def raw(server: RunningServer) -> socket.socket:
    url = server.http.base_url
    return socket.create_connection((url.host, url.port or 80), timeout=60)


class TestOneServer:
    def test_a_connection_may_ask_for_everything(self, server: ServerThread):
        url = server.http.base_url
        with contextlib.closing(HTTPConnection(url.host, url.port or 80, timeout=60)) as connection:
            for _ in range(2):
                for method, path, sent in (
                    ("POST", "/generate", SHORT),
                    ("GET", "/health", None),
                    ("POST", "/v1/grammars", VALID["/v1/grammars"]),
                    ("POST", "/v1/responses", {"input": "ab", "max_output_tokens": 4}),
                    ("POST", "/v1/chat/completions?x=1", {"messages": [{"role": "user", "content": "ab"}]}),
                ):
                    body = None if sent is None else json.dumps(sent)
                    connection.request(method, path, body, {"Content-Type": "application/json", **ALICE})
                    with connection.getresponse() as response:
                        assert (response.status, response.read()[:1]) == (200, b"{"), path

    def test_the_first_line_may_come_in_pieces(self, server: ServerThread):
        for path, status in (("/health", b"200"), ("/v1/completions", b"401")):
            with raw(server) as connection:
                for piece in ("\r\nGE", f"T {path[:4]}", f"{path[4:]} HTTP/1.1\r", "\nHost: localhost\r\n\r\n"):
                    connection.sendall(piece.encode())
                assert connection.recv(64).split()[1] == status

    def test_a_request_for_the_hub_must_not_come_with_another_one(self, server: ServerThread):
        body = json.dumps(SHORT)
        head = "Host: localhost\r\nAuthorization: Bearer alice\r\nContent-Type: application/json\r\nContent-Length:"
        first = f"POST /generate HTTP/1.1\r\n{head} {len(body)}\r\n\r\n{body}"
        with raw(server) as connection:
            connection.sendall(f"{first}GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            got = b""
            while piece := connection.recv(4096):
                got += piece
        assert re.findall(rb"HTTP/1\.1 (\d+)", got) == [b"200", b"421"]

    def test_everything_is_counted_and_named(self, server: ServerThread):
        before = scrape(server.http)
        with streaming(server, "/generate", rid="one"), streaming(server, "/v1/completions"):
            result = scrape_until(server.http, lambda result: result.get("jsg:answers_open") == 2)
            assert result.get("jsg:requests_running") == 2
            assert server.http.post("/abort_request", json={"rid": "one"}, headers=ALICE).status_code == 200
            scrape_until(server.http, lambda result: result.get("jsg:answers_open") == 1)
        result = scrape_until(server.http, lambda result: result.get("jsg:answers_open") == 0)
        assert sum(result.by("jsg:requests_aborted_total", "reason").values()) == 2 + sum(
            before.by("jsg:requests_aborted_total", "reason").values()
        )

    def test_a_key_has_its_limit_in_all_workers_together(self, server: ServerThread):
        with contextlib.ExitStack() as streams:
            for _ in range(MOST):
                streams.enter_context(streaming(server, "/generate"))
            refused = [server.http.post("/generate", json=SHORT, headers=ALICE) for _ in range(NUM)]
            assert [response.status_code for response in refused] == [429] * NUM
            assert f"may have {MOST} answers" in refused[0].json()["error"]["message"]
            assert all(int(response.headers["Retry-After"]) >= 1 for response in refused)
            assert server.http.post("/generate", json=SHORT, headers=key("bob")).status_code == 200
        too_many = SHORT | {"sampling_params": {"n": MOST + 1}}
        assert server.http.post("/generate", json=too_many, headers=ALICE).status_code == 400


class TestDeath:
    @pytest.mark.parametrize("path", [FIRST, *(pytest.param(path, marks=pytest.mark.slow) for path in OTHERS)])
    def test_its_streams_end_with_an_error_and_others_go_on(self, server: ServerThread, path: str):
        before, counted = pids(), scrape(server.http)
        shorter = {"sampling_params": {"max_new_tokens": 300}} if path == "/generate" else {"max_tokens": 300}
        with streaming(server, path, **shorter) as first, streaming(server, path, **shorter) as second:
            os.kill(before[0], signal.SIGKILL)
            # Each stream is whole, or reading it raises IncompleteRead.
            texts = sorted((first.read().decode(), second.read().decode()), key=lambda text: "send it again" in text)
        assert any(finish in texts[0] for finish in FINISHES)
        check_cut_short(path, texts[1].splitlines(), "send it again")
        wait_for_workers(server)
        assert pids() != before
        now = scrape_until(server.http, lambda result: result.get("jsg:requests_running") == 0)
        for name in ("jsg:generation_tokens_total", "jsg:prompt_tokens_total"):
            assert now.get(name) >= counted.get(name)

    @pytest.mark.slow
    def test_a_request_without_a_response_is_answered(self, server: ServerThread):
        before, silent = pids(), raw(server)
        whole = LONG_STREAMS["/v1/chat/completions"] | {"stream": False}
        waiting = [server.send("/v1/chat/completions", whole, ALICE) for _ in range(NUM)]
        server.wait_for_stats(ADMIN, num_running=NUM)
        sending = [raw(server) for _ in range(NUM)]
        for each in sending:
            each.sendall(b"POST /generate HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer alice\r\n")
            each.sendall(b"Content-Type: application/json\r\nContent-Length: 9000\r\n\r\n{")
        time.sleep(0.2)  # the worker reads it
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        for each in sending:
            with each:
                for _ in range(4):
                    each.sendall(b" " * 1000)
                    time.sleep(0.05)
                assert each.recv(64).split()[1] == b"503"
        for connection in waiting:
            with contextlib.closing(connection), connection.getresponse() as response:
                assert response.status == 503
                assert json.loads(response.read())["error"]["type"] == "server_error"
        with silent:  # whose connection the hub serves while no worker is there
            silent.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert silent.recv(64).split()[1] == b"200"
        answered = httpx.post(server.http.base_url.copy_with(path="/generate"), json=SHORT, headers=ALICE, timeout=60)
        assert answered.status_code == 200
        server.wait_for_stats(ADMIN, num_running=0)
        wait_for_workers(server)

    @pytest.mark.slow
    @pytest.mark.parametrize("before", ["GET /health", "POST /generate", "100"])
    def test_later_requests_of_a_connection_are_answered_too(self, server: ServerThread, before: str):
        """One after a request that the hub answered, one that came together with another one, and one after a 100."""
        long = LONG_STREAMS["/generate"] | {"stream": False}
        head = "Host: localhost\r\nAuthorization: Bearer alice\r\nContent-Type: application/json\r\n"
        head += "Expect: 100-continue\r\n" if before == "100" else ""
        first, second = (
            f"POST /generate HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n{body}"
            for body in map(json.dumps, (SHORT, long))
        )
        with raw(server) as connection:
            match before:
                case "100":
                    start, second = second.split("\r\n\r\n")
                    connection.sendall(f"{start}\r\n\r\n".encode())
                case "POST /generate":
                    second = first + second
                case _:
                    connection.sendall(f"{before} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            if before != "POST /generate":
                assert connection.recv(4096).split()[1] in (b"100", b"200")
            connection.sendall(second.encode())
            if before == "POST /generate":
                assert b" 200 OK" in connection.recv(4096)
            server.wait_for_stats(ADMIN, num_running=1)
            for pid in pids():
                os.kill(pid, signal.SIGKILL)
            assert b"HTTP/1.1 503 " in connection.recv(4096)
        wait_for_workers(server)

    def test_a_worker_that_stands_still_gets_no_connection(self, server: ServerThread):
        first, url, num_up = pids()[0], server.http.base_url, NUM
        os.kill(first, signal.SIGSTOP)
        try:
            while num_up == NUM:
                with contextlib.suppress(httpx.TimeoutException), httpx.Client(base_url=url, timeout=2) as new:
                    num_up = scrape(new, ADMIN).get("jsg:workers_up")
            for _ in range(3 * NUM):
                assert httpx.post(url.copy_with(path="/generate"), json=SHORT, headers=ALICE).status_code == 200
        finally:
            os.kill(first, signal.SIGCONT)
        wait_for_workers(server)


@pytest.mark.slow
def test_an_end_in_order(server: ServerThread, make_server: ServerMaker):
    others = {*pids()}
    with make_server(server={"front_processes": NUM, "shutdown_timeout": 0.5}) as ending:
        wait_for_workers(ending)
        with streaming(ending, "/v1/completions") as stream:
            ending.terminate()
            lines = stream.read().decode().splitlines()
            assert "shutting down" in json.dumps(data_of(lines)[-1])
        assert ending.join() is None
        assert {*pids()} == others


@pytest.mark.parametrize(
    ("given", "dp_size", "cores", "num"),
    [(None, 1, 64, 0), (None, 8, 64, 4), (None, 8, 16, 2), (1, 8, 64, 0), (3, 1, 2, 3)],
)
def test_how_many(monkeypatch: pytest.MonkeyPatch, given: int | None, dp_size: int, cores: int, num: int):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert num_workers(ServerConfig(front_processes=given, dp_size=dp_size)) == num
