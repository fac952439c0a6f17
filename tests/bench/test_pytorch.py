"""The PyTorch half of `bench.device`: a script that stands alone, for an interpreter that need not have jsg."""

import ast
import json
import subprocess
import sys

import pytest

from bench.device.catalogue import PARTS, TORCH_WORKER
from bench.device.plan import TRIAL

TORCH_PARTS = [name for name, entry in PARTS.items() if entry.run is None]
TREE = ast.parse(TORCH_WORKER.read_text())


def test_knows_nothing_of_this_project():
    imported = {alias.name for node in ast.walk(TREE) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(TREE) if isinstance(node, ast.ImportFrom)}
    assert imported <= {"json", "os", "sys", "time", "traceback", "torch", "transformers"}


def test_has_the_parts_that_the_catalogue_names():
    [table] = [node.value for node in TREE.body if isinstance(node, ast.Assign) and node.targets[0].id == "PARTS"]
    assert sorted(key.value for key in table.keys) == sorted(TORCH_PARTS)
    assert len(TORCH_PARTS) == 4


@pytest.mark.slow
@pytest.mark.parametrize("part", TORCH_PARTS)
def test_measures(part: str):
    pytest.importorskip("torch")
    pytest.importorskip("transformers", minversion="5.17")
    task = TRIAL.as_json() | {"part": part, "seconds": 300, "started_at": 0.0}
    done = subprocess.run(
        [sys.executable, str(TORCH_WORKER)], input=json.dumps(task) + "\n", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    figures = [event["figure"] for event in told if "figure" in event]
    assert figures and not any("failed" in event for event in told), told
    assert all(min(figure["samples"]) > 0 for figure in figures)
