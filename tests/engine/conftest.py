"""Engines of the small model, shared by the tests of a session."""

import pathlib
from collections.abc import Callable, Iterator

import pytest

from jsg.engine.core import EngineCore
from tests.engine import lettered, small


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return small.write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def core_of(small_model: pathlib.Path, compile_cache_dir: str) -> Iterator[Callable[..., EngineCore]]:
    """Makes an engine with the given knobs, or returns the one made before, its cache emptied."""
    with small.shared_cores(lambda **knobs: small.make_core(small_model, compile_cache_dir, **knobs)) as get:
        yield get


@pytest.fixture(scope="module")
def lettered_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return lettered.write_model(tmp_path_factory.mktemp("models") / "lettered")


@pytest.fixture(scope="module")
def taught_core_of(lettered_model: pathlib.Path, compile_cache_dir: str) -> Iterator[Callable[..., EngineCore]]:
    """As `core_of`, of engines that know the grammars of `lettered.py`."""

    def make(**knobs: object) -> EngineCore:
        return lettered.teach(small.make_core(lettered_model, compile_cache_dir, **knobs))

    with small.shared_cores(make) as get:
        yield get
