"""No grammar, however written, takes much work or memory: it is answered, or refused with a reason.

Compiling is counted in turns of loops and calls (`work.py`), which Python makes ten to twenty million of in a second,
and reading in the steps that grammars pay with.
"""

import json
import re
import subprocess
import sys

import pytest

from jsg.constrained.grammar import MEMO_BYTES
from jsg.constrained.limits import LIMITS
from tests.constrained.pathologies import ALL, Cost, cost

COMPILE_WORK = 40_000_000
PEAK_BYTES = 400 << 20
LEFT_BYTES = 150 << 20
SPARE_STEPS = 2_000_000
"""What is begun is paid for and ends soon, so that a question may take a little more than it has."""


def _check(name: str, cost: Cost) -> None:
    expected, refusal = ALL[name].refusal, cost.refusal
    if expected is None:
        assert refusal is None
    else:
        assert refusal is not None, "it was answered"
        assert expected in refusal
    assert cost.compile_work is None or cost.compile_work <= COMPILE_WORK
    assert cost.num_steps <= LIMITS.mask_steps + SPARE_STEPS
    assert cost.num_bytes <= LIMITS.machine_bytes + MEMO_BYTES
    if cost.ran_dry is not None:
        assert ALL[name].may_run_dry and re.search("too many steps|at most 256 ways at once", cost.ran_dry)


@pytest.mark.parametrize("name", [name for name, pathology in ALL.items() if not pathology.is_long])
def test_an_answer_or_a_reason_soon(name: str):
    _check(name, cost(ALL[name], is_counted=False, num_tokens=8))


@pytest.mark.slow
@pytest.mark.parametrize("counted", ["quick", pytest.param("all", marks=pytest.mark.long)])
def test_all_of_them_in_one_process_with_bounded_memory(counted: str):
    """To count the work of those that take longest too is long."""
    command = [sys.executable, "-m", "tests.constrained.pathologies", counted]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [line["name"] for line in lines] == list(ALL)
    for line in lines:
        assert (line["compile_work"] is not None) == (counted == "all" or not ALL[line["name"]].is_long)
        _check(line["name"], Cost(**{field: line[field] for field in Cost._fields}))
    assert max(line["peak_bytes"] for line in lines) <= PEAK_BYTES
    assert lines[-1]["now_bytes"] <= LEFT_BYTES
