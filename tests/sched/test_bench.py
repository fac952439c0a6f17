"""The benchmark of the scheduler runs and writes what it measured."""

import json
import pathlib

import pytest

from bench import sched


def test_every_figure_of_the_benchmark_is_written(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    small = {
        "NUM_RUNNING": 16,
        "NUM_WAITING": 50,
        "NUM_LEAVES": 50,
        "NUM_PAGES": 200_000,
        "NUM_EDGES": 100,
        "NUM_OF_LARGE_TREE": 3000,
    }
    for name, value in small.items():
        monkeypatch.setattr(sched, name, value)
    output = tmp_path / "sched.json"
    sched.main(["--steps", "3", "--output", str(output)])
    figures = {figure["name"]: figure for figure in json.loads(output.read_text(encoding="utf-8"))["figures"]}
    assert len(figures) == 2 * 4 + 2 * 2 + 3 * 2 + 5 + 4 + 4 + 2 * 9
    memory = figures["host memory per cached token"]
    assert memory["median"] < memory["facts"]["target"]
    assert all(len(figure["samples"]) >= 1 for figure in figures.values())
