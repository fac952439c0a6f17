"""What systemd learns of a server's life."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jsg.server.service_manager import READY, notify
from tests.server.threads import ServerMaker


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.settimeout(20)
        yield made


@pytest.mark.parametrize("name", ["{folder}/notify", "@jsg-test-{folder}"])
def test_it_learns_that_the_server_is_ready_and_that_it_ends(
    make_server: ServerMaker, listener: socket.socket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
):
    address = name.format(folder=tmp_path)
    listener.bind(address.replace("@", "\0", 1))
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with make_server() as server:
        assert listener.recv(100) == b"READY=1"
        assert server.http.get("/ready").status_code == 200
        server.terminate()
        assert listener.recv(100) == b"STOPPING=1"
        assert server.join() is None


def test_a_server_that_nobody_asks_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify(READY)
    for address in ("", str(tmp_path / "gone"), "/" * 200):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify(READY)
