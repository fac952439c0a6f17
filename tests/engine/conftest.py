"""Engines of the small model, one per session and setting."""

import pathlib
from collections.abc import Callable, Iterator

import pytest

from jsg.engine.core import EngineCore
from tests.engine import small


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return small.write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def core_of(small_model: pathlib.Path, compile_cache_dir: str) -> Iterator[Callable[..., EngineCore]]:
    """Makes an engine with the given knobs, or returns the one made before, its cache emptied."""
    cores: dict[tuple, EngineCore] = {}

    def get(**knobs: object) -> EngineCore:
        key = tuple(sorted(knobs.items()))
        if key not in cores:
            cores[key] = small.make_core(small_model, compile_cache_dir, **knobs)
        assert cores[key].flush_cache(), "a test left work in a shared engine"
        return cores[key]

    yield get
    for core in cores.values():
        core.close()
