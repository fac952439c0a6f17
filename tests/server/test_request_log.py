"""`--log-requests`: a line for each request that generates, true, and without anything secret."""

import asyncio
import datetime
import json
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jsg.constrained.tags.front import structural_tag_grammar
from jsg.errors import GrammarError
from jsg.server.caller import Caller
from jsg.server.telemetry import request_log
from jsg.server.telemetry.exchange import Endpoint, Exchange
from jsg.server.telemetry.quotes import without_quotes
from jsg.server.telemetry.request_log import LogLine, RequestLog
from tests.engine.fake_core import FAILING_TOKEN
from tests.server.mixed_run import MixedRun
from tests.server.running import LONG_STREAMS, RunningServer, events_of
from tests.server.scrape import scrape
from tests.server.threads import ServerMaker

KEYS = ["sesame-open-1", "sesame-open-2"]
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
DEADLINE_S = 10
CHAT, HELLO = "/v1/chat/completions", [{"role": "user", "content": "hello"}]
LONG = {"prompt": "hello", "max_tokens": 10**7}
TOO_LARGE, CHUNKED = "request_header_fields_too_large", b"Transfer-Encoding: chunked\r\n\r\n"
FAILURES: list[tuple[str, dict, int, str, str | None, str]] = [
    ("/generate", {"txet": 1}, 400, "bad_request", "txet", "unknown field …; leave it out, or use one of "),
    (
        "/generate",
        {"text": 7},
        400,
        "bad_request",
        "text",
        "text is not valid: it must be a string or a list, but got 7; ",
    ),
    ("/generate", {"a b": 7}, 400, "bad_request", "…", "unknown field …; leave it out, or use one of "),
    (CHAT, {"model": "x", "messages": HELLO}, 404, "model_not_found", "model", "model must be 'fake', which is served"),
    (CHAT, {"messages": [{"role": "x"}]}, 400, "bad_request", "messages", "messages is not valid: messages[0]"),
    (CHAT, {"messages": HELLO, "n": 0}, 400, "bad_request", "n", "n is not valid: it must be at least 1"),
    (CHAT, {"messages": HELLO, "regex": "("}, 400, "invalid_grammar", "regex", "regex is not valid: regular expressi"),
    ("/v1/completions", LONG, 400, "context_length_exceeded", "max_tokens", "prompt and new tokens together must be"),
    ("/v1/messages", {"max_tokens": 1}, 400, "bad_request", "messages", "messages is required, but it is missing; "),
    ("/tokenize", {"prompt": 1}, 400, "bad_request", "prompt", "prompt is not valid: it must be a string"),
    ("/flush_cache", {}, 403, "forbidden", None, "/flush_cache touches what all keys share, so it needs the admin"),
    ("/nothing/at/all", {}, 404, "not_found", None, "the path must name an endpoint, but none has this path; "),
    ("/metrics", {}, 405, "method_not_allowed", None, "this path does not take POST; use GET"),
    ("/generate", {"input_ids": [FAILING_TOKEN]}, 500, "internal_server_error", None, "this row failed"),
]
"""Path and body of requests that fail; the status, the code, the field and the beginning of the message."""
SHORT = {
    "/v1/chat/completions": {"max_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1},
    "/v1/messages": {"max_tokens": 1},
}


class LoggingServer:
    """A server that logs requests, and its lines."""

    def __init__(self, server: RunningServer, path: Path) -> None:
        self.server = server
        self.path = path

    @property
    def text(self) -> str:
        return self.path.read_text()

    def lines(self) -> list[dict]:
        return [json.loads(line) for line in self.text.splitlines() if line.startswith("{")]

    def line(self, request_id: str) -> dict:
        """The one line of that request, which ends a moment after its response."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := [line for line in self.lines() if line["request_id"] == request_id]):
            assert time.monotonic() < deadline, self.text
            time.sleep(0.01)
        assert len(found) == 1
        return found[0]

    def send_raw(self, *parts: bytes) -> bytes:
        """Sends parts of a request, each when the server has had time for the one before it; gives the response."""
        url = self.server.http.base_url
        with socket.create_connection((url.host, url.port), DEADLINE_S) as connection:
            for part in parts:
                connection.sendall(part)
                self.server.http.get("/health")
            return connection.recv(65536)

    def post(self, path: str, body: dict, request_id: str, **headers: str):
        headers = {"x-request-id": request_id, "Authorization": f"Bearer {KEYS[0]}"} | headers
        return self.server.http.post(path, json=body, headers=headers)


@pytest.fixture(scope="module")
def logging_server(make_server: ServerMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggingServer]:
    path = tmp_path_factory.mktemp("log") / "stderr"
    with make_server(server={"api_key": KEYS}, request_log=path) as server:
        yield LoggingServer(server, path)


class TestLines:
    def test_a_finished_request(self, logging_server: LoggingServer):
        prompts = ["a" * 600, "b" * 600]  # together long enough for a thread
        body = {"prompt": prompts, "max_tokens": 4, "user": "alice"}
        before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(milliseconds=1)
        response = logging_server.post("/v1/completions", body, "done", traceparent=TRACEPARENT)
        line = logging_server.line("done")
        usage = response.json()["usage"]
        assert line["waited"].keys() == {"rows", "text"} and line["waited"]["rows"] == line["queue_s"]
        assert line | {"time": 0, "tenant": 0, "ttft_s": 0, "e2e_s": 0, "waited": 0} == {
            "time": 0,
            "waited": 0,
            "level": "INFO",
            "source": "requests",
            "request_id": "done",
            "method": "POST",
            "route": "/v1/completions",
            "status": 200,
            "outcome": "ok",
            "code": None,
            "param": None,
            "message": None,
            "model": "fake",
            "stream": False,
            "user": "alice",
            "key": "key-1",
            "tenant": 0,
            "num_answers": 2,
            "finish_reasons": ["length", "length"],
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": 0,
            "queue_s": 0.25,
            "ttft_s": 0,
            "e2e_s": 0,
            "trace_id": TRACE_ID,
        }
        assert 0 < line["ttft_s"] < line["e2e_s"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert before <= datetime.datetime.fromisoformat(line["time"]) <= datetime.datetime.now(datetime.UTC)

    def test_a_stream(self, logging_server: LoggingServer):
        body = {"prompt": "abc", "max_tokens": 3, "stream": True}
        events_of(logging_server.post("/v1/completions", body, "streamed"))
        line = logging_server.line("streamed")
        assert (line["stream"], line["status"], line["completion_tokens"]) == (True, 200, 3)

    def test_tenants_are_told_apart(self, logging_server: LoggingServer):
        tenants = []
        for index, key in enumerate(KEYS):
            body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
            logging_server.post("/generate", body, f"tenant-{index}", Authorization=f"Bearer {key}")
            line = logging_server.line(f"tenant-{index}")
            tenants.append(line["tenant"])
            assert line["key"] == f"key-{index + 1}"
        assert len(set(tenants)) == 2 and all(tenants)

    def test_a_client_that_leaves(self, logging_server: LoggingServer):
        body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 900}}
        headers = {"x-request-id": "left", "Authorization": f"Bearer {KEYS[0]}"}
        with logging_server.server.http.stream("POST", "/generate", json=body, headers=headers) as response:
            next(response.iter_lines())
        line = logging_server.line("left")
        assert (line["status"], line["outcome"], line["finish_reasons"]) == (200, "client_disconnect", [None])
        assert 0 < line["completion_tokens"] < 900

    def test_a_client_that_leaves_before_there_is_a_response(self, logging_server: LoggingServer):
        body = {"text": "abc", "sampling_params": {"max_new_tokens": 900}}
        headers = {"x-request-id": "gone", "Authorization": f"Bearer {KEYS[0]}"}
        connection = logging_server.server.send("/generate", body, headers)
        http = logging_server.server.http
        key = {"Authorization": headers["Authorization"]}
        deadline = time.monotonic() + DEADLINE_S
        while scrape(http, headers=key).get("jsg:answers_open") == 0:
            assert time.monotonic() < deadline
        connection.close()
        line = logging_server.line("gone")
        assert (line["status"], line["outcome"]) == (499, "client_disconnect")

    def test_a_failure(self, logging_server: LoggingServer):
        for number, (path, body, status, code, param, message) in enumerate(FAILURES):
            response = logging_server.post(path, body, f"failure-{number}")
            line = logging_server.line(f"failure-{number}")
            assert response.status_code == line["status"] == status, response.text
            route = "other" if path == "/nothing/at/all" else path
            outcome = "error" if status == 500 else "refused"
            assert (line["route"], line["outcome"], line["code"], line["param"]) == (route, outcome, code, param), line
            assert line["message"].startswith(message), line

    def test_what_the_connection_refuses(self, logging_server: LoggingServer):
        """Before the head was read and afterwards, and whether or not the application has begun with the request."""
        head = b"POST /generate HTTP/1.1\r\nHost: localhost\r\n"
        keyed = head + f"Authorization: Bearer {KEYS[0]}\r\n".encode()
        for sent, status, code, route in (
            ((b"sesame\r\n\r\n",), 400, "bad_request", "other"),
            ((b"GET /sesame HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 101 + b"\r\n",), 431, TOO_LARGE, "other"),
            ((head + CHUNKED + b"sesame\r\n",), 400, "bad_request", "/generate"),
            ((keyed + CHUNKED, b"sesame\r\n"), 400, "bad_request", "/generate"),
            ((head + b"Content-Length: 99999999\r\n\r\n",), 401, "invalid_api_key", "/generate"),
        ):
            response = logging_server.send_raw(*sent)
            assert response.startswith(f"HTTP/1.1 {status} ".encode()), response
            [request_id] = re.findall(rb"x-request-id: (\w+)", response)
            line = logging_server.line(request_id.decode())
            assert (line["status"], line["code"], line["route"]) == (status, code, route)
            assert line["message"] and "sesame" not in line["message"]

    def test_a_wrong_key(self, logging_server: LoggingServer):
        response = logging_server.post("/generate", {"text": "a"}, "thief", Authorization="Bearer wrong-key-7")
        assert response.status_code == 401
        line = logging_server.line("thief")
        assert (line["status"], line["outcome"], line["num_answers"], line["tenant"]) == (401, "refused", 0, "")
        assert (line["code"], line["message"][:27]) == ("invalid_api_key", "a request must carry a key,")

    def test_what_generates_nothing_and_is_not_refused_has_no_line(self, logging_server: LoggingServer):
        http, headers = logging_server.server.http, {"Authorization": f"Bearer {KEYS[0]}"}
        for path in ("/health", "/metrics", "/v1/models"):
            http.get(path, headers=headers)
        logging_server.post("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}, "after")
        logging_server.line("after")
        assert {line["route"] for line in logging_server.lines() if line["code"] is None} <= LONG_STREAMS.keys()

    def test_an_invalid_traceparent_is_no_trace(self, logging_server: LoggingServer):
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        logging_server.post("/generate", body, "untraced", traceparent=TRACEPARENT.upper())
        assert logging_server.line("untraced")["trace_id"] is None

    @pytest.mark.parametrize(
        ("path", "fields", "user"),
        [
            ("/v1/chat/completions", {"user": "u", "safety_identifier": "s"}, "s"),
            ("/v1/chat/completions", {"user": "v"}, "v"),
            ("/v1/responses", {"user": "alice"}, "alice"),
            ("/v1/responses", {"safety_identifier": "bob"}, "bob"),
            ("/v1/messages", {"metadata": {"user_id": "eve"}}, "eve"),
        ],
    )
    def test_the_end_user_is_named(self, logging_server: LoggingServer, path: str, fields: dict, user: str):
        name = f"user-{user}"
        assert logging_server.post(path, LONG_STREAMS[path] | {"stream": False} | SHORT[path] | fields, name).is_success
        assert logging_server.line(name)["user"] == user

    def test_who_lets_go_of_a_hold_has_been_served(self, logging_server: LoggingServer):
        body = {"text": "a prefix", "hold": True, "stream": True}
        headers = {"x-request-id": "held", "Authorization": f"Bearer {KEYS[0]}"}
        with logging_server.server.http.stream("POST", "/generate", json=body, headers=headers) as response:
            next(response.iter_lines())
        assert logging_server.line("held")["outcome"] == "ok"


def test_failures_of_streams_and_limits(make_server: ServerMaker, tmp_path: Path):
    """A stream of any API that ends too early has the error's code although its status is 200."""
    limits = {"request_timeout": 0.3, "max_requests_per_key": 1}
    with make_server(server=limits, request_log=tmp_path / "log") as server:
        logging = LoggingServer(server, tmp_path / "log")
        for number, (path, body) in enumerate(LONG_STREAMS.items()):
            with server.http.stream("POST", path, json=body, headers={"x-request-id": f"late-{number}"}) as response:
                next(lines := response.iter_lines())
                assert logging.post(path, body, f"many-{number}").status_code == 429
                list(lines)
            late, many = logging.line(f"late-{number}"), logging.line(f"many-{number}")
            assert (late["status"], late["outcome"], late["code"]) == (200, "request_timeout", "request_timeout"), path
            assert "--request-timeout" in late["message"]
            assert (many["status"], many["outcome"], many["code"]) == (429, "refused", "rate_limit_exceeded"), path


def test_nothing_secret_is_logged(logging_server: LoggingServer):
    secrets = {"prompt": "Wednesday-prompt", "salt": "salt-and-pepper", "extra": "extra-pepper", "stop": "stop-here"}
    body = {
        "text": secrets["prompt"],
        "cache_salt": secrets["salt"],
        "extra_key": secrets["extra"],
        "sampling_params": {"max_new_tokens": 30, "stop": secrets["stop"]},
    }
    assert logging_server.post("/generate", body, "secret").status_code == 200
    assert logging_server.post("/generate", body | {"text": [secrets["prompt"], 7]}, "secret-2").status_code == 400
    assert logging_server.post("/generate", body, "secret-3", Authorization="Bearer wrong-key-9").status_code == 401
    logging_server.line("secret-2")
    text = logging_server.text
    for secret in (*secrets.values(), *KEYS, "wrong-key-9", "wrong-key-7"):
        assert secret not in text


def test_a_field_that_a_client_writes_into_a_tag_is_not_logged():
    part = {"type": "regex", "pattern": "(", "field": "hunter2 is the password"}
    with pytest.raises(GrammarError) as refused:
        structural_tag_grammar(json.dumps({"type": "structural_tag", "format": part}))
    assert "hunter2" in str(refused.value) and "hunter2" not in without_quotes(str(refused.value))


def test_lines_add_up_to_the_counters(mixed_run: MixedRun):
    result, seen, lines = mixed_run.scraped, mixed_run.seen, mixed_run.lines
    num_generating = sum(result.get("jsg:http_requests_total", route=r) for r in ("/generate", "/v1/completions"))
    assert len(lines) == num_generating == len(seen.statuses)
    assert sum(line["completion_tokens"] for line in lines) == result.get("jsg:generation_tokens_total")
    told = [line for line in lines if line["outcome"] in ("ok", "abort_request")]
    assert sum(line["completion_tokens"] for line in told) == seen.generated_tokens
    finishes = [(line["route"], reason) for line in told for reason in line["finish_reasons"]]
    assert sorted(finishes) == sorted(seen.finishes)
    assert sum(line["outcome"] == "client_disconnect" for line in lines) == 8


def an_exchange(**state: object) -> Exchange:
    scope = {"method": "POST", "headers": []}
    return Exchange(Endpoint("/generate", generates=True), scope, {"caller": Caller("t", is_admin=False), **state})


class TestWriter:
    def test_a_reader_that_is_slow_delays_nobody(self, monkeypatch: pytest.MonkeyPatch):
        """The pipe is full and nobody reads: lines wait, then are dropped and counted."""
        monkeypatch.setattr(request_log, "MAX_WAITING_LINES", 100)
        reader, writer = os.pipe()
        log = RequestLog(fd=writer)
        exchange = an_exchange(request_id="x" * 1000)
        feeding = threading.Thread(target=lambda: [log.on_exchange(exchange) for _ in range(1000)], daemon=True)
        feeding.start()
        feeding.join(DEADLINE_S)
        assert not feeding.is_alive()
        received = bytearray()

        def read() -> None:
            while chunk := os.read(reader, 65536):
                received.extend(chunk)

        reading = threading.Thread(target=read)
        reading.start()
        deadline = time.monotonic() + DEADLINE_S
        while log._lines.qsize():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        log.on_exchange(exchange)
        asyncio.run(log.close())
        os.close(writer)
        reading.join()
        os.close(reader)
        lines = [json.loads(line) for line in received.splitlines()]
        dropped = [line["num_dropped_lines"] for line in lines if "num_dropped_lines" in line]
        assert dropped
        assert len(lines) - len(dropped) + sum(dropped) == 1001

    def test_the_end_does_not_wait_for_a_reader(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(request_log, "CLOSE_TIMEOUT_S", 0.1)
        reader, writer = os.pipe()
        log = RequestLog(fd=writer)
        for _ in range(300):  # more than a pipe holds
            log.on_exchange(an_exchange(request_id="x" * 1000))
        asyncio.run(log.close())
        assert log._thread.is_alive(), "there was nothing to wait for"
        os.close(reader)
        log._thread.join(DEADLINE_S)
        assert not log._thread.is_alive()
        os.close(writer)

    def test_a_terminal_that_does_not_block_is_waited_for(self):
        """Who shares stderr may have made it non-blocking: a full pipe is then an error, and no end of the log."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        log = RequestLog(fd=writer)
        num_lines = 300  # more than a pipe holds
        for _ in range(num_lines):
            log.on_exchange(an_exchange(request_id="x" * 1000))
        closing = threading.Thread(target=lambda: (asyncio.run(log.close()), os.close(writer)))
        deadline = time.monotonic() + DEADLINE_S
        while select.select([], [writer], [], 0)[1]:  # until the pipe is full
            assert time.monotonic() < deadline
            time.sleep(0.01)
        closing.start()
        received = bytearray()
        while chunk := os.read(reader, 65536):
            received.extend(chunk)
        closing.join()
        os.close(reader)
        assert len([json.loads(line) for line in received.splitlines()]) == num_lines

    def test_a_closed_reader_is_nothing(self):
        reader, writer = os.pipe()
        os.close(reader)
        log = RequestLog(fd=writer)
        log.on_exchange(an_exchange())
        log.on_exchange(an_exchange())
        asyncio.run(log.close())
        os.close(writer)

    def test_the_name_of_a_user_is_cut(self):
        exchange = an_exchange()
        exchange.user = "u" * 10_000 + "\n"
        assert len(LogLine.of(exchange).user or "") == 256
