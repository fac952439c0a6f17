"""The start of a server: when it listens, what it prints, and what keeps it from starting."""

import contextlib
import functools
import json
import shlex
import socket
import subprocess
import time
from typing import cast

import pytest
from uvicorn.protocols.http.h11_impl import H11Protocol

from jsg.config import ServerConfig
from jsg.errors import ConfigError
from jsg.free_ports import free_ports
from jsg.server.app import create_app
from jsg.server.front import FrontDoor
from jsg.server.opening import HttpServer
from jsg.server.run import _listen
from jsg.server.telemetry.telemetry import Telemetry
from tests.engine.fake_core import CRASHING, TOO_LARGE
from tests.server.running import ProcessMaker, RunningServer, is_listening, wait_until
from tests.server.scrape import scrape
from tests.server.threads import ServerMaker


class TestGreeting:
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
            assert response.status_code == 400 and "template" in response.json()["error"]["message"]


class TestStart:
    def test_it_listens_while_the_engine_loads(self, make_server: ServerMaker, tmp_path):
        port, gate = free_ports(), tmp_path / "gate"
        with make_server(engine={"tokenizer_path": str(gate)}, server={"port": port}, wait=False) as server:
            server.http.base_url = f"http://127.0.0.1:{port}"
            wait_until(lambda: is_listening(port))
            assert server.http.get("/health").json() == {"status": "loading"}
            assert server.http.get("/ready").status_code == 503
            early = server.http.post("/generate", json={"text": "a"})
            assert early.status_code == 503 and "loading" in early.json()["error"]["message"]
            result = scrape(server.http)  # metrics answer already
            assert (result.get("jsg:engine_up"), result.state) == (0, "loading")
            assert 0 <= time.time() - result.get("process_start_time_seconds") < 60
            gate.touch()
            server.wait_until_ready()
            assert server.http.get("/ready").status_code == 200
            after = scrape(server.http)
            assert (after.get("jsg:engine_up"), after.state) == (1, "ready")
            assert after.get("process_start_time_seconds") == result.get("process_start_time_seconds")
            assert "jsg:requests_running" in scrape(server.http).samples

    @pytest.mark.slow  # the threads below show the same, but for the exit status
    def test_a_start_that_fails_ends_it(self, make_process: ProcessMaker, capfd):
        with make_process(engine={"model_path": TOO_LARGE}, wait=False) as server:
            assert server.end()[0] == 2
        said = capfd.readouterr().err
        assert "--mem-fraction-static" in said and "Traceback" not in said

    @pytest.mark.parametrize(("model", "said"), [(TOO_LARGE, "--mem-fraction-static"), (CRASHING, "exit status 7")])
    def test_why_the_engine_does_not_start_is_told(self, make_server: ServerMaker, model: str, said: str):
        with make_server(engine={"model_path": model}, wait=False) as server:
            assert said in str(server.join())

    def test_an_address_in_use_ends_it(self, make_server: ServerMaker):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with make_server(server={"port": port}, wait=False) as server:
                error = server.join()
        assert isinstance(error, ConfigError) and "--port" in str(error)


class TestListener:
    def test_http_is_read_by_h11_and_there_are_no_websockets(self):
        config = ServerConfig()
        door, telemetry = FrontDoor(), Telemetry(config)
        uvicorn_config = HttpServer(create_app(door, config, telemetry), door, telemetry).config
        uvicorn_config.load()
        made = cast(functools.partial, uvicorn_config.http_protocol_class)
        assert issubclass(made.func, H11Protocol)
        assert uvicorn_config.ws_protocol_class is None

    def test_a_server_open_to_all_says_so(self, make_server: ServerMaker, caplog):
        for server, is_warned in (
            ({"host": "0.0.0.0"}, True),
            ({"host": "0.0.0.0", "api_key": ("key",)}, False),
            ({"host": "127.0.0.1"}, False),
        ):
            caplog.clear()
            with make_server(server=server):
                pass
            assert ("asks for no key" in caplog.text) is is_warned

    def test_an_address_that_is_taken_is_named(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"free address of this machine, but 127.0.0.1 with {port} gave: "):
                _listen(ServerConfig(port=port))

    def test_answers_do_not_wait_for_acknowledgements(self):
        listener = _listen(ServerConfig(port=0))
        with contextlib.closing(listener), socket.create_connection(listener.getsockname()):
            accepted, _ = listener.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
