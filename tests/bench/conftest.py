"""The real front around a scripted engine, for the load generator to load."""

import pytest

from bench import settled
from tests.server.conftest import make_process, make_server, tokenizer_dir

__all__ = ["make_process", "make_server", "tokenizer_dir"]


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks what the figures are, and to compile every program of an engine takes most of a minute."""
    monkeypatch.setattr(settled, "wait_until_compiled", lambda info: None)
