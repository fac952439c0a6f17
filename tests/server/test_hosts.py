"""`jsg serve` on two hosts, which are two processes on loopback: what clients see, and what ends the other host."""

import base64
import contextlib
import dataclasses
import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from jsg.engine.hosts.watch import HOST_LOST
from jsg.free_ports import free_ports
from tests.engine.parallel_embedded import square
from tests.server.battery import engine_pid
from tests.server.real_model import write_real_model
from tests.server.running import RunningServer, running

END_S = 15.0
FEW_PROGRAMS = ("--deterministic", "--max-running-requests", "4", "--max-total-tokens", "32768")
"""A host that follows compiles its programs at every start: on CPUs JAX keeps none of them."""
LISTENS = "0A"  # of /proc/net/tcp
ADDRESS = "127.0.0.2"  # what listens on the wrong interface listens on 127.0.0.1, or on all
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_model(tmp_path_factory.mktemp("hosts") / "model")


@dataclasses.dataclass
class Hosts:
    """A leader that is ready and the host that follows it."""

    leader: RunningServer
    follower: subprocess.Popen[str]
    said: Path

    def exit_status_of_leader(self) -> int:
        return self.leader.process.wait(END_S)


@pytest.fixture
def make_hosts(model: Path, tmp_path: Path, compile_cache_dir: str) -> Callable[..., contextlib.AbstractContextManager]:
    """Starts both; `program` is what runs the follower, and `before` is called before it is started."""

    @contextlib.contextmanager
    def make(
        *options: str,
        served: str = str(model),
        program: tuple[str, ...] = ("jsg.cli",),
        before: Callable[[list[str]], None] | None = None,
    ):
        address = f"{ADDRESS}:{free_ports(count=2)}"
        command = ["serve", served, "--port", "0", "--compilation-cache-dir", compile_cache_dir, *FEW_PROGRAMS]
        command += ["--tp-size", "2", "--nnodes", "2", "--dist-init-addr", address, "--dist-timeout", "5", *options]
        said = tmp_path / "follower.txt"
        with running(["-m", "jsg.cli", *command, "--node-rank", "0"], wait=False) as leader, said.open("w") as output:
            if before is not None:
                before(command)
            follower = subprocess.Popen(
                [sys.executable, "-m", *program, *command, "--node-rank", "1"],
                stdout=output,
                stderr=output,
                text=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
            try:
                leader.wait_until_ready()
                yield Hosts(leader, follower, said)
            finally:
                follower.kill()
                follower.wait()

    return make


@contextlib.contextmanager
def streaming(hosts: Hosts) -> Iterator[Iterator[str]]:
    """The lines of an answer that does not end soon, after the first of them."""
    body = {"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 20_000, "ignore_eos": True}}
    with hosts.leader.http.stream("POST", "/generate", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        yield lines


def listeners(pid: int) -> set[str]:
    """Addresses at which a process listens for TCP. /proc writes them in words of the host's byte order."""
    sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir() if file.is_symlink()}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENS and f"socket:[{rest[5]}]" in sockets:
                words = bytes.fromhex(local.partition(":")[0])
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = ipaddress.ip_address(raw)
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def test_listeners_are_found_where_they_listen():
    with (
        socket.create_server((ADDRESS, 0)),
        socket.create_server(("::1", 0), family=socket.AF_INET6),
        socket.create_server(("0.0.0.0", 0)),
    ):
        assert listeners(os.getpid()) >= {ADDRESS, "::1", "0.0.0.0"}


@pytest.mark.slow
def test_two_hosts_serve_together_and_end_together(make_hosts):
    """Text, a grammar and a picture, by one model that can look at it: a host takes half a minute to start."""

    def start_a_wrong_one(command: list[str]) -> None:
        wrong = [*command, "--node-rank", "1", "--page-size", "4"]
        done = subprocess.run([sys.executable, "-m", "jsg.cli", *wrong], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "the leader refuses this host: " in done.stderr
        assert "Traceback" not in done.stderr

    with make_hosts("--max-total-tokens", "2048", before=start_a_wrong_one, served="tiny-vision") as hosts:
        http = hosts.leader.http
        sampling = {"max_new_tokens": 12, "temperature": 0}
        first, again = (
            http.post("/generate", json={"text": "the city of", "sampling_params": sampling}).json() for _ in range(2)
        )
        assert first["text"] == again["text"]
        assert again["meta_info"]["cached_tokens"] > 0
        schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
        body = {"messages": [{"role": "user", "content": "a"}], "response_format": schema, "max_tokens": 100}
        answer = http.post("/v1/chat/completions", json=body, timeout=60).json()
        assert json.loads(answer["choices"][0]["message"]["content"]).keys() == {"city"}
        picture = base64.b64encode(square()).decode()
        body = {"text": "<image>\nWhat color is the square?", "image_data": picture, "sampling_params": sampling}
        assert http.post("/generate", json=body, timeout=60).json()["text"] == " Red."
        assert listeners(engine_pid(hosts.leader)) <= {ADDRESS}
        assert listeners(hosts.follower.pid) <= {ADDRESS, "127.0.0.1"}  # the address that faces the leader
        hosts.leader.process.send_signal(signal.SIGTERM)
        assert hosts.exit_status_of_leader() == 0 and hosts.follower.wait(END_S) == 0
        assert "Traceback" not in hosts.said.read_text()


def end(hosts: Hosts) -> None:
    hosts.follower.send_signal(signal.SIGTERM)
    assert hosts.follower.wait(END_S) == -signal.SIGTERM


def stop(hosts: Hosts) -> None:
    hosts.follower.send_signal(signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "reason"),
    [(end, "host 1 is gone"), pytest.param(stop, "host 1 has given no sign of life", marks=pytest.mark.long)],
)
def test_a_follower_that_is_lost(make_hosts, capfd, harm: Callable[[Hosts], None], reason: str):
    with make_hosts() as hosts, streaming(hosts) as lines:
        harm(hosts)
        last = [line for line in lines if line.startswith("data: {")][-1]
        assert "error" in json.loads(last.removeprefix("data: "))
        with contextlib.suppress(httpx.TransportError):  # the front may be gone by now
            assert hosts.leader.http.get("/health").status_code == 503
        assert hosts.exit_status_of_leader() != 0
        assert reason in capfd.readouterr().err


@pytest.mark.slow
def test_a_follower_that_is_slow(make_hosts, tmp_path: Path, capfd):
    file = tmp_path / "slow"
    with make_hosts(program=("tests.server.slow_host", str(file))) as hosts, streaming(hosts) as lines:
        file.touch()
        since = time.monotonic()
        assert "error" in [line for line in lines if line.startswith("data: {")][-1]
        assert hosts.exit_status_of_leader() != 0
        assert time.monotonic() - since < END_S
        assert re.search(r"a step has taken more than 5 s .* and host 1 has not begun it", capfd.readouterr().err)


@pytest.mark.slow
def test_a_leader_that_is_lost(make_hosts):
    with make_hosts() as hosts:
        os.kill(engine_pid(hosts.leader), signal.SIGKILL)
        assert hosts.follower.wait(END_S) == HOST_LOST and hosts.exit_status_of_leader() != 0
        assert "the leader is gone" in hosts.said.read_text()
