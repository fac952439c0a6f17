"""Rotary position embedding: frequencies on the host, rotation inside the trace. Letters: `jsg/models/inputs.py`."""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import ops
from jsg.models.block_spec import QueryScaleSpec, RopeSpec


class Rotation(NamedTuple):
    """Cosine and sine of every token's angles; one for all layers of a step."""

    cos: Float[Array, "T half"]
    sin: Float[Array, "T half"]


def rotation(positions: Int[Array, " T"], rope: RopeSpec | None, head_dim: int) -> Rotation:
    """Cosine and sine of the angles of positions, always in float32, because bfloat16 cannot count to 300.

    Without rope all angles are 0, which changes no number. On a CPU XLA would compute them again in each layer, for
    each number that it rotates. The barrier prevents that.
    """
    if rope is None:
        shape = (len(positions), head_dim // 2)
        return Rotation(jnp.ones(shape, jnp.float32), jnp.zeros(shape, jnp.float32))
    frequencies = inverse_frequencies(rope, head_dim)
    angles = positions.astype(jnp.float32)[:, None] * frequencies
    scale: float | np.ndarray = attention_factor(rope)
    if rope.rotated is not None:  # pairs that are not turned are not scaled
        scale = np.where(np.arange(len(frequencies)) < rope.rotated // 2, scale, 1.0).astype(np.float32)
    turn = Rotation(jnp.cos(angles) * scale, jnp.sin(angles) * scale)
    return lax.optimization_barrier(turn) if ops.target_platform() == "cpu" else turn


def grown(
    queries: Float[Array, "T N H"], positions: Int[Array, " T"], growth: QueryScaleSpec | None
) -> Float[Array, "T N H"]:
    """Queries times what grows with their position, if anything does."""
    if growth is None:
        return queries
    steps = jnp.floor((positions + growth.offset).astype(jnp.float32) / growth.length)
    return queries * (1 + growth.beta * jnp.log1p(steps)).astype(queries.dtype)[:, None, None]


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> Float[np.ndarray, " half"]:
    """Radians per position of each dimension pair, fastest first, and then 0 for pairs that are not turned.

    The arithmetic follows PyTorch's float32 step by step, because an error here grows with the position. PyTorch's
    power is exact to the last bit, but numpy's float32 power is not.
    """
    if rope.rotated is not None and rope.type != "proportional":
        turned = inverse_frequencies(dataclasses.replace(rope, rotated=None), rope.rotated)
        return np.pad(turned, (0, (head_dim - rope.rotated) // 2))
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)  # of a turn by one radian
    fast = np.float32(1.0) / wavelengths
    match rope.type:
        case "default":
            return fast
        case "linear":
            return fast / np.float32(rope.factor)
        case "llama3":
            return _llama3(fast, rope)
        case "yarn":
            return _yarn(wavelengths, rope, head_dim)
        case "longrope":
            return np.float32(1.0) / (np.asarray(rope.factors, np.float32) * wavelengths)
        case "proportional":
            is_turned = np.arange(len(fast)) < (rope.rotated or head_dim) // 2
            return np.where(is_turned, fast, np.float32(0.0)) / np.float32(rope.factor)


def attention_factor(rope: RopeSpec) -> float:
    """The factor of cosine and sine in yarn and longrope; 1 for other types."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.type == "yarn" else 1.0


def _llama3(fast: Float[np.ndarray, " half"], rope: RopeSpec) -> Float[np.ndarray, " half"]:
    """Keeps short waves, slows long ones by `factor`, and blends in between."""
    turns = np.float32(rope.original_max_position_embeddings) / (np.float32(2.0 * math.pi) / fast)
    slow = fast / np.float32(rope.factor)
    span = (rope.high_freq_factor - rope.low_freq_factor) or 1.0  # Llama 4 Scout blends nothing
    share = (turns - np.float32(rope.low_freq_factor)) / np.float32(span)
    blend = (np.float32(1.0) - share) * fast / np.float32(rope.factor) + share * fast
    return np.where(turns < rope.low_freq_factor, slow, np.where(turns > rope.high_freq_factor, fast, blend))


def _yarn(wavelengths: Float[np.ndarray, " half"], rope: RopeSpec, head_dim: int) -> Float[np.ndarray, " half"]:
    """Keeps dimensions that turn often within the original context, slows the others, with a ramp in between."""

    def dimension_that_turns(times: float) -> float:
        radians = times * 2.0 * math.pi
        return head_dim * math.log(rope.original_max_position_embeddings / radians) / (2.0 * math.log(rope.theta))

    low, high = dimension_that_turns(rope.beta_fast), dimension_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    # A span below 0, which an odd original context makes, is left as it is: transformers computes with it.
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32((high - low) or 1e-3)
    keep = np.float32(1.0) - np.clip(ramp, 0.0, 1.0)
    slow = np.float32(1.0) / (np.float32(rope.factor) * wavelengths)
    return slow * (np.float32(1.0) - keep) + np.float32(1.0) / wavelengths * keep
