"""Linear attention of one layer alone: its step in decode, and prompts, beside the least that they move and compute.

Each program's results are compared with the reference on the same device before it is timed.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bench.device.correctness import MAX_ERROR, Correctness
from bench.device.events import Part
from bench.device.queued import floor_facts, options, temporary_mib, time_queued
from bench.roofline import Cost
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, PieceTiles, ScanWeights, StateCache
from jsg.kernels_pallas.reference_delta import tiles_of
from jsg.kernels_pallas.tile import QUERY_TILE

TAPS = 4
STEPS = (0.001, 1.0)


class Layer(NamedTuple):
    """The sizes of a layer.

    Attributes:
        key_heads: Heads of queries and keys.
        heads: Heads of values.
        keys: Width of a query and key.
        values: Width of a value.
        rule: "delta" with a decay for each head, "channels" with one for each number of a key, or "scan" of Mamba-2.
    """

    key_heads: int
    heads: int
    keys: int
    values: int
    rule: str

    @property
    def of_values(self) -> int:
        """The numbers of the values of a key head."""
        return self.heads // self.key_heads * self.values

    @property
    def mixed(self) -> int:
        """Those that the convolution mixes of a key head."""
        return 2 * self.keys + self.of_values


class Given(NamedTuple):
    """What a call is given beside its pieces and their states."""

    joint: jax.Array
    raw_gates: jax.Array
    weights: DeltaWeights | ScanWeights
    apart: GatesApart | None


class Step(NamedTuple):
    """The pieces of a call, cut into tiles if it is of prompts."""

    pieces: Pieces
    tiles: PieceTiles | None


def measure(part: Part) -> None:
    """Measures milliseconds of a step of as many rows as a plan decodes, and of a prompt in either type of a card."""
    plan, correctness = part.plan, Correctness(part)
    dtypes = (plan.dtype, "float16") if plan.is_for_accelerators else (plan.dtype,)
    for name, sizes in plan.states.items():
        layer = Layer(**sizes)
        loads = {f"{rows} rows": (plan.dtype, rows, 1) for rows in plan.batches}
        loads |= {f"a prompt of {each}, {dtype}": (dtype, 1, each) for dtype in dtypes for each in plan.state_prompts}
        for what, load in loads.items():
            run = functools.partial(_measure, part, correctness, f"states of {name}, {what}", layer, *load)
            part.attempt(f"states of {name}, {what}", run, op="gated_delta" if load[0] == plan.dtype else None)
    correctness.end()


def _measure(part: Part, correctness: Correctness, name: str, layer: Layer, dtype: str, rows: int, length: int) -> None:
    """Times a program of several calls, each with other slots, so that no state is in a cache of the device."""
    num_slots = max(part.plan.batches)
    count = max(1, min(part.plan.attention_calls, num_slots // rows))
    steps = [_step(rows, length, 1 + index * rows) for index in range(count)]
    given, cache = _given(layer, rows * length, dtype), _states(layer, num_slots + 1, dtype)
    run = functools.partial(_calls, has_one_token=length == 1)
    compiled = jax.jit(run, donate_argnums=1).lower(given, cache, steps).compile(compiler_options=options())
    expected, after = jax.jit(functools.partial(run, implementation="reference"))(given, cache, steps[:1])
    found, cache = compiled(given, cache, steps)
    first = slice(1, 1 + rows)
    errors = [_error(found[0], expected[0]), *(_error(a[first], b[first]) for a, b in zip(cache, after, strict=True))]
    correctness.add(f"{name}: error", max(errors), MAX_ERROR[dtype], "gated_delta")
    del expected, after

    def call() -> jax.Array:
        nonlocal cache
        outs, cache = compiled(given, cache, steps)
        return outs[-1]

    samples = [ms / count for ms in time_queued(part, call)]
    cost = _cost(layer, rows, rows * length, jnp.dtype(dtype).itemsize)
    facts = {"rows": rows, "length": length, "dtype": dtype, "rule": layer.rule, **temporary_mib(compiled)}
    part.add(name, "ms", samples, kind="states", **facts, **floor_facts(part, cost, min(samples)))


def _calls(
    given: Given, cache: StateCache, steps: Sequence[Step], *, has_one_token: bool, implementation: str | None = None
) -> tuple[list[jax.Array], StateCache]:
    joint, raw_gates, weights, apart = given
    own = {"steps": STEPS} if isinstance(weights, ScanWeights) else {"eps": 1e-6}
    weights = weights._replace(**own)
    outs = []
    for pieces, tiles in steps:
        how = {"apart": apart, "has_one_token": has_one_token, "tiles": tiles, "implementation": implementation}
        out, cache = ops.gated_delta(joint, raw_gates, weights, cache, pieces, **how)
        outs.append(out)
    return outs, cache


def _step(rows: int, length: int, first: int) -> Step:
    """Pieces of one length, each behind other tokens, in slots from `first` on."""
    index, same = np.arange(rows, dtype=np.int32), np.ones(rows, np.int32)
    columns = (index * length, same * length, first + index, first + index, same * QUERY_TILE, same * 0)
    pieces = Pieces(*(jnp.asarray(column) for column in columns))
    return Step(pieces, None if length == 1 else tiles_of(pieces, rows * -(-length // QUERY_TILE)))


def _given(layer: Layer, num_tokens: int, dtype: str) -> Given:
    keys = iter(jax.random.split(jax.random.key(0), 16))
    key_heads, heads, group = layer.key_heads, layer.heads, layer.heads // layer.key_heads

    def normal(*shape: int, dtype: str = dtype) -> jax.Array:
        return jax.random.normal(next(keys), shape, dtype)

    def of_heads(*each: int) -> jax.Array:
        return normal(heads, *each, dtype="float32")

    taps, is_apart = normal(TAPS, key_heads, layer.mixed) / 2, layer.rule == "channels"
    joint = normal(num_tokens, key_heads, layer.mixed + (0 if is_apart else layer.of_values))
    raw = normal(num_tokens, key_heads, group * (2 if layer.rule == "delta" else 1))
    if layer.rule == "scan":
        bias = normal(key_heads, layer.mixed)
        return Given(joint, raw, ScanWeights(taps, of_heads(), of_heads(), of_heads(), bias, STEPS), None)
    biases = of_heads(layer.keys) if is_apart else of_heads()
    weights = DeltaWeights(taps, of_heads(), biases, normal(layer.values, dtype="float32"), 0.0)
    of_apart = (normal(num_tokens, key_heads, each) for each in (group * layer.keys, layer.of_values))
    return Given(joint, raw, weights, GatesApart(*of_apart) if is_apart else None)


def _states(layer: Layer, num_slots: int, dtype: str) -> StateCache:
    """One random slot is repeated, because making more random numbers would take longer than reading them."""
    inputs = jax.random.normal(jax.random.key(1), (1, TAPS, layer.key_heads, layer.mixed), dtype)
    states = jax.random.normal(jax.random.key(2), (1, layer.heads, layer.values, layer.keys))
    return StateCache(*(jnp.tile(x, (num_slots, *[1] * (x.ndim - 1))) for x in (inputs, states)))


def _error(found: jax.Array, expected: jax.Array) -> float:
    """The root mean square of the differences of a token or slot, that which is most, beside all expected numbers'.

    Where a head's output is small its norm makes what was rounded before large, so single numbers say nothing.
    """
    found, expected = (x.astype(jnp.float32).reshape(len(x), -1) for x in (found, expected))
    of_each = jnp.sqrt(jnp.mean(jnp.square(found - expected), axis=1))
    return float(jnp.max(of_each) / jnp.sqrt(jnp.mean(jnp.square(expected))))


def _cost(layer: Layer, rows: int, num_tokens: int, itemsize: int) -> Cost:
    """Each state in and out once, and each number of a token once. A token's key and query meet the whole state.

    So they do in tiles too, whose other products are not counted.
    """
    state = 4 * layer.heads * layer.values * layer.keys + TAPS * itemsize * layer.key_heads * layer.mixed
    is_scan, is_apart = layer.rule == "scan", layer.rule == "channels"
    of_token = itemsize * (layer.key_heads * (layer.mixed + layer.of_values) + is_apart * layer.heads * layer.keys)
    of_token += (4 if is_scan else itemsize) * layer.heads * layer.values
    products = 2 if is_scan else 3
    flops = 2 * products * layer.heads * layer.values * layer.keys * num_tokens
    num_bytes = 2 * rows * state + num_tokens * of_token
    return Cost(weight_bytes=0, kv_bytes=num_bytes, matmul_flops=0, attention_flops=flops)
