"""Families on two made-up devices, beside what Hugging Face computes: `python -m tests.models.family_devices`.

A process of its own, because JAX decides how many CPU devices it makes up when it starts. Standard input has a list of
[variant, groups of experts]; standard output has for each the largest difference of logits.
"""

import json
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

from jsg.models.config import read_spec
from jsg.models.loading import load_model
from jsg.models.tensor_parallel import make_mesh
from tests.golden.compare import Recorded
from tests.golden.variants import random_tensors, write_checkpoint
from tests.models.paged import PagedModel

DEVICES = 2
CHUNK_LEN = 77


def difference(variant: str, groups: int) -> float:
    """Of the recorded prompt, in two uneven chunks beside another row."""
    golden, mesh = Recorded(variant), make_mesh(DEVICES, groups)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_checkpoint(directory, variant, random_tensors(variant, golden.note["seed"]))
        spec = read_spec(directory).over_devices(DEVICES, groups)
        paged = PagedModel(spec, load_model(directory, spec, mesh=mesh), mesh=mesh)
    first = paged.extend({2: golden.tokens[:CHUNK_LEN], 0: golden.tokens[5:30]})[2]
    second = paged.extend({0: golden.tokens[30:40], 2: golden.tokens[CHUNK_LEN:]})[2]
    return golden.difference(np.concatenate([first, second]))


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    json.dump([difference(*case) for case in json.load(sys.stdin)], sys.stdout)


if __name__ == "__main__":
    main()
