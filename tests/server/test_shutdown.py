"""How a server ends: told to by a signal, told twice, or with its engine."""

import asyncio
import concurrent.futures
import contextlib
import io
import json
import os
import pathlib
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from jsg import cli
from jsg.config import EngineConfig, ServerConfig
from jsg.engine.front.children import EngineChild
from jsg.errors import ConfigError, EngineDeadError
from jsg.free_ports import free_ports
from jsg.lang.http import runtime
from jsg.lang.http.runtime import Runtime
from jsg.server import run
from jsg.server.ending import EndRequest
from tests.server.running import (
    LONG_STREAMS,
    ProcessMaker,
    RunningServer,
    check_discreet,
    data_of,
    is_listening,
    is_running,
    running,
    wait_until,
)
from tests.server.scrape import scrape
from tests.server.threads import EngineThread, ServerMaker

WHOLE = {path: body | {"stream": False} for path, body in LONG_STREAMS.items()}
SHORTER = {"sampling_params": {"max_new_tokens": 300}}
FINISHES = (  # how the end of an answer is told
    *('"finish_reason":"', '"type":"length"', '"type":"stop"', '"type":"abort"', '"message_stop"'),
    *('"response.completed"', '"response.incomplete"', '"status":"completed"'),
)


@contextlib.contextmanager
def open_stream(server: RunningServer, path: str = "/generate", **others: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream that has begun."""
    with server.http.stream("POST", path, json=LONG_STREAMS[path] | others) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def check_cut_short(path: str, lines: list[str], why: str) -> None:
    """The stream ends with an error, and nothing in it looks like an end of the answer."""
    check_discreet("".join(lines))
    last = data_of(lines)[-1]
    assert why in json.dumps(last), (path, last)
    assert "error" in last or last["type"] == "error" or last["response"]["error"], (path, last)
    assert not any(finish in line for line in lines for finish in FINISHES), (path, lines[-5:])


@pytest.mark.parametrize("path", LONG_STREAMS)
def test_an_end_looks_like_one(http: httpx.Client, path):
    short = {**LONG_STREAMS[path], "sampling_params": {"max_new_tokens": 3}} if path == "/generate" else {
        name: 3 if "max" in name else value for name, value in LONG_STREAMS[path].items()
    }  # fmt: skip
    assert any(finish in http.post(path, json=short).text for finish in FINISHES)


class TestOneSignal:
    def test_an_idle_server_ends_at_once_and_in_order(self, make_process: ProcessMaker):
        """Whatever signals come: a service manager may send them to the engine too."""
        with make_process(server={"shutdown_timeout": 60}) as server:
            pid = server.stats()["pid"]
            os.kill(pid, signal.SIGTERM)
            with open_stream(server, **SHORTER) as lines:
                server.process.terminate()
                assert data_of(lines)[-1]["meta_info"]["completion_tokens"] == 300
            status, rest = server.end()
            assert status == 0
            assert json.loads(rest.strip()) == {"heavy": []}, "the front process loaded what only the engine needs"
            assert not is_running(pid)

    def test_no_thread_that_is_at_work_keeps_it(self, make_process: ProcessMaker):
        """Nor does the end of Python, which takes long where many processes want the processor."""
        with make_process(to_end=True) as server:
            server.process.terminate()
            assert server.end() == (0, "\n")  # the end of the greeting

    def test_what_runs_may_finish_while_nothing_new_is_let_in(self, make_server: ServerMaker):
        with make_server(server={"shutdown_timeout": 20}) as server:
            whole = {"text": "ab", "sampling_params": {"max_new_tokens": 500}}
            with (
                concurrent.futures.ThreadPoolExecutor(1) as pool,
                open_stream(server) as lines,
            ):
                answer = pool.submit(server.http.post, "/generate", json=whole)
                server.wait_for_stats(num_running=2)
                server.terminate()
                wait_until(lambda: server.http.get("/ready").status_code == 503)
                assert server.http.get("/ready").json() == {"status": "shutting down"}
                assert server.http.get("/health").status_code == 200
                assert server.http.get("/get_model_info").status_code == 200
                for path, body in LONG_STREAMS.items():
                    for is_stream in (False, True):
                        refused = server.http.post(path, json={**body, "stream": is_stream})
                        assert refused.status_code == 503, path
                        assert "shutting down" in refused.json()["error"]["message"]
                        assert refused.headers["connection"] == "close"
                        assert int(refused.headers["retry-after"]) == 20
                assert data_of(lines)[-1]["meta_info"]["completion_tokens"] == 1000
                assert answer.result().json()["meta_info"]["completion_tokens"] == 500
            assert server.join() is None

    def test_what_does_not_finish_in_time_ends_with_an_error(self, make_server: ServerMaker):
        with make_server(server={"shutdown_timeout": 0.3}) as server:
            with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
                streams = {path: stack.enter_context(open_stream(server, path)) for path in LONG_STREAMS}
                whole = {path: pool.submit(server.http.post, path, json=body) for path, body in WHOLE.items()}
                server.wait_for_stats(num_running=2 * len(LONG_STREAMS))
                server.terminate()
                for path, lines in streams.items():
                    check_cut_short(path, list(lines), "shutting down")
                for path, answer in whole.items():
                    assert answer.result().status_code == 503, path
                    check_discreet(answer.result().text)
                    assert "retry-after" in answer.result().headers
            assert server.join() is None

    def test_a_reader_that_has_stopped_reading_does_not_keep_it(self, make_server: ServerMaker):
        with make_server(server={"shutdown_timeout": 0.2}) as server:
            sampling = {"max_new_tokens": 20}
            much = {"text": ["a" * 900] * 100, "stream": True, "return_logprob": True, "top_logprobs_num": 20}
            with contextlib.closing(server.send("/generate", {**much, "sampling_params": sampling})) as connection:
                assert connection.sock.recv(1)
                server.terminate()
                assert server.join() is None

    def test_while_loading(self, make_server: ServerMaker, tmp_path):
        port, gate = free_ports(), tmp_path / "never made"
        with make_server(engine={"tokenizer_path": str(gate)}, server={"port": port}, wait=False) as server:
            wait_until(lambda: is_listening(port))
            server.terminate()
            assert server.join() is None

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_before_the_front_has_imported_what_it_needs(self, monkeypatch: pytest.MonkeyPatch, number: int):
        """The engine starts first, so its process and the directory of its socket are there by then."""
        monkeypatch.setattr(EngineChild, "spawn", lambda *_, **__: signal.raise_signal(number))
        before = [(each, signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]
        try:
            with pytest.raises(SystemExit) as end:
                cli.main(["serve", "tiny"])
        finally:
            for each, handler in before:
                signal.signal(each, handler)
        assert end.value.code == 0

    def test_is_heard_before_anyone_can_see_that_it_listens(self, monkeypatch: pytest.MonkeyPatch):
        heard = []

        def listen(server: ServerConfig) -> socket.socket:
            heard.extend(number for number in (signal.SIGINT, signal.SIGTERM) if has_handler(number))
            raise ConfigError("seen enough")

        def has_handler(number: signal.Signals) -> bool:
            return signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)

        monkeypatch.setattr(run, "_listen", listen)
        monkeypatch.setattr(run, "give_back_buffers", lambda: None)
        engine = EngineConfig(model_path="fake")
        children: Any = [EngineThread(engine)]
        with pytest.raises(ConfigError, match="seen enough"):
            asyncio.run(run.serve(engine, ServerConfig(), children, tokenizer_dir=pathlib.Path(), started_at=0.0))
        assert heard == [signal.SIGINT, signal.SIGTERM]


@pytest.mark.slow
def test_it_ends_with_its_parent_if_it_shall(compile_cache_dir: str):
    starter = ["-c", "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"]
    options = ["--port", "0", "--exit-with-parent", "--compilation-cache-dir", compile_cache_dir]
    with running([*starter, "-m", "jsg.cli", "serve", "tiny", *options]) as server:
        server.process.kill()
        wait_until(lambda: not is_listening(server.http.base_url.port))


def ask(server: RunningServer) -> httpx.Response:
    return server.http.post("/generate", json={"text": "ab", "sampling_params": {"max_new_tokens": 2}})


class TestDelay:
    """`--drain-delay`: the server says that it is leaving, and goes on until everybody has heard it."""

    @pytest.mark.parametrize("dp_size", [1, 2])
    def test_requests_are_taken_and_connections_are_not_kept(self, make_server: ServerMaker, dp_size: int):
        with make_server(server={"dp_size": dp_size, "drain_delay": 60, "shutdown_timeout": 20}) as server:
            whole = {"text": "ab", "sampling_params": {"max_new_tokens": 300}}
            with concurrent.futures.ThreadPoolExecutor(1) as pool, open_stream(server) as lines:
                assert "connection" not in ask(server).headers
                answer = pool.submit(server.http.post, "/generate", json=whole)
                server.terminate()
                wait_until(lambda: server.http.get("/ready").status_code == 503)
                assert server.http.get("/ready").json() == {"status": "shutting down"}
                assert server.http.get("/health").status_code == 200
                assert scrape(server.http).state == "draining"
                assert answer.result().headers["connection"] == "close", "also of what had begun before"
                for path, body in LONG_STREAMS.items():
                    with server.http.stream("POST", path, json=body) as response:
                        assert (response.status_code, response.headers["connection"]) == (200, "close"), path
                assert ask(server).status_code == 200
                server.terminate()  # a second signal ends the delay
                wait_until(lambda: ask(server).status_code == 503)
                assert data_of(lines)[-1]["meta_info"]["completion_tokens"] == 1000
            assert server.join() is None

    def test_it_passes(self, make_server: ServerMaker):
        with make_server(server={"drain_delay": 0.3, "shutdown_timeout": 20}) as server:
            with open_stream(server) as lines:
                server.terminate()
                wait_until(lambda: ask(server).status_code == 503)
                assert data_of(lines)[-1]["meta_info"]["completion_tokens"] == 1000
            assert server.join() is None

    def test_a_hold_goes_on_until_it_has_passed(self, make_server: ServerMaker):
        with make_server(server={"drain_delay": 60}) as server:
            hold = {"text": "ab", "hold": True, "stream": True}
            with server.http.stream("POST", "/generate", json=hold) as held:
                lines = held.iter_lines()
                next(lines)
                server.wait_for_stats(num_holds=1)
                server.terminate()
                wait_until(lambda: server.http.get("/ready").status_code == 503)
                server.wait_for_stats(num_holds=1)
                server.terminate()
                list(lines)
            assert server.join() is None

    def test_an_engine_that_dies_ends_it(self, make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(run, "DEATH_NOTICE_S", 0.1)
        with make_server(server={"drain_delay": 60}) as server:
            server.terminate()
            wait_until(lambda: server.http.get("/ready").status_code == 503)
            server.engines[0].kill()
            assert isinstance(server.join(), EngineDeadError)

    @pytest.mark.parametrize(("drain_delay", "num_heard"), [(0, 1), (5, 2)])
    def test_how_many_signals_are_heard_before_the_one_that_ends_it_at_once(self, drain_delay: float, num_heard: int):
        told = EndRequest(ServerConfig(drain_delay=drain_delay))
        assert [told.repeat() for _ in range(num_heard + 1)] == [True] * num_heard + [False]
        assert told.is_made.is_set() and told.is_urgent.is_set()

    def test_a_runtime_waits_for_it(self, monkeypatch: pytest.MonkeyPatch):
        waits: list[float] = []
        process: Any = SimpleNamespace(stdin=io.StringIO(), terminate=lambda: None, wait=waits.append)
        monkeypatch.setattr(runtime, "_start", lambda *_: process)
        monkeypatch.setattr(Runtime, "_wait_until_ready", lambda *_: "http://127.0.0.1:1")
        with Runtime("tiny", drain_delay=7, shutdown_timeout=11):
            pass
        assert waits == [7 + 11 + runtime.END_S]


def test_the_last_signal_ends_it_at_once(make_process: ProcessMaker):
    with make_process(server={"drain_delay": 60, "shutdown_timeout": 60}) as server, open_stream(server):
        pid = server.stats()["pid"]
        server.process.send_signal(signal.SIGINT)
        wait_until(lambda: server.http.get("/ready").status_code == 503)
        assert ask(server).status_code == 200
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: ask(server).status_code == 503)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 130
        wait_until(lambda: not is_running(pid))


class TestDeath:
    def test_of_the_engine_is_told_to_everyone(self, make_server: ServerMaker, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(run, "DEATH_NOTICE_S", 5.0)  # so that a busy machine has the time to see it
        with make_server() as server:
            with concurrent.futures.ThreadPoolExecutor() as pool, contextlib.ExitStack() as stack:
                streams = {path: stack.enter_context(open_stream(server, path)) for path in LONG_STREAMS}
                whole = {path: pool.submit(server.http.post, path, json=body) for path, body in WHOLE.items()}
                server.wait_for_stats(num_running=2 * len(LONG_STREAMS))
                server.engines[0].kill()
                for path, lines in streams.items():
                    check_cut_short(path, list(lines), "engine process ended")
                for answer in whole.values():
                    assert answer.result().status_code == 503
                    check_discreet(answer.result().text)
                for path in ("/health", "/ready"):
                    probe = server.http.get(path)
                    assert (probe.status_code, probe.json()) == (503, {"status": "dead"})
                assert scrape(server.http).state == "ended"
                assert server.http.post("/generate", json={"text": "a"}).status_code == 503
            error = server.join()
            assert isinstance(error, EngineDeadError) and "exit status -9" in str(error)
            assert "memory ran out" in str(error)

    def test_of_the_engine_while_the_server_ends(self, make_server: ServerMaker):
        with make_server(server={"shutdown_timeout": 60}) as server:
            with open_stream(server) as lines:
                server.terminate()
                wait_until(lambda: server.http.get("/ready").status_code == 503)
                server.engines[0].kill()
                assert any("engine process ended" in line for line in lines)
            assert isinstance(server.join(), EngineDeadError)

    @pytest.mark.slow  # the threads above show the same, but for the exit status
    def test_of_the_engine_process_ends_the_front(self, make_process: ProcessMaker, capfd):
        with make_process() as server:
            pid = server.stats()["pid"]
            os.kill(pid, signal.SIGKILL)
            assert server.end()[0] == 2
            assert not is_running(pid)
        said = capfd.readouterr().err
        assert "exit status -9" in said and "Traceback" not in said


class TestStall:
    """An engine that stands still, and has not ended: what the heartbeat is for."""

    def test_it_is_seen_and_so_is_its_end(self, make_server: ServerMaker):
        with make_server() as server, open_stream(server, **SHORTER) as lines:
            with server.engines[0].frozen():
                wait_until(lambda: server.http.get("/health").status_code == 503)
                for path in ("/health", "/ready"):
                    assert server.http.get(path).json() == {"status": "stalled"}
                assert (scrape(server.http).get("jsg:engine_up"), scrape(server.http).state) == (0, "stalled")
            wait_until(lambda: server.http.get("/health").status_code == 200)
            assert data_of(lines)[-1]["meta_info"]["completion_tokens"] == 300
            assert (scrape(server.http).get("jsg:engine_up"), scrape(server.http).state) == (1, "ready")

    def test_a_stopped_engine_does_not_keep_the_server_from_ending(self, make_process: ProcessMaker):
        with make_process(server={"shutdown_timeout": 0.3}) as server, open_stream(server) as lines:
            pid = server.stats()["pid"]
            os.kill(pid, signal.SIGSTOP)
            server.process.terminate()
            assert any("shutting down" in line for line in lines)
            assert server.end()[0] == 0
            assert not is_running(pid)
