"""The report of a run: it is complete after every figure, and has no paths of this machine."""

import json
import pathlib

from bench.report import Figure, Report, describe_run, table


def test_the_file_is_whole_after_every_figure(tmp_path: pathlib.Path):
    output = tmp_path / "deep" / "run.json"
    report = Report("bench.engine", ["--only", "decode"], output, device="cpu")
    report.add("decode", "ms", [3.0, 1.0, 2.5], target="<= 2")
    first = json.loads(output.read_text())
    assert first["figures"] == [
        {
            "name": "decode",
            "unit": "ms",
            "min": 1.0,
            "median": 2.5,
            "samples": [3.0, 1.0, 2.5],
            "facts": {"target": "<= 2"},
        }
    ]
    assert first["header"]["device"] == "cpu"
    report.add("prefill", "ms", [7.0])
    assert [figure["name"] for figure in json.loads(output.read_text())["figures"]] == ["decode", "prefill"]
    report.close()
    assert "load_average_at_end" in json.loads(output.read_text())["header"]
    assert list(output.parent.iterdir()) == [output]


def test_a_run_is_described():
    run = describe_run("bench.engine", ["--torch-python", "/absolute/bin/python", "--only", "decode"])
    assert run["command"] == "python -m bench.engine --torch-python python --only decode"
    assert {"date", "commit", "cpu", "cpu_count", "memory_gib", "python", "versions", "load_average"} <= run.keys()
    assert {"jax", "numpy"} <= run["versions"].keys()


def test_the_table_has_a_line_for_each_figure():
    figures = [Figure("a", "ms", (2.0, 1.0, 4.0), {"floor_ms": 0.123456}), Figure("b", "x", (1.5,), {})]
    head, first, second = table(figures).splitlines()
    assert head.split() == ["figure", "min", "median", "unit", "n", "facts"]
    assert first.split() == ["a", "1.0", "2.0", "ms", "3", "floor", "ms", "0.1235"]
    assert second.split() == ["b", "1.5", "1.5", "x", "1"]
