"""What tests of several files of the language share: the tokenizer, one engine and one server of the embedded model."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import Any
from unittest import mock

import pytest

import jsg
from jsg.lang.http.runtime import Runtime
from jsg.lang.words.backend import Session
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model
from tests.conftest import COMPILE_CACHE
from tests.engine.late import late_programs
from tests.lang.wire_servers import PAGE, TOKENS, Parrot, WireServer
from tests.processing.conftest import all_tokenizers, directories  # noqa: F401
from tests.server.conftest import model_dir  # noqa: F401

SMALL = {
    "deterministic": True,
    "max_running_requests": 4,
    "max_total_tokens": 8192,
    "context_length": 1024,
    "chunked_prefill_size": 64,
    "compilation_cache_dir": str(COMPILE_CACHE),
}
"""Options of a server that takes little memory and compiles one shape of a step."""
LATE_SERVER = "tests.lang.late_server"


def new_engine(compile_cache_dir: str, **knobs: bool) -> jsg.Engine:
    """An engine of the embedded model whose programs are compiled when first needed; see `tests/engine/late.py`."""
    with late_programs():
        return jsg.Engine(
            max_running_requests=4, chunked_prefill_size=64, compilation_cache_dir=compile_cache_dir, **knobs
        )


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    """The tokenizer of the embedded model."""
    return load_tokenizer(resolve_model("tiny"))


@pytest.fixture(scope="package")
def engine(compile_cache_dir: str) -> Iterator[jsg.Engine]:
    """An engine in this process. A test that counts cached tokens flushes its cache first."""
    with new_engine(compile_cache_dir) as engine:
        yield engine


@pytest.fixture(scope="package")
def runtime() -> Iterator[Runtime]:
    """A server in a separate process. A test that counts cached tokens flushes its cache first.

    Its engine compiles what it runs, which is a third of its programs.
    """
    start = subprocess.Popen

    def popen(arguments: list[str], **options: Any) -> subprocess.Popen[str]:
        return start([LATE_SERVER if each == "jsg.cli" else each for each in arguments], **options)

    with mock.patch.object(subprocess, "Popen", popen):
        made = Runtime(**SMALL, served_model_name="small")
    with made as runtime:
        yield runtime


@pytest.fixture
def wire() -> Iterator[WireServer]:
    """An API around a toy model that goes on in a page of three fields."""
    with WireServer(Parrot(PAGE, TOKENS)).running() as server:
        yield server


@pytest.fixture
async def backend(wire: WireServer, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """The backend that the file's `backend_of` makes for that API."""
    async with request.module.backend_of(wire) as backend:
        yield backend


@pytest.fixture
def session(backend: Any) -> Session:
    """One that the backend has opened."""
    return backend.open()
