"""What the benches measure in tests: a scripted engine behind the real front, and engines that compile little."""

from collections.abc import Iterator

import pytest

from bench import settled
from jsg.engine.device.executables import COMPILER_OPTIONS, QUANTISED_OPTIONS
from tests.engine.late import late_programs
from tests.kernels_pallas.definition import QUICKLY
from tests.server.conftest import make_server, tokenizer_dir

__all__ = ["make_server", "tokenizer_dir"]


@pytest.fixture(autouse=True)
def _what_is_needed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test asks what the figures are: engines compile what they need, and XLA optimises little."""
    monkeypatch.setattr(settled, "wait_until_compiled", lambda info: None)
    for options in (COMPILER_OPTIONS, QUANTISED_OPTIONS):
        monkeypatch.setitem(options, "cpu", dict(options.get("cpu", {})) | QUICKLY)
    with late_programs():
        yield
