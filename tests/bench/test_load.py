"""The bench of loading, on a model that loads in a moment."""

import json
import pathlib

import pytest

from bench import load


@pytest.mark.slow
@pytest.mark.long
def test_loads_every_checkpoint_on_every_count(tmp_path: pathlib.Path):
    output = tmp_path / "load.json"
    load.main(["--small", "--rounds", "1", "--output", str(output)])
    figures = json.loads(output.read_text())["figures"]
    loads = [figure for figure in figures if figure["name"].startswith("load ")]
    assert len(loads) == len(load.CHECKPOINTS) * len(load.DEVICES)
    for figure in loads:
        assert figure["min"] > 0 and figure["facts"]["gb_per_s"] > 0
        assert figure["facts"]["held_mib"] == pytest.approx(2.13, abs=0.02)
