"""What a server writes at its default log level: nothing of what clients sent, and no line that a client has forged."""

import contextlib
import io
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jsg.engine.child.log import LineFormatter
from tests.engine.fake_core import CRASHING_TOKEN, FAILING_TOKEN, RAISING_TOKEN
from tests.server.battery import PROGRAM, VALID
from tests.server.log_lines import read_records
from tests.server.running import ProcessMaker, RunningServer, wait_until
from tests.server.threads import ServerMaker
from tests.server.vision_server import IMAGE_WAYS, path_of

KEY = "sesame-key-7391"
SECRET = "sesame prompt 7391"
FILE = "c2VzYW1lIHBpY3R1cmUgNzM5MQ=="  # "sesame picture 7391" in base64
FORGED = "\r\n2026-11-29T09:17:05.597Z CRITICAL front: forged \x1b[31m\u2028forged"
AUTHORIZED = {"Authorization": f"Bearer {KEY}"}
TOOL = {"type": "function", "function": {"name": "find", "arguments": json.dumps({"where": SECRET})}}
SAYING = [{"role": "user", "content": SECRET}, {"role": "assistant", "content": "", "tool_calls": [{"id": "a"} | TOOL]}]

TOLD = [
    ("/generate", {"text": SECRET}),
    ("/generate", {"text": SECRET, "sampling_params": {"max_new_tokens": 2, "stop": SECRET}, "stream": True}),
    ("/select", {"prompt": SECRET, "choices": [SECRET, "b"]}),
    ("/tokenize", {"prompt": SECRET}),
    ("/v1/chat/completions", {"messages": SAYING[:1], "max_tokens": 2, "user": SECRET, "service_tier": "flex"}),
    ("/v1/completions", {"prompt": SECRET, "max_tokens": 2, "suffix": ""}),
    ("/v1/messages", {"messages": SAYING[:1], "system": SECRET, "max_tokens": 2}),
    ("/v1/programs", {"graph": PROGRAM, "arguments": {"q": SECRET}}),
    ("/v1/responses", {"input": SECRET, "max_output_tokens": 2, "instructions": SECRET, "service_tier": "flex"}),
    ("/v1/score", {"query": SECRET, "items": [SECRET], "label_token_ids": [1]}),
]
"""Right requests, with a secret wherever clients have some."""

REFUSED = [
    ("/generate", {"text": SECRET, SECRET: 1}),
    ("/generate", {"text": {"a": SECRET}}),
    ("/v1/chat/completions", {"messages": [{"role": SECRET, "content": SECRET}]}),
    ("/v1/chat/completions", {"messages": SAYING, "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": SAYING, "max_tokens": SECRET}),
    ("/v1/chat/completions", {"messages": SAYING, "model": SECRET}),
    ("/v1/programs", {"graph": PROGRAM | {"nodes": [{"kind": SECRET}]}, "arguments": {"q": SECRET}}),
    *((path_of(way), body(FILE)) for way, body in IMAGE_WAYS.items()),
]
"""Requests that are refused, or parts of them."""


GRAMMARS = [
    ("/generate", {"text": SECRET, "sampling_params": {"regex": "(" + SECRET}}),
    ("/v1/grammars", {"json_schema": {"type": SECRET}}),
]
"""Requests that are refused by a process for grammars."""


class Said:
    """What was logged, in the form of `jsg serve`."""

    def __init__(self) -> None:
        self.stream = io.StringIO()

    @property
    def text(self) -> str:
        return self.stream.getvalue()

    def check(self) -> None:
        """Nothing of a client is there, in no form in which Python shows texts and bytes."""
        for secret in ("sesame", "7391", FILE[:12], "forged"):
            assert secret not in self.text


@pytest.fixture
def said() -> Iterator[Said]:
    made, root = Said(), logging.getLogger()
    handler = logging.StreamHandler(made.stream)
    handler.setFormatter(LineFormatter("front"))
    root.addHandler(handler)
    try:
        yield made
    finally:
        root.removeHandler(handler)


@pytest.fixture(scope="module")
def request_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "requests"


@pytest.fixture(scope="module")
def guarded(make_server: ServerMaker, request_log: Path) -> Iterator[RunningServer]:
    with make_server(server={"api_key": (KEY,)}, request_log=request_log) as server:
        server.http.headers.update(AUTHORIZED)
        yield server


def test_a_record_has_lines_of_one_form(said: Said):
    logging.getLogger("jsg.test").warning("something\nmore")
    [record] = read_records("text", said.text)
    assert record[1:] == ("WARNING", "front", "something\nmore")


def test_what_is_answered(guarded: RunningServer, said: Said):
    for path, body in TOLD:
        response = guarded.http.post(path, json=body)
        assert response.status_code == 200, response.text
    said.check()


def test_what_is_refused(guarded: RunningServer, said: Said, request_log: Path):
    """The line of the request log has the message, and "…" for what the message quotes."""
    for path, body in REFUSED + GRAMMARS:
        response = guarded.http.post(path, json=body, headers={"X-Request-Id": "refused"})
        assert response.status_code in (400, 404) or response.json()["errors"], response.text
    assert guarded.http.post("/generate", content=f'{{"text": "{SECRET}'.encode()).status_code in (400, 415)
    wrong_keys = [f"Bearer {KEY}x", f"Basic {KEY}", f"Bearer {SECRET}"]
    for wrong in wrong_keys:
        assert (
            guarded.http.post("/generate", json=VALID["/generate"], headers={"Authorization": wrong}).status_code == 401
        )
    wait_until(lambda: request_log.read_text().count('"status": 401') == len(wrong_keys))
    lines = [json.loads(line) for line in request_log.read_text().splitlines()]
    refused = [f"{line['message']} {line['param']}" for line in lines if line["request_id"] == "refused"]
    assert len(refused) >= len(REFUSED)
    assert not [line for line in refused if "sesame" in line or "7391" in line or FILE[:12] in line]
    said.check()


def test_what_fails_in_the_engine(guarded: RunningServer, said: Said):
    """The tokens of the prompt are not there either."""
    for token, status in ((FAILING_TOKEN, 500), (RAISING_TOKEN, 500)):
        body = {"input_ids": [token, 73, 91, 73, 91], "rid": "sesame-7391", "cache_salt": SECRET}
        assert guarded.http.post("/generate", json=body).status_code == status
    assert "a request could not be added" in said.text and "73, 91" not in said.text
    said.check()


def test_what_meets_a_bug(guarded: RunningServer, said: Said, monkeypatch: pytest.MonkeyPatch):
    """A stack trace has lines of code, and no values."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("jsg.server.native.generate.Generator", fail, raising=False)
    monkeypatch.setattr("jsg.server.text_threads.TextThreads.run", fail)
    for path, body in TOLD:
        guarded.http.post(path, json=body, headers={"Connection": "close"})
    assert "RuntimeError: a bug" in said.text
    said.check()


LINES = ["X-Request-Id", "User-Agent", "traceparent", "Authorization", "Host", "Content-Type", "Origin", "Cookie"]


def test_lines_cannot_be_forged(guarded: RunningServer, said: Said):
    """Neither by a field, nor by a path or a header, whatever a client library would not send."""
    for path, body in (
        ("/generate", {"text": "a", "rid": FORGED}),
        ("/generate", {"text": "a", FORGED: None}),
        ("/generate", {"text": "a", FORGED: 1}),
        ("/v1/chat/completions", VALID["/v1/chat/completions"] | {"model": FORGED, "user": FORGED}),
        ("/v1/chat/completions", VALID["/v1/chat/completions"] | {"chat_template_kwargs": {FORGED: 1}}),
        ("/v1/completions", VALID["/v1/completions"] | {"service_tier": FORGED}),
        ("/v1/responses", VALID["/v1/responses"] | {"metadata": {FORGED: FORGED}}),
        ("/abort_request", {"rid": FORGED}),
    ):
        assert guarded.http.post(path, json=body).status_code < 500
    for path in ("/v1/models/", "/v1/responses/", "/"):
        guarded.http.get(f"{path}%0d%0ajsg:%20forged%1b")
        guarded.http.post(f"{path}%0d%0ajsg:%20forged%1b", json={})
        guarded.http.post(f"{path}%0d%0ajsg:%20forged%1b/cancel", json={"service_tier": "flex"})
    for header in LINES:
        for value in ("a\r\nforged: 1", "a\nforged", "a\x1b[31mforged", "a\rforged", "\xe2\x80\xa8forged"):
            send_raw(guarded, f"GET /get_model_info HTTP/1.1\r\nHost: localhost\r\n{header}: {value}\r\n\r\n")
    send_raw(guarded, "GET /\x1b[31mforged HTTP/1.1\r\n\r\n")
    send_raw(guarded, "forged\r\njsg: CRITICAL: forged\r\n\r\n")
    assert guarded.http.post("/generate", json=VALID["/generate"]).status_code == 200
    said.check()


def send_raw(server: RunningServer, text: str) -> None:
    url = server.http.base_url
    with socket.create_connection((url.host, url.port), timeout=10) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(text.encode("latin-1"))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1000)


def test_the_request_log_has_names_as_json(make_server: ServerMaker, tmp_path: Path):
    """`--log-requests` writes the end user's name, in a line of JSON that has no raw control character."""
    log = tmp_path / "log"
    with make_server(request_log=log) as server:
        body = VALID["/v1/chat/completions"] | {"user": FORGED}
        assert server.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "a b"}).status_code == 200
        wait_until(lambda: '"user"' in log.read_text())
    [line] = [line for line in log.read_bytes().split(b"\n") if b"forged" in line]
    assert json.loads(line)["user"] == FORGED
    assert not any(byte < 0x20 for byte in line)


@pytest.mark.slow
def test_an_engine_that_crashes_names_no_request(make_process: ProcessMaker, capfd: pytest.CaptureFixture[str]):
    """Both processes, down to their standard error."""
    with make_process(server={"api_key": (KEY,)}) as server:
        server.http.headers.update(AUTHORIZED)
        for path, body in TOLD + REFUSED + GRAMMARS:
            server.http.post(path, json=body)
        for token in (RAISING_TOKEN, FAILING_TOKEN, CRASHING_TOKEN):
            server.http.post("/generate", json={"input_ids": [token, 73, 91, 73, 91], "cache_salt": SECRET})
        server.process.wait(30)
    errors = capfd.readouterr().err
    assert "Traceback" in errors, "something was logged"
    for secret in ("sesame", "7391", "73, 91", FILE[:12]):
        assert secret not in errors
