"""A real application on a small cluster of this machine, and its processes, which carry a mark in their environment."""

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from tests.conftest import COMPILE_CACHE

ROOT = Path(__file__).parents[2]
RAY_PYTHON = ROOT / ".venv" / "ray" / "bin" / "python"
# The last option is for busy machines: the streams of a replica that was killed have time to end.
OPTIONS = "--max-total-tokens 8192 --max-running-requests 8 --context-length 2048 --shutdown-timeout 120"
FINISHED = r'requests_finished_total\{reason="length",route="/v1/completions"\} [1-9]'
MARK = "JSG_RAY_TEST"
DEADLINE_S = 240  # a busy machine is no failure
COMMANDS = {
    **{kind: f"ray::ServeReplica:jsg:{kind}" for kind in ("front", "replica", "directory")},
    "follower": "ray::Follower",
    "engine": "-m jsg.cli serve",
}


class RunningApplication:
    """The application, once it is ready.

    Attributes:
        http: A client of its proxy.
    """

    def __init__(self, process: subprocess.Popen[bytes], port: int, mark: str, log: Path) -> None:
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)
        self.process = process
        self._mark = f"{MARK}={mark}".encode()
        self._log = log

    def pids(self, kind: str = "") -> list[int]:
        """The processes of a kind; without one, all that exist for this application."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is(pid, kind)]

    def kill(self, kind: str) -> int:
        """Kills one process of a kind, with no time to end anything; of `jsg serve` its whole group."""
        pid = min(self.pids(kind))
        if kind == "engine":
            os.killpg(os.getpgid(pid), signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
        return pid

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Waits until something is so."""
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, self._log.read_text()[-4000:]
            time.sleep(0.2)

    def wait_for(self, kind: str, count: int, without: int = 0) -> None:
        """Waits until there are so many of a kind, and none of them is `without`."""
        self.wait(lambda: len(pids := self.pids(kind)) == count and without not in pids)

    def wait_until_all_answer(self) -> None:
        """Waits until every replica that should be there has answered a request."""
        tries = itertools.count()

        def is_so() -> bool:
            asked = {"model": "tiny", "prompt": f"try {next(tries)}", "max_tokens": 1}
            assert self.http.post("/v1/completions", json=asked).status_code == 200
            return len(self.pids("engine")) == len(self.pids("replica")) and all(map(_has_answered, self.urls))

        self.wait(is_so)

    @property
    def urls(self) -> list[str]:
        """The addresses of the replicas' servers."""
        commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in self.pids("engine")]
        return [f"http://127.0.0.1:{command[command.index('--port') + 1]}" for command in commands]

    def _is(self, pid: int, kind: str) -> bool:
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            marked = self._mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return marked and command != "" and COMMANDS.get(kind, "") in command
        return False


def _has_answered(url: str) -> bool:
    try:
        return re.search(FINISHED, httpx.get(url + "/metrics").text) is not None
    except httpx.HTTPError:  # it is not ready
        return False


@contextlib.contextmanager
def running(folder: Path, port: int, *arguments: str) -> Iterator[RunningApplication]:
    """Starts it with these options and ends it. No process of it may be left."""
    mark, log = uuid.uuid4().hex, folder / "log"
    environment = os.environ | {
        MARK: mark, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token",
        "HOME": str(folder), "JAX_COMPILATION_CACHE_DIR": str(COMPILE_CACHE),
    }  # fmt: skip
    command = [RAY_PYTHON, ROOT / "tests" / "ray" / "run_app.py", str(port), "model=tiny", "gpus=0", "host=127.0.0.1"]
    command += [f"python={sys.executable}", f"options={OPTIONS}", *arguments]
    with log.open("wb") as output, subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process:
        app = RunningApplication(process, port, mark, log)
        try:
            app.wait(lambda: b"READY\n" in log.read_bytes())
            yield app
        finally:
            app.http.close()
            process.terminate()
            process.wait()
            app.wait(lambda: not app.pids())
