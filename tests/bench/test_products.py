"""What `bench.products` multiplies, and that it reads each type in its own length."""

import json
import pathlib

import pytest

from bench import products


@pytest.mark.slow
@pytest.mark.long
def test_each_type_is_multiplied_and_timed(tmp_path: pathlib.Path):
    products.main(["--outputs", "16", "--repeats", "1", "--output", str(tmp_path / "it.json")])
    figures = json.loads((tmp_path / "it.json").read_text())["figures"]
    assert len(figures) == len(products.STORED) * 2 * len(products.ROWS)
    assert all(figure["min"] > 0 for figure in figures)
