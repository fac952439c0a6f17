"""Samples tokens from logits that four devices share, and from the same logits on one device.

`python -m tests.engine.device.parallel_sampling`: a process of its own, because JAX decides how many CPU devices it
makes up when it starts. Standard output has, for each
case, the tokens of both.
"""

import functools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jsg.engine.device.sampling import SamplingInputs, best_tokens, choose_tokens
from jsg.models.tensor_parallel import along, make_mesh

ROWS, VOCAB, DEVICES = 64, 96, 4


def inputs_of(rng: np.random.Generator) -> SamplingInputs:
    """Every third row is greedy."""
    zeros = jnp.zeros(ROWS, jnp.int32)
    temperature = np.where(np.arange(ROWS) % 3 == 0, 0, rng.uniform(0.2, 2, ROWS)).astype(np.float32)
    return SamplingInputs(
        rows=zeros,
        output_index=jnp.asarray(rng.integers(0, 99, ROWS), jnp.int32),
        seeds=jnp.asarray(rng.integers(0, 2**32, (ROWS, 2)), jnp.uint32),
        top_k=zeros + VOCAB,
        uses_tables=zeros > 0,
        numbers={"temperature": jnp.asarray(temperature)},
    )


def main() -> None:
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rng = np.random.default_rng(0)
    inputs, mesh = inputs_of(rng), make_mesh(DEVICES)
    smooth = rng.normal(size=(ROWS, VOCAB)).astype(np.float32)
    broken = np.where(rng.random((ROWS, VOCAB)) < 0.005, np.nan, smooth)
    broken = np.where(rng.random((ROWS, VOCAB)) < 0.005, np.inf, broken)
    kinds = {"smooth": smooth, "ties": np.round(smooth), "broken": broken}
    masks = {"all": None, "some": rng.random((ROWS, VOCAB)) < 0.1}
    masks["some"][:, 90] = True
    results = {}
    for kind, logits in kinds.items():
        for mask, allowed in masks.items():
            for is_sampled in (False, True):
                one = choose_tokens(logits, inputs, None, allowed, is_sampled=is_sampled, has_thresholds=False)
                four = jax.shard_map(
                    functools.partial(best_tokens, is_sampled=is_sampled),
                    mesh=mesh,
                    in_specs=(along(1, 2), PartitionSpec(), PartitionSpec()),
                    out_specs=PartitionSpec(),
                    check_vma=False,
                )
                results[f"{kind}, {mask}, {is_sampled}"] = [
                    one.tolist(),
                    jax.jit(four)(logits, inputs, allowed).tolist(),
                ]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
