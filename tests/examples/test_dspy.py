"""`examples/dspy_rag.py`: DSPy itself, through LiteLLM and OpenAI's SDK, against a real server.

LiteLLM asks for an older `openai` than the one these tests have, so DSPy may live in an environment of its own, which
`make test-slow` sets up.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import jsg

ROOT = Path(__file__).parents[2]
OWN_PYTHON = ROOT / ".venv" / "dspy" / "bin" / "python"
OPTIONS = {"max_running_requests": 8, "max_total_tokens": 8192, "context_length": 1024}


@pytest.fixture(scope="module")
def python() -> Path:
    if importlib.util.find_spec("dspy") is not None:
        return Path(sys.executable)
    if not OWN_PYTHON.exists():
        pytest.skip("needs DSPy, which `make test-slow` installs beside what the other tests use")
    return OWN_PYTHON


@pytest.mark.slow
def test_a_rag_program_with_a_bootstrap_optimiser(python: Path, tmp_path: Path) -> None:
    with jsg.Runtime(log_requests=True, log_format="json", **OPTIONS) as runtime:
        ended = subprocess.run(
            [python, "-P", ROOT / "examples" / "dspy_rag.py", "--url", runtime.url],
            env={"PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "DSPY_CACHEDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        log = runtime.log
    assert ended.returncode == 0, ended.stderr
    *_, found, maria, oscar, nina, felix = ended.stdout.splitlines()
    assert found == "4 worked examples were found"
    assert maria == "What does Maria do? Maria is a teacher."
    assert oscar == "What does Oscar do? Oscar is a driver."
    assert nina == "What does Nina do? Nina is a singer."
    assert felix == "What does Felix do? Felix is a pilot."
    calls = [line for line in log.splitlines() if '"route": "/v1/chat/completions"' in line]
    assert len(calls) == 8  # four to find the worked examples, four with them
    assert all('"status": 200' in line for line in calls)
