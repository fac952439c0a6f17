"""The arithmetic of `bench.memory`, and what it reads of the processes of a server."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from bench import memory
from bench.served import Usage

MIB = 2**20


def usage(pss: int) -> Usage:
    return Usage(rss=2 * pss, pss=pss, anonymous=pss // 2, num_threads=1, num_fds=1, cpu_s=0.0)


def test_what_is_neither_weights_nor_pool_is_left(tmp_path: Path):
    save_file({"table": np.zeros((1024, 1024), np.float32)}, tmp_path / "model.safetensors")
    assert memory.weights_bytes(tmp_path, 4) == pytest.approx(4 * MIB, abs=1000)
    assert memory.weights_bytes(tmp_path, 2) == pytest.approx(2 * MIB, abs=1000)
    usages = [usage(100 * MIB), usage(20 * MIB)]
    assert memory.rest_mib(usages, weights_bytes=40 * MIB, pool_bytes=30 * MIB) == 50


@pytest.mark.slow
@pytest.mark.long
def test_a_server_is_measured(tmp_path: Path):
    """A small model; the limit is for the shape of the bench, and the status says only whether it was kept."""
    output = tmp_path / "memory.json"
    arguments = ["--shape", "small", "--divisor", "8", "--directory", str(tmp_path), "--output", str(output)]
    arguments += ["--", "--deterministic"]  # such a server compiles a third of the programs
    status = memory.main(arguments)
    found = {figure["name"]: figure["min"] for figure in json.loads(output.read_text())["figures"]}
    processes = [name for name in found if name.startswith("PSS, ") and name != "PSS, all processes"]
    assert {"PSS, front", "PSS, engine"} <= set(processes)
    assert found["PSS, all processes"] == pytest.approx(sum(found[name] for name in processes), rel=0.01)
    rest = found["PSS, all processes"] - found["weights"] - found["KV pool"]
    assert found["beside weights and pool"] == pytest.approx(rest, abs=3)
    assert status == int(found["beside weights and pool"] > memory.LIMIT_MIB)
