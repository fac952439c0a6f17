"""The front process: probes, the key, limits, signals, and the engine's death."""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import httpx
import pytest

from jsg.config import ServerConfig
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from tests.engine.fake_core import TOO_LARGE
from tests.server.conftest import RunningServer, ServerMaker, events_of

LONG = {"text": "ab", "stream": True, "sampling_params": {"max_new_tokens": 1000}}


@pytest.fixture(scope="module")
def guarded(make_server: ServerMaker) -> Iterator[RunningServer]:
    with make_server(server={"api_key": "sekrit"}) as server:
        yield server


@pytest.fixture(scope="module")
def limited(make_server: ServerMaker) -> Iterator[RunningServer]:
    with make_server(server={"max_request_bytes": 2000}) as server:
        yield server


class TestGreeting:
    def test_the_interface_is_described(self):
        described = create_app(FrontDoor(), ServerConfig()).openapi()["paths"]  # warns of operations with one name
        assert {"/generate", "/health", "/ready", "/v1/chat/completions"} <= set(described)

    def test_the_printed_curl_line_works(self, server: RunningServer):
        line = next(line for line in server.greeting.splitlines() if line.startswith("curl "))
        done = subprocess.run(["bash", "-c", line], capture_output=True, timeout=20, check=True)
        assert json.loads(done.stdout)["object"] == "chat.completion"

    def test_a_model_without_template_prints_another_line(self, make_server: ServerMaker, plain_tokenizer_dir):
        with make_server(tokenizer=plain_tokenizer_dir) as server:
            line = next(line for line in server.greeting.splitlines() if line.startswith("curl "))
            done = subprocess.run(shlex.split(line), capture_output=True, timeout=20, check=True)
            assert json.loads(done.stdout)["text"].startswith("Once upon")
            body = {"messages": [{"role": "user", "content": "hi"}]}
            response = server.http.post("/v1/chat/completions", json=body)
            assert response.status_code == 400
            assert "template" in response.json()["error"]["message"]


class TestKey:
    @pytest.mark.parametrize("path", ["/health", "/ready"])
    def test_probes_need_none(self, guarded, path):
        assert guarded.http.get(path).status_code == 200

    @pytest.mark.parametrize("key", [None, "Bearer wrong", "sekrit", "Bearer sekrit2", "Basic sekrit"])
    @pytest.mark.parametrize("path", ["/v1/models", "/get_server_info", "/openapi.json", "/nowhere", "//health"])
    def test_everything_else_does(self, guarded, path, key):
        response = guarded.http.get(path, headers={} if key is None else {"Authorization": key})
        assert response.status_code == 401
        assert "sekrit" not in response.text

    def test_the_right_key_opens(self, guarded):
        headers = {"Authorization": "Bearer sekrit"}
        assert guarded.http.get("/v1/models", headers=headers).status_code == 200
        assert guarded.http.get("/nowhere", headers=headers).status_code == 404
        assert guarded.http.post("/flush_cache").json() == {
            "error": {"message": "this server needs a key; send it as 'Authorization: Bearer KEY'"}
        }

    def test_the_greeting_does_not_show_it(self, guarded):
        assert "sekrit" not in guarded.greeting
        assert "Authorization: Bearer YOUR_KEY" in guarded.greeting


class TestBodies:
    def test_a_large_body_is_refused(self, limited):
        fits = limited.http.post("/generate", json={"text": "a" * 1000, "sampling_params": {"max_new_tokens": 1}})
        assert fits.status_code == 200
        assert limited.http.post("/generate", json={"text": "a" * 3000}).status_code == 413

    def test_without_a_length_it_is_counted_while_it_is_read(self, limited):
        def chunks():
            yield b'{"text": "'
            for _ in range(100):
                yield b"a" * 100
            yield b'"}'

        response = limited.http.post("/v1/completions", content=chunks(), headers={"Content-Type": "application/json"})
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"

    @pytest.mark.parametrize(
        "content",
        [b"", b"{", b"[]", b"5", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"text":' * 10_000, b"9" * 10_000],
        ids=["empty", "cut", "list", "number", "string", "no UTF-8", "deep list", "deep object", "long number"],
    )
    @pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions", "/v1/completions"])
    def test_what_is_no_object_is_a_400(self, http, path, content):
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert response.json()["error"]["message"]

    def test_other_content_types_are_refused(self, http):
        response = http.post("/generate", content=b'{"text": "a"}', headers={"Content-Type": "text/plain"})
        assert response.status_code == 400
        assert "application/json" in response.json()["error"]["message"]

    def test_a_million_mistakes_are_one_short_answer(self, http):
        for content in ('{"input_ids": [' + '"a",' * 900_000 + "1]}", json.dumps({f"f{i}": 1 for i in range(200_000)})):
            started = time.monotonic()
            response = http.post("/generate", content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 400
            assert len(response.content) < 3000
            assert time.monotonic() - started < 5

    def test_unknown_paths_and_methods(self, http):
        assert http.get("/nowhere").json() == {"error": {"message": "Not Found"}}
        assert http.get("/v1/nowhere").json()["error"]["code"] == "not_found"
        assert http.get("/generate").status_code == 405


class TestStart:
    def test_it_listens_while_the_engine_loads(self, make_server: ServerMaker, tmp_path):
        port, gate = free_port(), tmp_path / "gate"
        with make_server(engine={"tokenizer_path": str(gate)}, server={"port": port}, wait=False) as server:
            server.http.base_url = f"http://127.0.0.1:{port}"
            wait_until_it_listens(port)
            assert server.http.get("/health").json() == {"status": "loading"}
            assert server.http.get("/ready").status_code == 503
            early = server.http.post("/generate", json={"text": "a"})
            assert early.status_code == 503
            assert "loading" in early.json()["error"]["message"]
            gate.touch()
            server.wait_until_ready()
            assert server.http.get("/ready").status_code == 200

    def test_a_signal_while_loading_ends_it(self, make_server: ServerMaker, tmp_path):
        port, gate = free_port(), tmp_path / "never made"
        with make_server(engine={"tokenizer_path": str(gate)}, server={"port": port}, wait=False) as server:
            wait_until_it_listens(port)
            server.process.terminate()
            assert server.end()[0] == 0

    def test_a_start_that_fails_ends_it(self, make_server: ServerMaker, capfd):
        with make_server(engine={"model_path": TOO_LARGE}, wait=False) as server:
            assert server.end()[0] == 2
        said = capfd.readouterr().err
        assert "--mem-fraction-static" in said
        assert "Traceback" not in said

    def test_an_address_in_use_ends_it(self, make_server: ServerMaker, capfd):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with make_server(server={"port": port}, wait=False) as server:
                assert server.end()[0] == 2
        said = capfd.readouterr().err
        assert "--port" in said
        assert "Traceback" not in said


class TestEnd:
    def test_one_signal_ends_an_idle_server_in_order(self, make_server: ServerMaker):
        with make_server() as server:
            pid = server.stats()["pid"]
            server.process.terminate()
            status, rest = server.end()
            assert status == 0
            assert json.loads(rest.strip()) == {"heavy": []}, "the front process loaded what only the engine needs"
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)

    def test_running_requests_may_finish(self, make_server: ServerMaker):
        with make_server(server={"shutdown_timeout": 10}) as server:
            body = {"text": "ab", "stream": True, "sampling_params": {"max_new_tokens": 200}}
            with server.http.stream("POST", "/generate", json=body) as response:
                server.process.terminate()
                events = events_of(response)
            assert events[-1]["meta_info"]["completion_tokens"] == 200
            assert server.end()[0] == 0

    def test_those_that_do_not_finish_are_aborted(self, make_server: ServerMaker):
        with make_server(server={"shutdown_timeout": 0.3}) as server:
            with server.http.stream("POST", "/generate", json=LONG) as response:
                server.process.send_signal(signal.SIGINT)
                events = events_of(response)
            assert events[-1]["meta_info"]["finish_reason"]["type"] == "abort"
            assert server.end()[0] == 0

    def test_a_second_signal_ends_it_at_once(self, make_server: ServerMaker):
        with make_server(server={"shutdown_timeout": 60}) as server, server.http.stream("POST", "/generate", json=LONG) as response:
            events = response.iter_raw()
            next(events)
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            assert server.process.wait(2) == 130

    def test_the_engines_death_is_told_to_everyone(self, make_server: ServerMaker, capfd):
        with make_server() as server:
            pid = server.stats()["pid"]
            chat = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
            with (
                server.http.stream("POST", "/generate", json=LONG) as native,
                server.http.stream("POST", "/v1/chat/completions", json=chat) as openai,
            ):
                os.kill(pid, signal.SIGKILL)
                native_events, openai_events = events_of(native), events_of(openai)
            assert "engine process ended" in native_events[-1]["error"]["message"]
            assert openai_events[-1]["error"]["type"] == "server_error"
            health = server.http.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "dead"})
            assert server.http.post("/generate", json={"text": "a"}).status_code == 503
            assert server.end()[0] == 2
        said = capfd.readouterr().err
        assert "exit status -9" in said
        assert "Traceback" not in said


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def wait_until_it_listens(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            httpx.get(f"http://127.0.0.1:{port}/health")
        except httpx.ConnectError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        else:
            return
