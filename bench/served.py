"""Runs a server as another process, and reads from the kernel what its processes use."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

END_LIMIT_S = 60
ENGINE_MODULE = "jsg.engine.child.process"
WORKER_MODULE = "jsg.server.workers.process"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What one process uses at a moment.

    Attributes:
        rss: Bytes of mapped memory that is present. Pages that it shares with others count in full.
        pss: The same, but a page that k processes share counts as 1/k.
        anonymous: The same without pages of files, which is what the process itself has written. "Private" memory would
            depend on other processes: a library's pages become private when the last other process that maps them ends.
        num_threads, num_fds: The numbers of threads and of open file descriptors.
        cpu_s: Processor time since the start of the process.
    """

    rss: int
    pss: int
    anonymous: int
    num_threads: int
    num_fds: int
    cpu_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A running server.

    Attributes:
        url: Its address.
        pids: Its process ids by name: `front`, `engine`, and those of workers.
    """

    url: str
    pids: dict[str, int]

    def usage(self) -> dict[str, Usage]:
        """The usage of each process."""
        return {name: usage_of(pid) for name, pid in self.pids.items()}

    def front_cpu_s(self) -> float:
        """The processor time of all processes but the engine."""
        return sum(usage.cpu_s for name, usage in self.usage().items() if name != "engine")


@contextlib.contextmanager
def served(arguments: Sequence[str], *, module: str = "jsg.cli", log: Path | None = None) -> Iterator[Served]:
    """Starts `python -m MODULE ARGUMENTS`, which must print the greeting of `jsg serve`, and stops it at the end.

    Args:
        arguments: The command line. With `--port 0` the kernel chooses the port.
        module: The module to run.
        log: A file for its stderr; None drops it.

    Raises:
        RuntimeError: The server ended before it was ready, or with a status other than 0.
    """
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(log.open("wb")) if log else subprocess.DEVNULL
        process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        stack.callback(_end, process)
        address = _address(process)
        workers = {f"worker-{number}": pid for number, pid in enumerate(children_of(process.pid, WORKER_MODULE), 1)}
        yield Served(address, {"front": process.pid, "engine": engine_of(process.pid), **workers})
        process.send_signal(signal.SIGTERM)
        status = process.wait(END_LIMIT_S)
        if status != 0:
            raise RuntimeError(f"the server ended with status {status}; its log says why")


def usage_of(pid: int) -> Usage:
    """What a process uses now."""
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _read(pid, "smaps_rollup"), re.MULTILINE))
    stat = _read(pid, "stat").rpartition(")")[2].split()
    return Usage(
        rss=int(fields["Rss"]) * 1024,
        pss=int(fields["Pss"]) * 1024,
        anonymous=int(fields["Anonymous"]) * 1024,
        num_threads=len(os.listdir(f"/proc/{pid}/task")),
        num_fds=len(os.listdir(f"/proc/{pid}/fd")),
        cpu_s=(int(stat[11]) + int(stat[12])) / TICKS_PER_S,
    )


def tree_of(pid: int) -> list[int]:
    """A process and all its descendants that run now."""
    children: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = int(_read(int(entry), "stat").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(entry))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def _address(process: subprocess.Popen[str]) -> str:
    """The server's address from its greeting, which is read to its end."""
    assert process.stdout is not None
    found = None
    for line in process.stdout:
        found = found or re.search(r"ready at (http://\S+)", line)
        if line.startswith("curl "):
            break
    if found is None:
        raise RuntimeError(f"the server ended with status {process.wait(END_LIMIT_S)} before it was ready")
    return found[1]


def engine_of(pid: int) -> int:
    """The engine process of a front with one engine."""
    engines = engines_of(pid)
    if len(engines) != 1:
        raise RuntimeError(f"the server should have one engine process, but has {len(engines)}")
    return engines[0]


def engines_of(pid: int) -> list[int]:
    """The engine processes of a front, oldest first."""
    return children_of(pid, ENGINE_MODULE)


def children_of(pid: int, module: str) -> list[int]:
    """The children of a process that run this module, oldest first."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                is_child = int(_read(int(entry), "stat").rpartition(")")[2].split()[1]) == pid
                if is_child and module in _read(int(entry), "cmdline").split("\0"):
                    found.append(int(entry))
    return sorted(found)


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8")


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the server if it still runs. The engine ends with its parent."""
    if process.poll() is None:
        process.kill()
        process.wait(END_LIMIT_S)
    if process.stdout is not None:
        process.stdout.close()
