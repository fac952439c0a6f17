"""Servers that run, in a process or (`threads.py`) in a thread, and what tests do with them."""

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]
END_DEADLINE_S = 20
POLL_DEADLINE_S = 20  # a busy machine is no failure

LONG = {"text": "ab", "stream": True, "sampling_params": {"max_new_tokens": 1000}}  # takes the scripted engine seconds
CHAT = [{"role": "user", "content": "ab"}]
LONG_STREAMS = {  # the same in every API that generates
    "/generate": LONG,
    "/v1/completions": {"prompt": "ab", "max_tokens": 1000, "stream": True},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 900, "stream": True},
    "/v1/responses": {"input": "ab", "max_output_tokens": 900, "stream": True},
    "/v1/messages": {"model": "fake", "messages": CHAT, "max_tokens": 900, "stream": True},
}


class RunningServer:
    """A server; `http` talks to it once it listens.

    Attributes:
        greeting: What it said when it was ready.
    """

    def __init__(self) -> None:
        self.http = httpx.Client(timeout=120, verify=False)  # a loaded machine takes long, and what hangs ends
        self.greeting = ""

    def wait_until_ready(self) -> None:
        """Waits for the greeting."""
        raise NotImplementedError

    def find_address(self) -> None:
        """Takes the address from the greeting."""
        match = re.search(r"ready at (http://\S+)", self.greeting)
        assert match, self.greeting
        self.http.base_url = match[1]

    def stats(self, headers: dict[str, str] | None = None) -> dict:
        return self.http.get("/get_server_info", headers=headers).json()["internal_states"][0]

    def wait_for_stats(self, headers: dict[str, str] | None = None, **wanted: int) -> None:
        """Waits until the engine's counters are the wanted ones."""
        deadline = time.monotonic() + POLL_DEADLINE_S
        while not wanted.items() <= (stats := self.stats(headers)).items():
            assert time.monotonic() < deadline, f"wanted {wanted}, got {stats}"
            time.sleep(0.02)

    def reset(self) -> None:
        """Ends what an earlier test left, and forgets the prefixes that it cached."""
        deadline = time.monotonic() + POLL_DEADLINE_S
        while self.http.post("/flush_cache").status_code != 200:
            assert time.monotonic() < deadline
            self.http.post("/abort_request", json={"abort_all": True})
            time.sleep(0.02)

    def send(self, path: str, body: dict, headers: dict[str, str] | None = None) -> HTTPConnection:
        """Sends a request and waits for nothing; closing what this gives is the client's leaving."""
        url = self.http.base_url
        connection = HTTPConnection(url.host, url.port or 80, timeout=20)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        return connection

    @contextlib.contextmanager
    def holding(self, count: int, headers: dict[str, str] | None = None) -> Iterator[None]:
        """So many requests that do not end soon; they have reached the engine, and their clients leave at the end."""
        with contextlib.ExitStack() as clients:
            before = self.stats(headers)["num_added"]
            for number in range(1, count + 1):
                clients.enter_context(contextlib.closing(self.send("/generate", LONG, headers)))
                self.wait_for_stats(headers, num_added=before + number)
            yield


class ServerProcess(RunningServer):
    """A front process with its engine process."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__()
        self.process = process

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if "curl " in line:
                break
        self.greeting = "".join(lines)
        assert self.greeting, f"no greeting; exit status {self.process.wait(END_DEADLINE_S)}"
        self.find_address()

    def end(self) -> tuple[int, str]:
        """Exit status and the rest of stdout."""
        assert self.process.stdout is not None
        rest = self.process.stdout.read()
        return self.process.wait(END_DEADLINE_S), rest


ProcessMaker = Callable[..., contextlib.AbstractContextManager[ServerProcess]]


REAL_OPTIONS = (  # one shape for every step, so that little compiles; it is small, so that a prefill takes many steps
    *("--deterministic", "--max-running-requests", "8", "--max-total-tokens", "65536"),
)


def serving(directory: Path, compile_cache_dir: str, *options: str) -> contextlib.AbstractContextManager[ServerProcess]:
    """A `jsg serve` of a small model."""
    command = ["-m", "jsg.cli", "serve", str(directory), "--port", "0", "--compilation-cache-dir", compile_cache_dir]
    return running([*command, *REAL_OPTIONS, *options])


@contextlib.contextmanager
def running(command: list[str], *, wait: bool = True) -> Iterator[ServerProcess]:
    """A front process of this Python. At the end it is told to end, and killed where it does not."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    server = ServerProcess(process)
    with process, server.http:
        try:
            if wait:
                server.wait_until_ready()
            yield server
        finally:
            server.http.close()
            process.terminate()  # so that it waits for its engine, whose CPU time then counts as that of the test
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_DEADLINE_S)
            process.kill()


def events_of(response: httpx.Response) -> list[dict]:
    """The events of a stream; it must end with [DONE]."""
    data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def data_of(lines: Iterable[str]) -> list[dict]:
    """The events of a stream of any API, with or without [DONE] at its end."""
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(item) for item in data if item != "[DONE]"]


def check_discreet(text: str) -> None:
    """Nothing that a client reads tells where the server lies or what its code was doing."""
    for secret in ("Traceback", 'File \\"', "ipc:", str(ROOT), sys.prefix, tempfile.gettempdir()):
        assert secret not in text


def key(name: str) -> dict[str, str]:
    """The headers of a call with this key."""
    return {"Authorization": f"Bearer {name}"}


def wait_until(condition: Callable[[], bool], deadline_s: float = POLL_DEADLINE_S) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def is_running(pid: int) -> bool:
    """Whether a process is there and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
