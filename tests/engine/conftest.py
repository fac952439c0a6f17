"""Engines of the small model, shared by the tests of a session."""

import pathlib
from collections.abc import Callable, Iterator

import pytest

from jsg.engine.core import EngineCore
from tests.engine import small

MAX_CORES = 4
"""Engines kept at a time. Each compiled program of a CPU takes about 100 memory mappings, an engine up to 5000, and
where a process reaches the 65530 that Linux allows, LLVM aborts it."""


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return small.write_model(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(scope="session")
def core_of(small_model: pathlib.Path, compile_cache_dir: str) -> Iterator[Callable[..., EngineCore]]:
    """Makes an engine with the given knobs, or returns the one made before, its cache emptied."""
    cores: dict[tuple, EngineCore] = {}

    def get(**knobs: object) -> EngineCore:
        key = tuple(sorted(knobs.items()))
        core = cores.pop(key, None)
        if core is None:
            while len(cores) >= MAX_CORES:
                cores.pop(next(iter(cores))).close()
            core = small.make_core(small_model, compile_cache_dir, **knobs)
        cores[key] = core  # the last is the latest used
        assert core.flush_cache(), "a test left work in a shared engine"
        return core

    yield get
    for core in cores.values():
        core.close()
