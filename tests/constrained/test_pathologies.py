"""No grammar, however written, takes more than seconds or much memory: it is answered, or refused with a reason."""

import json
import subprocess
import sys

import pytest

from tests.constrained.pathologies import ALL, cost

COMPILE_S = 5.0
STEP_S = 1.0
PEAK_BYTES = 400 << 20
LEFT_BYTES = 150 << 20


def _check(name: str, compile_s: float, step_s: float, refusal: str | None) -> None:
    expected = ALL[name].refusal
    if expected is None:
        assert refusal is None
    else:
        assert refusal is not None, "it was answered"
        assert expected in refusal
    assert compile_s <= COMPILE_S
    assert step_s <= STEP_S


@pytest.mark.parametrize("name", [name for name, pathology in ALL.items() if not pathology.is_long])
def test_an_answer_or_a_reason_in_time(name: str):
    _check(name, *cost(ALL[name]))


@pytest.mark.slow
def test_all_of_them_in_one_process_with_bounded_memory():
    command = [sys.executable, "-m", "tests.constrained.pathologies"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["name"] for line in lines] == list(ALL)
    for line in lines:
        _check(line["name"], line["compile_s"], line["step_s"], line["refusal"])
    assert max(line["peak_bytes"] for line in lines) <= PEAK_BYTES
    assert lines[-1]["now_bytes"] <= LEFT_BYTES
