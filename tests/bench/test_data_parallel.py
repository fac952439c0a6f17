"""`bench.data_parallel`, in the part that needs no engine."""

import json
import pathlib

from bench import data_parallel


def test_choosing_is_timed_for_every_length(tmp_path: pathlib.Path):
    output = tmp_path / "dp.json"
    data_parallel.main(["--only", "router", "--output", str(output)])
    figures = json.loads(output.read_text())["figures"]
    assert len(figures) == len(data_parallel.ROUTED_LENS)
    assert all(figure["min"] > 0 for figure in figures)
