"""Products with kernels in few bits, one and those of experts, beside the same products in a longer type.

Kernels are random. `ops` chooses who multiplies; of int8 with a scale for each column both that can are measured. Each
product is compared with float64 first, at some columns.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.device.correctness import MAX_ERROR, Correctness
from bench.device.events import Part
from bench.device.queued import floor_facts, options, time_queued
from bench.roofline import Cost
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.kernels_pallas.few_bits import Quantised, zeros
from jsg.kernels_pallas.form import Form
from jsg.models.quantise import FORMS

MEASURED: dict[str, Form] = {
    "int4": FORMS["int4"],
    "int8": FORMS["int8"],
    "AWQ": Form("int4", 32, "float16", has_zero=True),
    "MXFP4": Form("e2m1", 32, "float8_e8m0fnu"),
    "int8 in groups": Form("int8", 32, "bfloat16"),
    "Q4_K": Form("uint4", 32, "int8", has_zero=True, has_factor=True, has_step=True, block=64),
}
"""Forms that differ in what a card computes for a number. Groups are short, so that every plan has whole ones."""
CHECKED_COLUMNS = 64


def measure(part: Part) -> None:
    """Measures milliseconds of each form and number of rows, beside its floor."""
    correctness = Correctness(part)
    for name, form in ({"none": None} | MEASURED).items():
        part.attempt(f"products, {name}", functools.partial(_measure, part, correctness, name, form))
        if form is None or not form.scales_columns:
            part.attempt(f"products of experts, {name}", functools.partial(_experts, part, correctness, name, form))
    correctness.end()


def _measure(part: Part, correctness: Correctness, name: str, form: Form | None) -> None:
    shape = part.plan.shape
    kernel = _random(form, (shape["hidden_size"], 2 * shape["intermediate_size"]), part.plan.dtype)
    multiply: dict[str, Callable[..., jax.Array]] = {name: _product}
    if form is not None and form.scales_columns:
        multiply[f"{name} by XLA"] = _by_xla
    for rows in part.plan.product_rows:
        x = _rows(rows, shape["hidden_size"], part.plan.dtype)
        for shown, product in multiply.items():
            call = _compiled(product, shown.endswith("XLA"), x, kernel)
            exact = _exact(x, kernel)
            correctness.add(
                f"product of {rows} rows, {shown}: error", _error(call(), exact), MAX_ERROR[part.plan.dtype]
            )
            _add(part, f"product of {rows} rows, {shown}", call, kernel, rows, {"rows": rows, "quantization": shown})


def _experts(part: Part, correctness: Correctness, name: str, form: Form | None) -> None:
    shape = part.plan.experts
    count, per_token, depth = (shape[key] for key in ("num_local_experts", "num_experts_per_tok", "hidden_size"))
    kernels = _random(form, (count, depth, shape["intermediate_size"]), part.plan.dtype)
    for tokens in part.plan.expert_tokens:
        logits = jax.random.normal(jax.random.key(tokens), (tokens, count))
        sizes = ops.expert_routes(logits, ChoiceSpec(per_token=per_token)).sizes
        rows = _rows(tokens * per_token, depth, part.plan.dtype)
        call = _compiled(functools.partial(ops.grouped_matmul, result=part.plan.dtype), False, rows, kernels, sizes)
        first = int(np.flatnonzero(sizes)[0])
        one = jax.tree.map(lambda each, first=first: each[first], kernels)
        mine = int(sizes[first])
        error = _error(call()[:mine], _exact(rows[:mine], one))
        correctness.add(
            f"experts of {tokens} tokens, {name}: error", error, MAX_ERROR[part.plan.dtype], "grouped_matmul"
        )
        facts = {"tokens": tokens, "quantization": name}
        read = int(np.count_nonzero(sizes)) / count
        _add(part, f"products of {tokens} tokens' experts, {name}", call, kernels, len(rows) / count, facts, read)


def _product(x: jax.Array, kernel: jax.Array | Quantised) -> jax.Array:
    return ops.matmul(x, kernel, x.dtype) if isinstance(kernel, Quantised) else jnp.dot(x, kernel)


def _by_xla(x: jax.Array, kernel: Quantised) -> jax.Array:
    """As `models.layers.project` has it multiplied."""
    sums = jnp.dot(x, kernel.values.astype(x.dtype), preferred_element_type=jnp.float32)
    return (sums * kernel.wide_scale).astype(x.dtype)


def _compiled(product: Callable[..., Any], is_xla: bool, *given: Any) -> Callable[[], jax.Array]:
    chosen = options("int8" if is_xla else "none")
    return functools.partial(
        jax.jit(lambda *args: product(*args)).lower(*given).compile(compiler_options=chosen), *given
    )


def _rows(count: int, depth: int, dtype: str) -> jax.Array:
    return (depth**-0.5 * jax.random.normal(jax.random.key(count), (count, depth))).astype(dtype)


def _random(form: Form | None, shape: tuple[int, ...], dtype: str) -> jax.Array | Quantised:
    """A kernel of random codes, with which rows of length 1 have products of about 1."""
    if form is None:
        return jax.random.normal(jax.random.key(0), shape, dtype)
    kernel = zeros(form, shape, len(shape) - 2)
    codes = jax.random.bits(jax.random.key(0), kernel.values.shape, "uint8")
    # Those of int4 have few significant bits, as the form promises.
    part = {"int8": 1 / 74, "int4": 7 / 32, "uint4": 1 / 8.8, "e2m1": 1 / 3}[form.numbers]
    scale = jnp.full_like(kernel.scale, 16 if form.scale == "int8" else 2.0**-2 if form.scale.endswith("fnu") else part)
    return kernel._replace(
        values=jax.lax.bitcast_convert_type(codes, kernel.values.dtype),
        scale=scale,
        zero=None if kernel.zero is None else jnp.full_like(kernel.zero, 1),
        factor=None if kernel.factor is None else jnp.full_like(kernel.factor, part / 16),
        step=None if kernel.step is None else jnp.full_like(kernel.step, part / 4),
    )


def _exact(x: jax.Array, kernel: jax.Array | Quantised) -> np.ndarray:
    """The product of all rows with some columns, in float64."""
    columns = np.unique(np.linspace(0, kernel.shape[-1] - 1, CHECKED_COLUMNS).astype(int))
    some: Any = jax.tree.map(lambda each: each[:, columns], kernel)
    if isinstance(some, Quantised):
        some = some.restored(jnp.float32 if some.form.scales_columns else x.dtype)
    return np.asarray(x, np.float64) @ np.asarray(some, np.float64)


def _error(found: jax.Array, exact: np.ndarray) -> float:
    columns = np.unique(np.linspace(0, found.shape[-1] - 1, CHECKED_COLUMNS).astype(int))
    return float(np.abs(np.asarray(found[:, columns], np.float64) - exact).max())


def _add(
    part: Part,
    name: str,
    call: Callable[[], jax.Array],
    kernel: jax.Array | Quantised,
    rows: float,
    facts: dict[str, Any],
    read: float = 1.0,
) -> None:
    num_bytes = sum(each.nbytes for each in jax.tree.leaves(kernel))
    flops = int(2 * rows * np.prod(kernel.shape, dtype=np.float64))
    cost = Cost(weight_bytes=int(read * num_bytes), kv_bytes=0, matmul_flops=flops, attention_flops=0)
    samples = time_queued(part, call)
    part.add(name, "ms", samples, kind="few-bits", **facts, **floor_facts(part, cost, min(samples)))
