"""`bench.hosts` runs, with few steps."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench import hosts
from bench.report import Report

OVERLAP = """
import pathlib, sys
from bench import hosts
from bench.report import Report
from tests.engine.small import MODEL
hosts.measure_overlap(Report("bench.hosts", [], pathlib.Path(sys.argv[1])), shape=MODEL, batch=2, steps=20)
"""


@pytest.mark.slow
def test_what_sending_costs(tmp_path: Path):
    report = Report("bench.hosts", [], tmp_path / "hosts.json")
    hosts.measure_sending(report, num_followers=1, keys=[hosts.BUCKETS.decode[0]], steps=5)
    (figure,) = report.figures
    assert figure.name == "sent to 1: decode, 8 tokens" and len(figure.samples) == 5
    assert figure.facts["bytes"] > 8 * 4


@pytest.mark.slow
@pytest.mark.long
def test_steps_of_two_hosts(tmp_path: Path):
    """It runs in a separate process, because JAX cannot join other hosts after it has started."""
    output = tmp_path / "hosts.json"
    subprocess.run([sys.executable, "-c", OVERLAP, str(output)], env=os.environ | {"JAX_PLATFORMS": "cpu"}, check=True)
    step, sent, early = json.loads(output.read_text())["figures"]
    assert len(sent["samples"]) == 20
    assert step["median"] > 0 and 0 <= early["median"] <= 100
