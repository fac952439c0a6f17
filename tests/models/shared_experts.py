"""The sparse block on one device and shared out over several: `python -m tests.models.shared_experts`.

A process of its own, because JAX decides how many CPU devices it makes up when it starts. Standard input has a list of
cases, each {"directory", "implementation", "devices", "groups", "quantization"}; standard output has what came of each.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any, cast
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jsg.kernels_pallas import ops
from jsg.models.config import read_spec
from jsg.models.experts import SparseFeedForward
from jsg.models.loading import load_model
from jsg.models.tensor_parallel import make_mesh, spec_of

MOST_DEVICES = 4
TOKENS = 24


def run(count: int, case: dict[str, Any], tokens: list[np.ndarray]) -> list[np.ndarray]:
    """The first sparse block over all tokens; every device's result, which must be the same."""
    groups = case["groups"] if count > 1 else 1
    directory = Path(case["directory"])
    config, mesh = read_spec(directory).over_devices(count, groups), make_mesh(count, groups)
    model = cast(Any, load_model(directory, config, quantization=case["quantization"], mesh=mesh))
    graph, state = nnx.split(next(layer.mlp for layer in model.layers if isinstance(layer.mlp, SparseFeedForward)))

    def block(state: nnx.State, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x)

    if mesh is not None:
        specs = (jax.tree.map(spec_of, state), PartitionSpec())
        block = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)
    compiled, found = jax.jit(block), []
    for x in tokens:
        out = compiled(state, jnp.asarray(x))
        shards = [np.asarray(shard.data) for shard in out.addressable_shards]
        assert all(np.array_equal(shards[0], shard, equal_nan=True) for shard in shards)
        found.append(shards[0])
    return found


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """How far several devices are from one, and which tokens are not finite where three of them were not."""
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(TOKENS, 64)).astype(np.float32)
    alike = np.repeat(mixed[:1], TOKENS, 0)  # all choose the same two of four experts: the other devices have no token
    broken = mixed.copy()
    broken[3, 5], broken[4], broken[9, 0] = np.nan, np.nan, np.inf
    uses = {"triton": mock.patch.dict(ops.BEST, cpu="triton"), "reference": contextlib.nullcontext()}
    with uses[case["implementation"]]:
        several = run(case["devices"], case, [mixed, alike, broken])
    alone = run(1, case, [mixed, alike, broken])
    is_broken = ~np.isfinite(several[2]).all(1)
    return {
        "differences": [float(np.abs(a - b).max()) for a, b in zip(alone[:2], several[:2], strict=True)],
        "broken": np.flatnonzero(is_broken).tolist(),
        "others_are_as_before": bool(np.array_equal(several[2][~is_broken], several[0][~is_broken])),
    }


def main() -> None:
    cases = json.load(sys.stdin)
    jax.config.update("jax_num_cpu_devices", MOST_DEVICES)
    json.dump([answer(case) for case in cases], sys.stdout)


if __name__ == "__main__":
    main()
