"""Bundles of instructions of the inner loops of kernels for TPUs: cycles, if nothing waits for memory. Nothing ran."""

import json
import os
import subprocess
import sys
from pathlib import Path

from bench.report import ROOT
from bench.tpu.compiling import DUMP

LLAMA = 32, 8, 128, "bfloat16"
BARS = {
    # For 512 keys: of a single token, and of the 64 tokens of a tile.
    ("v5e", 1, *LLAMA): 1350,
    ("v6e", 1, *LLAMA): 1350,
    ("v6e", 64, *LLAMA): 2 * 2400,
    # For 1024 keys of an eighth of Llama 3 8B in 8 bits.
    ("v6e", 1, 4, 1, 128, "float8_e4m3fn"): 1350,
    # Heads of 64 and of 256.
    ("v5e", 1, 32, 8, 64, "bfloat16"): 1350,
    ("v5e", 1, 8, 1, 256, "bfloat16"): 1350,
}
WRITTEN = 250
"""Of the write of consecutive tokens of a page, which lie in one tile of memory for each head."""


def test_inner_loops_have_few_bundles(tmp_path: Path):
    cases = [*BARS, ("v5e", 0, *LLAMA)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.tpu.kernels_alone", str(tmp_path), json.dumps(cases)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "LIBTPU_INIT_ARGS": DUMP.format(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    for (case, bar), loops in zip(BARS.items(), found[:-1], strict=True):
        assert max(bundles for depth, bundles in loops if depth == 2) <= bar, case
    assert max(bundles for depth, bundles in found[-1] if depth == 1) <= WRITTEN
