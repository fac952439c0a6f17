"""The logits that top-k and top-p keep, and the largest logits, in plain `jnp`. Letters: `jsg/models/inputs.py`."""

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt


def sortable(values: Float[Array, "*dims"]) -> UInt[Array, "*dims"]:
    """Unsigned integers in the same order as the floats: -NaN < -inf < … < -0 < 0 < … < inf < NaN."""
    bits = lax.bitcast_convert_type(values, jnp.uint32)
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(1 << 31))


def kept_threshold(
    logits: Float[Array, "R V"],
    largest: Float[Array, " R"],
    temperature: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
) -> UInt[Array, " R"]:
    """See `ops.kept_threshold`. A search that no row needs is left out: each goes through all logits 32 times."""
    order = sortable(logits)
    every = jnp.zeros(len(logits), jnp.uint32)
    searched = functools.partial(_threshold, order, jnp.ones_like(logits), top_k.astype(jnp.float32))
    least = lax.cond(jnp.any(top_k < logits.shape[1]), searched, lambda: every)

    def nucleus() -> UInt[Array, " R"]:
        weights = jnp.exp((logits - largest[:, None]) / temperature[:, None])
        weights = jnp.where(order >= least[:, None], weights, 0.0)
        found = _threshold(order, weights, top_p * jnp.sum(weights, axis=-1))
        return jnp.where(top_p >= 1, least, jnp.maximum(least, found))

    return lax.cond(jnp.any(top_p < 1), nucleus, lambda: least)


def top_logits(logits: Float[Array, "R V"], count: int) -> tuple[Float[Array, "R top"], Int[Array, "R top"]]:
    """See `ops.top_logits`."""
    values, ids = lax.top_k(logits, count)
    return values, ids


def _threshold(
    order: UInt[Array, "R V"], weights: Float[Array, "R V"], needed: Float[Array, " R"]
) -> UInt[Array, " R"]:
    """The largest value for which the weights of all from it up reach what is needed; 0 if even all do not.

    It bisects over the bits of the value, the highest first, and is exact after 32 halvings.
    """

    def one_bit(index: Int[Array, ""], low: UInt[Array, " R"]) -> UInt[Array, " R"]:
        middle = low | (jnp.uint32(1) << (31 - index).astype(jnp.uint32))
        total = jnp.sum(jnp.where(order >= middle[:, None], weights, 0.0), axis=-1)
        return jnp.where(total >= needed, middle, low)

    return lax.fori_loop(0, 32, one_bit, jnp.zeros(len(order), jnp.uint32))
