"""Engines of the small model and of the embedded one, shared by the tests of a session."""

import pathlib
from collections.abc import Callable, Iterator

import pytest

import jsg
from jsg.engine.core import EngineCore
from jsg.types import Request
from tests.engine import lettered, small, taught
from tests.engine.late import late_programs
from tests.engine.shared_out import SharedOut
from tests.engine.shared_out import shared_out as make_shared_out

Cores = Callable[..., EngineCore]
Alone = Callable[[Request], small.Outcome]


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return small.write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def lettered_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return lettered.write_model(tmp_path_factory.mktemp("models") / "lettered")


@pytest.fixture(scope="session")
def core_of(small_model: pathlib.Path, compile_cache_dir: str) -> Iterator[Cores]:
    """Makes an engine with the given knobs, or returns the one made before, its cache emptied."""
    with small.shared_cores(lambda **knobs: small.make_core(small_model, compile_cache_dir, **knobs)) as get:
        yield get


@pytest.fixture(scope="session")
def taught_core_of(lettered_model: pathlib.Path, compile_cache_dir: str) -> Iterator[Cores]:
    """As `core_of`, of engines that know the grammars of `lettered.py`."""
    with small.shared_cores(lambda **knobs: lettered.make_core(lettered_model, compile_cache_dir, **knobs)) as get:
        yield get


@pytest.fixture(scope="session")
def alone(core_of: Cores) -> Alone:
    """The answer of a request of `small.traffic` by itself in deterministic mode. Each is computed once."""

    def find(request: Request) -> small.Outcome:
        return small.alone(core_of(**small.DETERMINISTIC, disable_radix_cache=True), request)

    return small.remembered(find)


@pytest.fixture(scope="session")
def taught_alone(taught_core_of: Cores) -> Alone:
    """As `alone`, of requests that may have grammars."""

    def find(request: Request) -> lettered.Outcome:
        return taught.outcome_of(taught_core_of(**small.DETERMINISTIC, disable_radix_cache=True), request)

    return small.remembered(find)


@pytest.fixture
def new_core_of(small_model: pathlib.Path, compile_cache_dir: str) -> Iterator[Cores]:
    """Makes an engine that no other test has used or will use."""
    with small.own_cores(lambda **knobs: small.make_core(small_model, compile_cache_dir, **knobs)) as make:
        yield make


@pytest.fixture
def new_taught_core_of(lettered_model: pathlib.Path, compile_cache_dir: str) -> Iterator[Cores]:
    """As `new_core_of`, of engines that know the grammars of `lettered.py`."""
    with small.own_cores(lambda **knobs: lettered.make_core(lettered_model, compile_cache_dir, **knobs)) as make:
        yield make


@pytest.fixture(scope="session")
def shared_out(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> SharedOut:
    return make_shared_out(tmp_path_factory.mktemp("shared_out"), compile_cache_dir)


@pytest.fixture(scope="session")
def tiny_engine(compile_cache_dir: str) -> Iterator[jsg.Engine]:
    """`jsg.Engine` of the embedded model, in deterministic mode."""
    with late_programs():
        made = jsg.Engine(max_running_requests=4, deterministic=True, compilation_cache_dir=compile_cache_dir)
    with made as engine:
        yield engine
