"""The real front around a scripted engine, for the load generator to load."""

from collections.abc import Iterator

import pytest

from bench import null_model, settled
from tests.engine.late import late_programs
from tests.server.conftest import make_process, make_server, tokenizer_dir

__all__ = ["make_process", "make_server", "tokenizer_dir"]


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks what the figures are, and to compile every program of an engine takes most of a minute."""
    monkeypatch.setattr(settled, "wait_until_compiled", lambda info: None)


@pytest.fixture
def late() -> Iterator[None]:
    """Engines that a test makes compile the programs that they run, and no others. They may run the null model."""
    with null_model.registered(), late_programs():
        yield
