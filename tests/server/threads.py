"""A server in a thread of this process, on a real socket, around the scripted engine in a thread of its own.

Everything but the processes is what `jsg serve` runs: the listener, uvicorn, the application, the engine's client and
the engine's loop, with ZeroMQ and msgpack between them. A process costs seconds of imports; this costs milliseconds.
"""

import asyncio
import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from jsg.config import EngineConfig, ServerConfig
from jsg.constrained.compiler import compile_tables
from jsg.engine.child.heartbeat import HeartbeatSender, LoopClock
from jsg.engine.child.process import END_FLUSH_MS, FrontLink, serve
from jsg.engine.child.protocol import Failure, FromEngine, Progress
from jsg.engine.front.children import EngineChild
from jsg.engine.front.fleet import open_engines
from jsg.engine.front.grammar_compiler import _Known
from jsg.errors import JsgError
from jsg.server.ending import EndRequest
from jsg.server.native import health
from jsg.server.run import Directories, serve_until
from tests.engine.fake_core import FakeCore
from tests.server.running import END_DEADLINE_S, RunningServer

KILLED = -9


class EngineThread(EngineChild):
    """An engine process that is a thread: the loop of the process around the scripted core.

    It can be frozen and killed as a process can be. A frozen one gives no heartbeat either.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.heartbeat_fd, beats_fd = os.pipe()
        self._directory = tempfile.TemporaryDirectory(prefix="jsg-", ignore_cleanup_errors=True)
        self._config = config
        self._is_thawed = threading.Event()
        self._is_thawed.set()
        self._is_killed = threading.Event()
        self._status = 0
        self._thread = threading.Thread(target=self._run, args=(beats_fd,), name="scripted-engine", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"ipc://{self._directory.name}/engine"

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> int:
        self._thread.join()
        return self._status

    def kill(self) -> None:
        self._is_killed.set()
        self._is_thawed.set()

    def end(self, grace_s: float) -> None:
        self._thread.join(grace_s)
        self.kill()
        self._thread.join()
        self.remove_directory()

    def remove_directory(self) -> None:
        self._directory.cleanup()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It stands still meanwhile."""
        self._is_thawed.clear()
        try:
            yield
        finally:
            self._is_thawed.set()

    def pass_on(self) -> None:
        """Waits while it is frozen; raises when it was killed."""
        self._is_thawed.wait()
        if self._is_killed.is_set():
            raise SystemExit(KILLED)

    def sleep(self, seconds: float) -> None:
        """Sleeps, or raises when it is killed."""
        self._is_killed.wait(seconds)
        self.pass_on()

    def _run(self, beats_fd: int) -> None:
        link, clock, flush_ms = FrontLink(self.address), _Clock(self), END_FLUSH_MS
        heartbeat = HeartbeatSender(beats_fd, clock)

        def report(progress: Progress) -> None:
            link.send(FromEngine(progress=progress))

        try:
            core = _ThreadCore(self._config, self, report)
            link.send(FromEngine(ready=core.info))
            serve(core, link, os.getppid(), clock)
        except JsgError as error:
            link.send(FromEngine(failure=Failure.of(error)))
            self._status, flush_ms = 2, END_DEADLINE_S * 1000  # on a busy machine too it arrives
        except SystemExit as end:
            self._status = int(end.code or 0)
        finally:
            heartbeat.stop()
            link.close(flush_ms)


class _Clock(LoopClock):
    """One that nobody can read while the engine is frozen, so that there are no beats."""

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        super().__init__()

    @property
    def num_turns(self) -> int:
        self._engine._is_thawed.wait()
        return self._num_turns

    @num_turns.setter
    def num_turns(self, value: int) -> None:
        self._num_turns = value


class _ThreadCore(FakeCore):
    """The scripted core, which ends its thread where it would end its process."""

    def __init__(self, config: EngineConfig, engine: EngineThread, report: Callable[[Progress], None]) -> None:
        self._engine = engine
        super().__init__(config, report=report)

    @property
    def has_work(self) -> bool:
        self._engine.pass_on()
        return super().has_work

    def sleep(self, seconds: float) -> None:
        self._engine.sleep(seconds)

    def crash(self, status: int) -> NoReturn:
        raise SystemExit(status)


class ServerThread(RunningServer):
    """A server in a thread.

    Attributes:
        engines: What it serves, one for each `--dp-size`.
    """

    def __init__(self, engine: EngineConfig, server: ServerConfig, tokenizer_dir: Path) -> None:
        super().__init__()
        self._arguments = engine, server, Directories(tokenizer_dir, None)
        self._is_greeted = threading.Event()
        self._loop: Any = asyncio.new_event_loop()
        self._told_to_end = EndRequest(server)
        self._error: BaseException | None = None
        self.engines = [EngineThread(engine) for _ in range(server.dp_size)]
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)
        self._thread.start()

    def wait_until_ready(self) -> None:
        assert self._is_greeted.wait(END_DEADLINE_S)
        if not self.greeting:
            raise AssertionError("the server ended before it was ready") from self._error
        self.find_address()

    def terminate(self) -> None:
        """As a signal does, but for the last one, which ends the process at once."""
        self._loop.call_soon_threadsafe(self._told_to_end.repeat)

    def join(self) -> BaseException | None:
        """Waits for its end; what it raised."""
        self._thread.join(END_DEADLINE_S)
        assert not self._thread.is_alive(), "the server does not end"
        return self._error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends it at once, if it has not ended."""
        self.http.close()
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._serving.cancel)
        error = self.join()
        if error is not None and not isinstance(error, JsgError | asyncio.CancelledError):
            raise error

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._is_greeted.set()

    async def _serve(self) -> None:
        self._serving = asyncio.current_task()
        engine, server, directories = self._arguments
        client = open_engines(self.engines, engine)
        client.grammars.warm = _nothing  # a grammar that comes starts its process, which costs most of a second
        client.grammars.check = _nothing  # nor does one that a probe of the health sends
        client.grammars._cache.put(health.GRAMMAR.key, _Known(_probe_tables(), None))
        try:
            await serve_until(self._told_to_end, client, engine, server, directories, time.monotonic(), self._greet)
        finally:
            for transport in [*self._loop._transports.values()]:  # those of readers that have stopped reading
                transport.abort()
            await asyncio.sleep(0)

    def _greet(self, greeting: str) -> None:
        self.greeting = greeting
        self._is_greeted.set()


@functools.cache
def _probe_tables() -> bytes:
    """The tables of the grammar of a probe, for engines that are real."""
    return compile_tables(health.GRAMMAR).to_bytes()


async def _nothing(*_: object) -> None:
    """In place of a warm-up, or of compiling a grammar."""


ServerMaker = Callable[..., contextlib.AbstractContextManager[ServerThread]]
