"""The real front around a scripted engine, for the load generator to load."""

import pytest

from bench import settled
from jsg.engine.device.executables import COMPILER_OPTIONS, QUANTISED_OPTIONS
from tests.engine.late import late_programs
from tests.kernels_pallas.definition import QUICKLY
from tests.server.conftest import make_server, tokenizer_dir

__all__ = ["make_server", "tokenizer_dir"]


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks what the figures are, and to compile every program of an engine takes most of a minute."""
    monkeypatch.setattr(settled, "wait_until_compiled", lambda info: None)
