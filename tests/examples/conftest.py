"""The models that examples run on, and the examples as modules."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import jsg
from tests.conftest import COMPILE_CACHE
from tests.examples import oracle
from tests.lang.scripted import ScriptedBackend

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "max_running_requests": 4,
    "chunked_prefill_size": 64,
    "max_total_tokens": 8192,
    "context_length": 1024,
    "compilation_cache_dir": str(COMPILE_CACHE),
}
"""An engine with few programs to compile."""


@pytest.fixture(scope="session")
def engine() -> Iterator[jsg.Engine]:
    with jsg.Engine("tiny", **SMALL) as engine:
        yield engine


@pytest.fixture(params=["scripted", pytest.param("embedded", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Any:
    """A scripted model that knows what the examples ask, and the embedded model, which computes."""
    return (
        ScriptedBackend(oracle.answer, oracle.choose)
        if request.param == "scripted"
        else request.getfixturevalue("engine")
    )


@pytest.fixture
def example(model: Any) -> Iterator[Callable[[str], ModuleType]]:
    """Imports an example by its name; programs that name no backend run on the model."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    jsg.set_default_backend(model)
    try:
        yield __import__
    finally:
        jsg.set_default_backend(None)
        sys.path.remove(str(EXAMPLES))
        for name in set(sys.modules) - before:
            if (EXAMPLES / f"{name}.py").is_file():
                del sys.modules[name]
