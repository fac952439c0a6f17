"""Fixtures: servers around the scripted engine or a small real one, in threads of this process or in processes."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jsg.config import EngineConfig, ServerConfig
from tests.server.battery import Battery, firing
from tests.server.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer
from tests.server.mixed_run import MixedRun, a_mixed_run, quiet
from tests.server.real_model import write_real_model
from tests.server.running import ProcessMaker, RunningServer, ServerProcess, running, serving
from tests.server.scrape import scrape_until
from tests.server.scripted import ScriptedServer
from tests.server.threads import ServerMaker, ServerThread
from tests.server.vision_model import write_vision_model


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_byte_tokenizer(directory, CHAT_TEMPLATE)
    return directory


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the model of `vision_model.py` that sees pictures."""
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="session")
def plain_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain_tokenizer")
    write_byte_tokenizer(directory, None)
    return directory


@pytest.fixture(scope="module")
def two_keys(make_server: ServerMaker) -> Iterator[RunningServer]:
    with make_server(server={"api_key": ("alice", "bob"), "admin_api_key": "root"}) as server:
        yield server


@pytest.fixture(scope="session")
def make_server(tokenizer_dir: Path) -> ServerMaker:
    """Makes servers around the scripted engine, with these knobs, in threads of this process."""

    @contextlib.contextmanager
    def make(
        *,
        engine: dict | None = None,
        server: dict | None = None,
        tokenizer: Path = tokenizer_dir,
        wait: bool = True,
        request_log: Path | None = None,
    ) -> Iterator[ServerThread]:
        knobs = {"port": 0, "shutdown_timeout": 0.5, **(server or {})}
        if request_log is not None:
            knobs = {"log_requests": True, "log_format": "json"} | knobs
        with contextlib.ExitStack() as stack:
            with contextlib.ExitStack() as start:
                if request_log is not None:  # lines go to what is stderr when the server starts
                    lines = stack.enter_context(request_log.open("w"))
                    start.enter_context(contextlib.redirect_stderr(lines))
                config = EngineConfig(**{"model_path": "fake", **(engine or {})})
                made = stack.enter_context(contextlib.closing(ServerThread(config, ServerConfig(**knobs), tokenizer)))
                if wait:
                    made.wait_until_ready()
            yield made

    return make


@pytest.fixture(scope="session")
def make_process(tokenizer_dir: Path) -> ProcessMaker:
    """Makes servers in processes, for tests of the process itself: its signals, its exit, its streams, its memory."""

    def make(
        *,
        engine: dict | None = None,
        server: dict | None = None,
        wait: bool = True,
        to_end: bool = False,
    ) -> contextlib.AbstractContextManager[ServerProcess]:
        knobs = {
            "to_end": to_end,
            "engine": {"model_path": "fake", **(engine or {})},
            "server": {"port": 0, "shutdown_timeout": 0.5, **(server or {})},
            "tokenizer_dir": str(tokenizer_dir),
        }
        return running(["-m", "tests.server.fake_server", json.dumps(knobs)], wait=wait)

    return make


@pytest.fixture(scope="session")
def make_real_server(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> ProcessMaker:
    """Makes servers by `jsg serve` of a small random model, with these options; see `real_model.py`."""
    directory = write_real_model(tmp_path_factory.mktemp("real") / "model")

    def make(*options: str) -> contextlib.AbstractContextManager[ServerProcess]:
        return serving(directory, compile_cache_dir, *options)

    return make


@pytest.fixture(scope="session")
def real_server(make_real_server: ProcessMaker) -> Iterator[ServerProcess]:
    """One with a real engine for all tests that leave it as it is. Other options or weights would compile anew."""
    with make_real_server("--served-model-name", "fake") as made:  # called as the scripted one is
        yield made


@pytest.fixture(scope="session")
def shared_server(make_server: ServerMaker) -> Iterator[ServerThread]:
    """One for all tests; see `server`."""
    with make_server() as made:
        yield made


@pytest.fixture
def server(shared_server: ServerThread) -> RunningServer:
    """The server that all tests share. Nothing runs and nothing is cached when a test begins; counters go on."""
    shared_server.reset()
    return shared_server


@pytest.fixture(scope="session")
def shared_scripted(tokenizer_dir: Path) -> ScriptedServer:
    """One for all tests; see `scripted_server`."""
    return ScriptedServer(tokenizer_dir)


@pytest.fixture
def scripted_server(shared_scripted: ScriptedServer) -> ScriptedServer:
    """The application around a scripted engine that all tests share. It costs most when it gets its first request."""
    shared_scripted.reset()
    return shared_scripted


@pytest.fixture(scope="session")
def process_server(make_process: ProcessMaker) -> Iterator[ServerProcess]:
    """A front process with its engine process, for the tests that measure its memory."""
    with make_process() as made:
        yield made


@pytest.fixture(scope="session")
def mixed_run(make_server: ServerMaker, tmp_path_factory: pytest.TempPathFactory) -> MixedRun:
    """Sixty requests of all kinds, as clients, metrics and the log saw them."""
    log = tmp_path_factory.mktemp("mixed") / "log"
    with make_server(request_log=log) as server:
        seen = a_mixed_run(server.http)
        result = scrape_until(server.http, quiet)
        server.terminate()
        server.join()  # the end writes what was waiting
    return MixedRun(seen, result, [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")])


@pytest.fixture
def http(server: RunningServer) -> httpx.Client:
    return server.http


@pytest.fixture(scope="module")
def battery(shared_server: ServerThread, tokenizer_dir: Path) -> Iterator[Battery]:
    """One for all tests of a file."""
    shared_server.reset()
    with firing(shared_server, tokenizer_dir) as made:
        yield made
