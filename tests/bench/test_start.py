"""The clock of `jsg serve`, on a real server."""

import json
import pathlib

import pytest

from bench import start


@pytest.mark.slow
def test_times_a_cold_and_a_warm_start(tmp_path: pathlib.Path):
    output = tmp_path / "start.json"
    start.main(["--rounds", "1", "--output", str(output)])
    cold, warm = json.loads(output.read_text())["figures"]
    assert cold["facts"]["target"] == "<= 30"
    assert 0 < warm["min"] < cold["min"] < start.LIMIT_S
