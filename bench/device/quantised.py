"""Products with 8-bit kernels beside products with longer types: the feed-forward blocks of a few layers.

XLA computes the products, with the engine's options for each type. Each type is compared with float64 first.
"""

import functools
import math
from typing import cast

import jax
import numpy as np
from flax import nnx

from bench.device.correctness import MAX_ERROR, Correctness
from bench.device.events import Part
from bench.device.queued import floor_facts, options, temporary_mib, time_queued
from bench.roofline import Cost
from jsg.kernels_pallas.few_bits import Quantised
from jsg.models.config import read_spec
from jsg.models.decoder import Decoder, FeedForward
from jsg.models.layers import project
from jsg.models.loading import load_model
from jsg.models.quantise import STORED

CHECKED_COLUMNS = 64


def measure(part: Part) -> None:
    """Measures milliseconds of all blocks in sequence, beside their floor."""
    correctness = Correctness(part)
    for quantization in ("none", *STORED):
        part.attempt(f"blocks, {quantization}", functools.partial(_measure, part, correctness, quantization))
    correctness.end()


def _measure(part: Part, correctness: Correctness, quantization: str) -> None:
    plan = part.plan.with_layers(min(part.plan.ab_layers, part.plan.shape["num_hidden_layers"]))
    config = read_spec(part.model_directory(plan))
    model = cast(Decoder, load_model(None, config, load_format="dummy", dtype=plan.dtype, quantization=quantization))
    blocks = nnx.List([cast(FeedForward, layer.mlp) for layer in model.layers])
    del model
    graph, state = nnx.split(blocks)
    kernels = [block.gate_up.kernel.get_value() for block in blocks] + [
        block.down.kernel.get_value() for block in blocks
    ]
    values = [kernel.values if isinstance(kernel, Quantised) else kernel for kernel in kernels]
    num_weights, num_bytes = sum(each.size for each in values), sum(each.nbytes for each in values)

    def run(state: nnx.State, x: jax.Array) -> jax.Array:
        for block in nnx.merge(graph, state):
            x = x + block(x)
        return x

    for rows in plan.product_rows:
        x = jax.random.normal(jax.random.key(rows), (rows, config.hidden_size)).astype(plan.dtype)
        name = f"products of {rows} rows, {values[0].dtype.name}"
        correctness.add(f"{name}: error", _error(x, kernels[0], quantization), MAX_ERROR[plan.dtype])
        compiled = jax.jit(run).lower(state, x).compile(compiler_options=options(quantization))
        samples = time_queued(part, functools.partial(compiled, state, x))
        cost = Cost(weight_bytes=num_bytes, kv_bytes=0, matmul_flops=2 * rows * num_weights, attention_flops=0)
        facts = {"rows": rows, "quantization": quantization, "layers": len(blocks), **temporary_mib(compiled)}
        part.add(name, "ms", samples, kind="quantised", **facts, **floor_facts(part, cost, min(samples)))


def _error(x: jax.Array, kernel: jax.Array | Quantised, quantization: str) -> float:
    """The largest difference of a product from the one in float64, at some columns."""
    found = jax.jit(project).lower(x, kernel).compile(compiler_options=options(quantization))(x, kernel)
    is_short = isinstance(kernel, Quantised)
    values, scale = (kernel.values, kernel.scale) if is_short else (kernel, np.ones((1, *kernel.shape[1:])))
    num_columns = math.prod(values.shape[1:])
    columns = np.unique(np.linspace(0, num_columns - 1, CHECKED_COLUMNS).astype(int))
    some = np.asarray(values.reshape(-1, num_columns)[:, columns], np.float64)
    exact = np.asarray(x, np.float64) @ some * np.asarray(scale, np.float64).reshape(-1)[columns]
    return float(np.abs(np.asarray(found.reshape(-1, num_columns)[:, columns], np.float64) - exact).max())
