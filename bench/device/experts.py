"""The parts of a layer with experts: the choice of experts, and the products of rows with their experts' kernels.

Before a part is timed, its results are compared with its definition in float64; products at some rows and columns only.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.device.correctness import MAX_ERROR, Correctness
from bench.device.events import Part
from bench.device.queued import floor_facts, options, temporary_mib, time_queued
from bench.roofline import Cost
from jsg.engine.device.devices import E4M3_CAPABILITY
from jsg.kernels_pallas import ops, tuning
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.models.quantise import STORED

CHECKED_ROWS = 256
CHECKED_COLUMNS = 64
STEP = 1 / 32
"""The scale of every column of 8-bit kernels. Their numbers are normally distributed and rounded to such steps."""
MAX_WEIGHT_ERROR = 1e-5


class Kernels(NamedTuple):
    """The kernels of all experts, [E, D, F]; in 8 bits also their scales, [E, 1, F]."""

    values: jax.Array
    scale: jax.Array | None


def measure(part: Part) -> None:
    """Measures microseconds of the choice, and milliseconds of each product and type of kernel, beside its floor."""
    plan, shape = part.plan, part.plan.experts
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    correctness = Correctness(part)
    for num_tokens in plan.expert_tokens:
        name = f"experts of {num_tokens} tokens"
        run = functools.partial(_measure_routes, part, correctness, name, num_tokens)
        part.attempt(name, run, op="expert_routes")
    for side, (depth, columns) in {"up": (width, inner), "down": (inner, width)}.items():
        for quantization in ("none", *_stored()):
            run = functools.partial(_measure_products, part, correctness, side, depth, columns, quantization)
            op = "grouped_matmul" if quantization == "none" else None
            part.attempt(f"products of experts, {side}, {quantization}", run, op=op)
    correctness.end()


def _stored() -> list[str]:
    """The types with 8 bits that the engine allows on this card."""
    capability = tuning.target_capability()
    has_e4m3 = capability is None or capability >= E4M3_CAPABILITY
    return [name for name in STORED if name != "fp8" or has_e4m3]


def _logits(part: Part, num_tokens: int) -> jax.Array:
    return jax.random.normal(jax.random.key(num_tokens), (num_tokens, part.plan.experts["num_local_experts"]))


def _measure_routes(part: Part, correctness: Correctness, name: str, num_tokens: int) -> None:
    logits, chosen = _logits(part, num_tokens), part.plan.experts["num_experts_per_tok"]
    choose = functools.partial(ops.expert_routes, choice=ChoiceSpec(per_token=chosen))
    compiled = jax.jit(choose).lower(logits).compile(compiler_options=options())
    found = compiled(logits)
    weights, *whole = routes_in_float64(np.asarray(logits, np.float64), chosen)
    correctness.add(f"{name}: weights", float(np.abs(found.weights - weights).max()), MAX_WEIGHT_ERROR, "expert_routes")
    differing = max(float(np.mean(np.asarray(a) != b)) for a, b in zip(found[1:], whole, strict=True))
    correctness.add(f"{name}: places that are others", differing, 0.0, "expert_routes")
    samples = [1e3 * ms for ms in time_queued(part, lambda: compiled(logits).sizes)]
    part.add(name, "us", samples, kind="expert-routes", tokens=num_tokens)


def routes_in_float64(logits: np.ndarray, experts_per_token: int) -> tuple[np.ndarray, ...]:
    """The fields of `Routes`, computed by their definition."""
    likely = np.exp(logits - logits.max(1, keepdims=True))
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :experts_per_token]
    weights = np.take_along_axis(likely, experts, 1)
    order = np.argsort(experts.reshape(-1), kind="stable")
    places = np.argsort(order).reshape(experts.shape)
    sizes = np.bincount(experts.reshape(-1), minlength=logits.shape[1])
    return weights / weights.sum(1, keepdims=True), places, order // experts_per_token, sizes


def _measure_products(
    part: Part, correctness: Correctness, side: str, depth: int, columns: int, quantization: str
) -> None:
    """Measures products of one kernel of each expert with the rows of as many tokens as a step of the plan has."""
    plan, shape = part.plan, part.plan.experts
    kernels = make_kernels((shape["num_local_experts"], depth, columns), plan.dtype, quantization)
    multiply = functools.partial(ops.grouped_matmul, result=plan.dtype)
    choice = ChoiceSpec(per_token=shape["num_experts_per_tok"])
    for num_tokens in plan.expert_tokens:
        sizes = ops.expert_routes(_logits(part, num_tokens), choice).sizes
        num_rows = num_tokens * shape["num_experts_per_tok"]
        rows = (depth**-0.5 * jax.random.normal(jax.random.key(1), (num_rows, depth))).astype(plan.dtype)
        lowered = jax.jit(multiply).lower(rows, kernels.values, sizes, scale=kernels.scale)
        compiled = lowered.compile(compiler_options=options(quantization))

        def call(compiled: Any = compiled, rows: jax.Array = rows, sizes: jax.Array = sizes) -> jax.Array:
            return compiled(rows, kernels.values, sizes, scale=kernels.scale)

        name = f"products of {num_tokens} tokens' experts, {side}, {kernels.values.dtype.name}"
        error = largest_error(call(), rows, kernels, np.asarray(sizes))
        correctness.add(f"{name}: error", error, MAX_ERROR[plan.dtype], "grouped_matmul")
        samples = time_queued(part, call)
        read = int(np.count_nonzero(sizes)) * depth * columns * kernels.values.dtype.itemsize
        cost = Cost(weight_bytes=read, kv_bytes=0, matmul_flops=2 * num_rows * depth * columns, attention_flops=0)
        facts = {"tokens": num_tokens, "side": side, "quantization": quantization, **temporary_mib(compiled)}
        part.add(name, "ms", samples, kind="experts", **facts, **floor_facts(part, cost, min(samples)))


def make_kernels(shape: tuple[int, int, int], dtype: str, quantization: str) -> Kernels:
    """Normally distributed kernels, with which rows of length 1 have products of about 1."""

    @functools.partial(jax.jit, static_argnums=0)
    def make(dtype: jax.typing.DTypeLike, scale: float) -> jax.Array:
        numbers = scale * jax.random.normal(jax.random.key(0), shape, "bfloat16")
        return (jnp.round(numbers) if jnp.issubdtype(dtype, jnp.integer) else numbers).astype(dtype)

    if quantization == "none":
        return Kernels(make(dtype, 1.0), None)
    return Kernels(make(STORED[quantization], 1 / STEP), jnp.full((shape[0], 1, shape[2]), STEP))


def largest_error(found: jax.Array, rows: jax.Array, kernels: Kernels, sizes: np.ndarray) -> float:
    """The largest difference from the definition at some rows, which include the first and last of each group."""
    ends = np.cumsum(sizes)
    some = np.linspace(0, len(rows) - 1, CHECKED_ROWS).astype(int)
    picked = np.unique(np.concatenate([some, (ends - sizes)[sizes > 0], (ends - 1)[sizes > 0]]))
    columns = np.unique(np.linspace(0, kernels.values.shape[2] - 1, CHECKED_COLUMNS).astype(int))
    exact, shown = np.asarray(rows[picked], np.float64), np.asarray(found[picked][:, columns], np.float64)
    groups = np.searchsorted(ends, picked, side="right")
    error = 0.0
    for group in np.unique(groups):
        kernel = np.asarray(kernels.values[group][:, columns], np.float64)
        scale = 1.0 if kernels.scale is None else np.asarray(kernels.scale[group, 0, columns], np.float64)
        mine = groups == group
        error = max(error, float(np.abs(shown[mine] - exact[mine] @ kernel * scale).max()))
    return error
