"""The parent's side of an engine process. Standard library only: the process starts before slow imports."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import final

from jsg.config import EngineConfig
from jsg.engine.child.protocol import ENGINE_CORE, EngineStart, KvEvents
from jsg.engine.private_directory import temporary_directory

STDERR = 2


@final
class EngineChild:
    """A running engine process and the owner-only directory of its socket.

    Attributes:
        heartbeat_fd: The reading end of its heartbeat (`heartbeat.py`). Its reader closes it.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], directory: tempfile.TemporaryDirectory[str], heartbeat_fd: int
    ) -> None:
        self.heartbeat_fd = heartbeat_fd
        self._process = process
        self._directory = directory

    @classmethod
    def spawn(
        cls,
        config: EngineConfig,
        *,
        core: str = ENGINE_CORE,
        environment: Mapping[str, str] | None = None,
        kv_events: KvEvents | None = None,
        name: str = "engine",
    ) -> "EngineChild":
        """Starts the engine process and returns at once. `environment` is added to that of this process.

        The log calls the process by `name`.

        The child has the import path of its parent, no stdin, writes to stderr only, and is in a process group of its
        own, so that Ctrl-C in a terminal reaches the front only.
        """
        directory = temporary_directory()
        reading_fd, writing_fd = os.pipe()
        start = EngineStart(
            config=config,
            address=_address(directory.name),
            parent_pid=os.getpid(),
            heartbeat_fd=writing_fd,
            core=core,
            kv_events=kv_events,
            name=name,
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jsg.engine.child.process", json.dumps(dataclasses.asdict(start))],
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            process_group=0,
            pass_fds=(writing_fd,),
            env=os.environ
            | dict(environment or {})
            | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        os.close(writing_fd)
        return cls(process, directory, reading_fd)

    @property
    def address(self) -> str:
        """The socket at which the front listens for the engine."""
        return _address(self._directory.name)

    def wait(self) -> int:
        """Blocks until the process ends; returns its exit status."""
        return self._process.wait()

    def kill(self) -> None:
        """Kills the process; does not wait for it."""
        self._process.kill()

    def end(self, grace_s: float) -> None:
        """Waits up to `grace_s` for the process to end by itself, then kills it. Removes the directory."""
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.remove_directory()

    def remove_directory(self) -> None:
        """Removes the socket's directory, which an open connection does not need."""
        self._directory.cleanup()


def _address(directory: str) -> str:
    return f"ipc://{directory}/engine"
