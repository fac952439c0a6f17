"""Loads checkpoints on several made-up devices and says what they hold: `python -m tests.models.shared_out`.

A process of its own, because JAX decides how many CPU devices it makes up when it starts. Standard input has a list of
runs, each {"directory", "count", "groups", "options"} and what else is asked for. Standard output has their results:

- "piece_bytes": tensors are read and rounded in pieces of so many bytes, or one row;
- "is_measured": memory is measured, and nothing is compared.
"""

import functools
import json
import math
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from bench.load import AnonymousPeak
from jsg import malloc
from jsg.models import in_place
from jsg.models.checkpoint import Checkpoint
from jsg.models.config import read_spec
from jsg.models.loading import load_model
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import make_mesh

PIECE_BYTES, ROUNDED_BYTES = malloc.PIECE_BYTES, in_place.ROUNDED_BYTES


def leaves(model: nnx.Module) -> list[tuple[str, jax.Array]]:
    return [
        ("/".join(map(str, path)), leaf)
        for path, node in nnx.iter_graph(model)
        if isinstance(node, nnx.Param)
        for leaf in jax.tree.leaves(node.get_value())
    ]


def shards(leaf: jax.Array) -> list[Any]:
    """The shard on each device, in the order of the devices."""
    return sorted(leaf.addressable_shards, key=lambda shard: shard.device.id)


def are_slices(leaf: jax.Array, whole: np.ndarray) -> bool:
    """Whether every device holds what its sharding says."""
    return all(np.array_equal(shard.data, whole[shard.index]) for shard in leaf.addressable_shards)


@functools.cache
def kept(directory: Path, config: ModelSpec, options: tuple[tuple[str, Any], ...]) -> list[tuple[str, jax.Array]]:
    malloc.PIECE_BYTES, in_place.ROUNDED_BYTES = PIECE_BYTES, ROUNDED_BYTES  # and not those of the run before
    return leaves(load_model(directory, config, **dict(options)))


def on_one_device(directory: Path, config: ModelSpec, options: dict[str, Any]) -> list[tuple[str, jax.Array]]:
    """The parameters on one device. They are loaded once for all runs that differ in how several devices are filled."""
    return kept(directory, config, tuple(sorted(options.items())))


def compare(directory: Path, run: dict[str, Any]) -> dict[str, Any]:
    """One device and several: the same configuration, whose heads may be repeated for the several."""
    count, groups, options = run["count"], run.get("groups", 1), run["options"]
    config = read_spec(directory).over_devices(count, groups)
    whole = on_one_device(directory, config, options)
    malloc.PIECE_BYTES = run.get("piece_bytes", PIECE_BYTES)
    in_place.ROUNDED_BYTES = run.get("piece_bytes", ROUNDED_BYTES)
    num_read = 0
    read = Checkpoint.read

    def spy(self: Checkpoint, name: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        nonlocal num_read
        tensor = read(self, name, slices)
        num_read += tensor.size
        return tensor

    Checkpoint.read = spy
    try:
        several = leaves(load_model(directory, config, mesh=make_mesh(count, groups), **options))
    finally:
        Checkpoint.read = read
    shared_out = [leaf for _, leaf in several if not leaf.is_fully_replicated]
    whole_size = sum(leaf.size for _, leaf in several if leaf.is_fully_replicated)
    return {
        "differing": [
            name
            for (name, one), (_, many) in zip(whole, several, strict=True)
            if one.dtype != many.dtype or len(many.addressable_shards) != count or not are_slices(many, np.asarray(one))
        ],
        "num_shared_out": len(shared_out),
        "numbers_read": num_read,
        "spans": {
            name: [
                [part.indices(size)[:2] for part, size in zip(shard.index, leaf.shape, strict=True)]
                for shard in shards(leaf)
            ]
            for name, leaf in several
        },
        "numbers_held": whole_size + sum(math.prod(leaf.shape) for leaf in shared_out),
    }


def measure(directory: Path, run: dict[str, Any]) -> dict[str, Any]:
    """The most anonymous memory while it loads, beyond what there was before."""
    count, groups, options = run["count"], run.get("groups", 1), run["options"]

    config = read_spec(directory).over_devices(count, groups)
    mesh = make_mesh(count, groups)
    jax.block_until_ready(jax.numpy.zeros(3) + 1)
    with AnonymousPeak() as peak:
        model = load_model(directory, config, mesh=mesh, **options)
    return {
        "bytes": sum(shard.data.nbytes for _, leaf in leaves(model) for shard in leaf.addressable_shards),
        "peak_bytes": peak.num_bytes,
    }


def main() -> None:
    runs = json.load(sys.stdin)
    jax.config.update("jax_num_cpu_devices", max(run["count"] for run in runs))
    results = [(measure if run.get("is_measured") else compare)(Path(run["directory"]), run) for run in runs]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
