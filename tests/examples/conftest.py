"""One engine of the embedded model for all examples, and the examples as modules."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import jsg

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def engine() -> Iterator[jsg.Engine]:
    with jsg.Engine("tiny", max_running_requests=16, max_total_tokens=8192, context_length=1024) as engine:
        yield engine


@pytest.fixture
def example(engine: jsg.Engine) -> Iterator[Callable[[str], ModuleType]]:
    """Imports an example by its name; programs that name no backend run on the shared engine."""
    before = set(sys.modules)
    sys.path.insert(0, str(EXAMPLES))
    jsg.set_default_backend(engine)
    try:
        yield __import__
    finally:
        jsg.set_default_backend(None)
        sys.path.remove(str(EXAMPLES))
        for name in set(sys.modules) - before:
            if (EXAMPLES / f"{name}.py").is_file():
                del sys.modules[name]
