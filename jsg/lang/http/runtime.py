"""`jsg.Runtime`: `jsg serve` in a process of its own, for programs of this process."""

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
import json
import logging
import os
import queue
import re
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self, final

from jsg.config import KEY_VARIABLES, EngineConfig, ServerConfig, option
from jsg.errors import BackendError, ConfigError, near
from jsg.lang.http.endpoint import RuntimeEndpoint
from jsg.lang.program.defaults import flush_cache
from jsg.lang.streams.loop import shared_loop, wait_for
from jsg.option_sources import environment_keys, read_keys

START_TIMEOUT_S = 600.0
END_S = 5.0  # beyond the time that these options of the server give to requests
ENDING = ("drain_delay", "shutdown_timeout")
NUM_KEPT_LINES = 200
NUM_SHOWN_LINES = 20

logger = logging.getLogger(__name__)

_READY = re.compile(r"is ready at (http://\S+) after")


@final
class Runtime:
    """A jsg server of one's own, and the backend that reaches it.

    The server ends with `shutdown`, at the end of a `with` block, and with this process, however this process ends. The
    lines that it prints go to the logger of this module.

    Attributes:
        url: The address of the server.
        endpoint: The backend that reaches it.
    """

    def __init__(
        self,
        model_path: str = "tiny",
        port: int | None = None,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        **flags: Any,
    ) -> None:
        """Starts the server and waits until it takes requests.

        Args:
            model_path: A directory, a hub name, or a model inside the package: "tiny", or "tiny-vision", which sees.
            port: The port of the server; None takes a free one.
            start_timeout_s: Seconds after which the server must be ready.
            **flags: Options of `jsg serve`, named as fields of `jsg.config.EngineConfig` and `ServerConfig`. Keys go
                through a pipe, so that the list of processes shows none. Where they are not given, those in the
                environment count, as for `jsg serve`. The backend uses the admin's key, or the first key of `api_key`
                or of `api_key_file`.

        Raises:
            ConfigError: A flag is unknown or wrong.
            BackendError: The server ended, or was not ready in time. The message has its last lines.
        """
        flags = environment_keys(os.environ) | flags
        arguments, secrets = serve_arguments({"model_path": model_path, "port": port or 0} | flags)
        key = _own_key(flags)
        self._process = _start(arguments, secrets)
        self._lines: collections.deque[str] = collections.deque(maxlen=NUM_KEPT_LINES)
        grace_s = END_S + sum(flags.get(name, getattr(ServerConfig(), name)) for name in ENDING)
        self._end = weakref.finalize(self, _end, self._process, grace_s, os.getpid())
        try:
            self.url = self._wait_until_ready(start_timeout_s)
            self.endpoint = RuntimeEndpoint(self.url, api_key=key)
        except BaseException:  # also Ctrl-C, because the caller would have no object with which to end the server
            self._end()
            raise

    def as_backend(self) -> RuntimeEndpoint:
        """Gives the backend that reaches the server."""
        return self.endpoint

    def generate(
        self, prompt: str | Sequence[str], sampling_params: dict[str, Any] | None = None, **fields: Any
    ) -> Any:
        """Continues one prompt or several. `fields` are further ones of `POST /generate`. Raises JsgError."""
        return wait_for(self._generate(prompt, sampling_params, fields))

    async def async_generate(
        self, prompt: str | Sequence[str], sampling_params: dict[str, Any] | None = None, **fields: Any
    ) -> Any:
        """Does the same as `generate`, for asyncio. Cancelling it aborts the request."""
        return await asyncio.wrap_future(self._generate(prompt, sampling_params, fields))

    def _generate(
        self, prompt: str | Sequence[str], sampling_params: dict[str, Any] | None, fields: dict[str, Any]
    ) -> concurrent.futures.Future[Any]:
        body = {"text": prompt, "sampling_params": sampling_params or {}} | fields
        return shared_loop().submit(self.endpoint.post("/generate", body))

    def cache_prefix(self, prefix: str) -> None:
        """Computes a prompt, so that longer prompts find it in the cache. Raises JsgError."""
        self.generate(prefix, {"max_new_tokens": 0})

    def get_server_info(self) -> dict[str, Any]:
        """Gives the options of the server, its model and its counters. Raises JsgError."""
        return self.endpoint.get_server_info()

    @property
    def model_info(self) -> dict[str, Any]:
        """Does what `RuntimeEndpoint.model_info` says."""
        return self.endpoint.model_info

    def flush_cache(self) -> bool:
        """Forgets cached prefixes; gives False, and forgets nothing, while requests run. Raises JsgError."""
        return flush_cache(self.endpoint)

    @property
    def log(self) -> str:
        """The last lines that the server has printed."""
        return "\n".join(self._lines)

    def shutdown(self) -> None:
        """Ends the server, after requests under way have finished. A second call does nothing.

        In a fork of the process that started the server, it only closes connections.
        """
        if self._end.alive:
            try:
                self.endpoint.shutdown()
            finally:
                self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _wait_until_ready(self, timeout_s: float) -> str:
        assert self._process.stdout is not None
        said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(
            target=_read, args=(self._process.stdout, self._lines, said), name="jsg-serve-output", daemon=True
        ).start()
        try:
            url = said.get(timeout=timeout_s)
        except queue.Empty:
            self._end()
            raise BackendError(
                f"jsg serve must be ready within {timeout_s:g} s, but is not; raise start_timeout_s{self._shown_log()}"
            ) from None
        if url is None:
            status = self._process.wait()
            raise BackendError(f"jsg serve ended with status {status} before it was ready{self._shown_log()}")
        return url

    def _shown_log(self) -> str:
        lines = list(self._lines)[-NUM_SHOWN_LINES:]
        return "; its last lines:\n" + "\n".join(lines) if lines else "; it printed nothing"


def serve_arguments(flags: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Gives the arguments of `jsg serve` for fields of `EngineConfig` and `ServerConfig`, those with keys separately.

    Raises:
        ConfigError: A field is unknown or wrong.
    """
    engine, server = ({f.name for f in dataclasses.fields(c)} for c in (EngineConfig, ServerConfig))
    if unknown := sorted(set(flags) - engine - server):
        known = sorted(engine | server)
        raise ConfigError(
            f"unknown option {unknown[0]!r} of a Runtime{near(unknown[0], known)}; known are {', '.join(known)}"
        )
    EngineConfig(**{name: value for name, value in flags.items() if name in engine})  # raises for a wrong value
    ServerConfig(**{name: value for name, value in flags.items() if name in server})
    arguments: list[str] = ["serve"]
    secrets: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            arguments += [option(name)] * value
        elif value is not None:
            each = value if isinstance(value, list | tuple) else [value]
            (secrets if name in KEY_VARIABLES else arguments).extend(f"{option(name)}={item}" for item in each)
    return arguments, secrets


def _own_key(flags: dict[str, Any]) -> str | None:
    """Gives a key of the server with these flags, the admin's before others. Raises ConfigError."""
    given = flags.get("api_key") or ()
    keys = [flags.get("admin_api_key"), *([given] if isinstance(given, str) else given)]
    if (path := flags.get("api_key_file")) is not None:
        keys += [key for _, key in read_keys(Path(path))]
    return next((key for key in keys if key), None)


def _start(arguments: Sequence[str], secrets: Sequence[str]) -> subprocess.Popen[str]:
    """Starts the server's process, which ends with this process, and which Ctrl-C in a terminal does not reach."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jsg.lang.http.watched", "jsg.cli", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        errors="replace",
        env={name: value for name, value in os.environ.items() if name not in KEY_VARIABLES.values()}
        | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the process has ended already and has printed why
        os.write(process.stdin.fileno(), json.dumps(list(secrets)).encode() + b"\n")
    return process


def _read(output: IO[str], lines: "collections.deque[str]", said: "queue.SimpleQueue[str | None]") -> None:
    """Reads the lines of the server until it ends; puts its URL into `said` when it is ready, and None at its end."""
    with output:
        for line in output:
            lines.append(line.rstrip("\n"))
            logger.info("%s", lines[-1])
            if found := _READY.search(line):
                said.put(found[1])
    said.put(None)


def _end(process: subprocess.Popen[str], grace_s: float, owner_pid: int) -> None:
    if os.getpid() != owner_pid:  # a fork of the owner does not own the server
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()
