"""`bench.data_parallel`, in the part that needs no engine."""

import json
import pathlib

import pytest

from bench import data_parallel


def test_choosing_is_timed_for_every_length(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(data_parallel, "ROUTED_TIMES", 2)
    monkeypatch.setattr(data_parallel, "ROUTED_LENS", (64, 512))
    output = tmp_path / "dp.json"
    data_parallel.main(["--only", "router", "--output", str(output)])
    figures = json.loads(output.read_text())["figures"]
    assert len(figures) == 2
    assert all(figure["min"] > 0 for figure in figures)
