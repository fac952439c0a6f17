"""A server of a user who may write nothing in a home directory."""

import pathlib

import pytest

from tests.server.real_model import write_real_model
from tests.server.running import running

AS_ONE_WHO_OBEYS_MODES = """
import ctypes, os, sys
if os.geteuid() == 0:  # root writes everywhere, until it starts a program without any capability
    for capability in range(64):
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
OPTIONS = ("--port", "0", "--context-length", "128", "--max-total-tokens", "512", "--max-running-requests", "2")


@pytest.mark.slow
def test_a_server_starts_and_takes_grammars_without_a_home(tmp_path: pathlib.Path, monkeypatch, capfd):
    model = write_real_model(tmp_path / "model")
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    monkeypatch.setenv("HOME", str(home))
    command = ["-c", AS_ONE_WHO_OBEYS_MODES, "-m", "jsg.cli", "serve", str(model), *OPTIONS]
    with running(command) as server:
        body = {"text": "a", "sampling_params": {"regex": "[0-9]{3}", "max_new_tokens": 8}}
        response = server.http.post("/generate", json=body, timeout=300)
        assert response.status_code == 200 and response.json()["text"].isdigit()
    errors = capfd.readouterr().err
    assert errors.count(str(home)) == 1, errors
    assert f"{home}/.cache/jsg/xla cannot be made (Permission denied); set HOME to a directory" in errors
    assert not list(home.iterdir())
