"""Every line that a server writes to stderr has time, level and source, in the format of `--log-format`."""

import signal
import socket
import subprocess
import sys

import pytest

from tests.engine.fake_core import CRASHING_TOKEN, FAILING_TOKEN, LAST_WORDS, RAISING_TOKEN, TOO_LARGE
from tests.server.log_lines import LogRecord, read_records
from tests.server.running import ProcessMaker, RunningServer

SMALL = ("--max-total-tokens", "512", "--max-running-requests", "2")
FORMATS = [pytest.param("text", marks=pytest.mark.slow), "json"]


def ask(server: RunningServer) -> None:
    """Sends requests of which each is logged in another way."""
    for body in ({"text": "a"}, {"txet": "a"}, {"input_ids": [RAISING_TOKEN]}, {"input_ids": [FAILING_TOKEN]}):
        server.http.post("/generate", json=body)
    server.http.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "service_tier": "flex"}
    )
    url = server.http.base_url
    with socket.create_connection((url.host, url.port), 10) as connection:
        connection.sendall(b"no HTTP\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")


def named(records: list[LogRecord], source: str) -> list[tuple[str, str]]:
    return [(record.level, record.message) for record in records if record.source == source]


@pytest.mark.parametrize("log_format", FORMATS)
def test_a_server_and_the_crash_of_its_engines(make_process: ProcessMaker, capfd, log_format: str):
    options = {"log_format": log_format, "log_requests": True, "dp_size": 2}
    with make_process(server=options) as server:
        ask(server)
        for _ in range(3):  # a request of an engine that ends moves once
            server.http.post("/generate", json={"input_ids": [CRASHING_TOKEN]})
        server.process.wait(30)
    records = read_records(log_format, capfd.readouterr().err)
    assert [level for level, message in named(records, "front") if message.endswith("KV pool 2 MB")] == ["INFO"]
    requests = [level for level, _ in named(records, "requests")]
    assert requests[:6] == ["INFO", "WARNING", "ERROR", "ERROR", "INFO", "WARNING"]
    engines = [*named(records, "engine-0"), *named(records, "engine-1")]
    assert [level for level, message in engines if "a request could not be added\nTraceback" in message] == ["ERROR"]
    assert any("Invalid HTTP request" in message for _, message in named(records, "front"))
    assert (
        named(records, "front")[-1][0] == "ERROR"
        and "all engine processes have ended" in named(records, "front")[-1][1]
    )
    lines = LAST_WORDS.decode().splitlines()
    assert [level for level, message in named(records, "other") if message.startswith(lines[0])] == ["CRITICAL"] * 2
    assert sum(message.endswith(lines[-1]) for _, message in named(records, "other")) == 2, "nothing of a crash is lost"


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_command(make_real_server: ProcessMaker, capfd, log_format: str):
    """A real engine, from its start to its end by a signal."""
    with make_real_server("--log-format", log_format, "--log-requests") as server:
        body = {"text": "a", "sampling_params": {"regex": "[0-9]{3}", "max_new_tokens": 8}}
        assert server.http.post("/generate", json=body, timeout=300).status_code == 200
        ask(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
    records = read_records(log_format, capfd.readouterr().err)
    assert any("memory plan" in message for _, message in named(records, "front"))
    assert len(named(records, "requests")) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_errors_of_a_start(log_format: str):
    for arguments, said in (
        (("serve", "tiny", "--page-size", "0"), "--page-size must be in"),
        (("serve", "no/such-model-here"), "no/such-model-here"),
        (("serve", "tiny", "--config", "/nothing/there.yaml"), "must be a file that can be read"),
        (("compile", "tiny", "--out", "x", "--target", "b9"), "--target must name some of"),
    ):
        [record] = run(log_format, *arguments)
        assert record.level == "ERROR" and said in record.message


@pytest.mark.slow
@pytest.mark.long
def test_the_command_that_compiles(tmp_path, monkeypatch):
    """XLA's own lines are of the format too."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    records = run("json", "compile", "tiny", "--out", str(tmp_path / "programs"), *SMALL)
    assert any("memory plan" in message for _, message in named(records, "compile"))
    assert any(level == "INFO" and ".cc:" in message for level, message in named(records, "other"))


def run(log_format: str, *arguments: str) -> list[LogRecord]:
    """The log of a command."""
    command = [sys.executable, "-m", "jsg.cli", *arguments, "--log-format", log_format]
    return read_records(log_format, subprocess.run(command, capture_output=True, text=True, timeout=300).stderr)


@pytest.mark.slow
def test_a_start_that_fails_says_so_in_one_record(make_process: ProcessMaker, capfd):
    with make_process(engine={"model_path": TOO_LARGE}, server={"log_format": "json"}, wait=False) as server:
        assert server.end()[0] == 2
    [record] = read_records("json", capfd.readouterr().err)
    assert record.level == "ERROR" and "--mem-fraction-static" in record.message
