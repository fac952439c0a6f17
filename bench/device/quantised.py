"""Products with 8-bit kernels beside products with longer types: the feed-forward blocks of a few layers.

XLA computes the products with rows in a longer type, with the engine's options for each type. Where the card multiplies
e4m3, those of fp8 are computed with rows in e4m3 too. Each type is compared with float64 first.
"""

import functools
import math
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bench.device.correctness import MAX_ERROR, Correctness
from bench.device.events import Part
from bench.device.queued import floor_facts, options, temporary_mib, time_queued
from bench.roofline import Cost
from jsg.engine.device import fp8_kernels
from jsg.engine.device.devices import E4M3_CAPABILITY
from jsg.kernels_pallas import reference_fp8, tuning
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.inputs import Fp8Kernel
from jsg.models.config import read_spec
from jsg.models.decoder import Decoder, FeedForward
from jsg.models.layers import project
from jsg.models.loading import load_model
from jsg.models.quantise import FORMS, STORED

CHECKED_COLUMNS = 64


def measure(part: Part) -> None:
    """Measures milliseconds of all blocks in sequence, beside their floor."""
    correctness = Correctness(part)
    for quantization in ("none", *STORED):
        part.attempt(f"blocks, {quantization}", functools.partial(_measure, part, correctness, quantization))
    capability = tuning.target_capability() if jax.default_backend() == "gpu" else None
    if capability is not None and capability >= E4M3_CAPABILITY:
        part.attempt("blocks, rows in e4m3", functools.partial(_measure, part, correctness, "fp8", rounds_rows=True))
    correctness.end()


def _measure(part: Part, correctness: Correctness, quantization: str, *, rounds_rows: bool = False) -> None:
    plan = part.plan.with_layers(min(part.plan.ab_layers, part.plan.shape["num_hidden_layers"]))
    config = read_spec(part.model_directory(plan))
    model = cast(Decoder, load_model(None, config, load_format="dummy", dtype=plan.dtype, quantization=quantization))
    blocks = nnx.List([cast(FeedForward, layer.mlp) for layer in model.layers])
    del model
    if rounds_rows:
        fp8_kernels.lay_out(blocks)
    graph, state = nnx.split(blocks)
    kernels = [block.gate_up.kernel.get_value() for block in blocks] + [
        block.down.kernel.get_value() for block in blocks
    ]
    values = [kernel.values if isinstance(kernel, Quantised | Fp8Kernel) else kernel for kernel in kernels]
    products = "none" if rounds_rows else quantization  # whose options XLA has
    num_weights, num_bytes = sum(each.size for each in values), sum(each.nbytes for each in values)

    def run(state: nnx.State, x: jax.Array) -> jax.Array:
        for block in nnx.merge(graph, state):
            x = x + block(x)
        return x

    for rows in plan.product_rows:
        x = jax.random.normal(jax.random.key(rows), (rows, config.hidden_size)).astype(plan.dtype)
        name = f"products of {rows} rows, {values[0].dtype.name}{', rows too' if rounds_rows else ''}"
        correctness.add(f"{name}: error", _error(x, kernels[0], products), MAX_ERROR[plan.dtype])
        compiled = jax.jit(run).lower(state, x).compile(compiler_options=options(products))
        samples = time_queued(part, functools.partial(compiled, state, x))
        cost = Cost(weight_bytes=num_bytes, kv_bytes=0, matmul_flops=2 * rows * num_weights, attention_flops=0)
        facts = {"rows": rows, "quantization": quantization, "rounds_rows": rounds_rows, "layers": len(blocks)}
        facts |= temporary_mib(compiled)
        part.add(name, "ms", samples, kind="quantised", **facts, **floor_facts(part, cost, min(samples)))


def _error(x: jax.Array, kernel: jax.Array | Quantised | Fp8Kernel, products: str) -> float:
    """The largest difference of a product from the one in float64, at some columns, of rows as they are rounded."""
    found = jax.jit(project).lower(x, kernel).compile(compiler_options=options(products))(x, kernel)
    rows = np.asarray(x, np.float64)
    if isinstance(kernel, Fp8Kernel):
        rounded = reference_fp8.rounded(x, len(kernel.scale))
        rows = np.asarray(rounded.values, np.float64) * np.asarray(rounded.scale, np.float64)
        kernel = Quantised(jnp.moveaxis(kernel.values, -1, 0), kernel.scale, FORMS["fp8"])
    is_short = isinstance(kernel, Quantised)
    values, scale = (kernel.values, kernel.scale) if is_short else (kernel, np.ones((1, *kernel.shape[1:])))
    num_columns = math.prod(values.shape[1:])
    columns = np.unique(np.linspace(0, num_columns - 1, CHECKED_COLUMNS).astype(int))
    some = np.asarray(values.reshape(-1, num_columns)[:, columns], np.float64)
    exact = rows @ some * np.asarray(scale, np.float64).reshape(-1)[columns]
    return float(np.abs(np.asarray(found.reshape(-1, num_columns)[:, columns], np.float64) - exact).max())
