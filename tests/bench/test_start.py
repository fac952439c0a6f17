"""`bench.start` on a real server, and how it reads the records of the processes."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from bench.start import __main__ as start
from bench.start.notes import cpu_s, read_stages, ready_s


@pytest.mark.slow
@pytest.mark.long
def test_times_a_start_with_empty_caches_and_one_with_full_ones(tmp_path: pathlib.Path):
    """The server is deterministic, because then it compiles a third of the programs."""
    output = tmp_path / "start.json"
    few_programs = ("--deterministic", "--max-running-requests", "4")
    start.main(["--rounds", "1", "--output", str(output), "--", *few_programs])
    figures = {figure["name"]: figure for figure in json.loads(output.read_text())["figures"]}
    empty, full = (figures[f"first answer, {arm} caches"] for arm in ("empty", "full"))
    assert (empty["facts"]["target"], full["facts"]["target"]) == ("<= 15", "<= 4")
    assert 0 < full["min"] < empty["min"] < start.LIMIT_S
    for arm in ("empty", "full"):
        for stage in ("engine, imports", "engine, trace", "engine, compile", "engine, weights", "front, tokenizer"):
            assert figures[f"{arm}: {stage}"]["min"] > 0
    assert figures["full: engine, compile"]["min"] < figures["empty: engine, compile"]["min"]
    kernels = [name for name in figures if name.endswith("compile kernels")]
    assert kernels and all(name.startswith("empty: ") for name in kernels), "full caches have the kernels of grammars"


def test_notes_of_a_stage_are_added_up(tmp_path: pathlib.Path):
    def note(stage: str, start: float, end: float, wall_s: float, cpu_s: float) -> str:
        return json.dumps(
            {"process": "engine", "stage": stage, "start": start, "end": end, "wall_s": wall_s, "cpu_s": cpu_s}
        )

    (tmp_path / "1.jsonl").write_text(f"{note('trace', 12, 13, 1, 0.5)}\n{note('trace', 14, 16, 1.5, 1)}\n")
    (tmp_path / "2.jsonl").write_text(f"{note('ready', 11, 11.5, 0.5, 0)}\n")
    stages = read_stages(tmp_path, 10.0)
    assert stages == [("engine", "ready", 1, 1.0, 1.5, 0.5, 0), ("engine", "trace", 2, 2.0, 6.0, 2.5, 1.5)]
    assert ready_s(stages) == 1.0


def test_the_cpu_time_of_a_process_has_that_of_its_children():
    busy = "import time\nwhile time.process_time() < 0.4: pass\n"  # a process's record counts whole ticks of 0.01 s
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {busy!r}]); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", parent])
    try:
        while cpu_s(process.pid) < 0.3:
            assert process.poll() is None
            time.sleep(0.02)
        assert cpu_s(os.getpid()) >= cpu_s(process.pid)
    finally:
        process.kill()
        process.wait()
