"""The gated delta rule in plain `jnp`: token by token, in one fixed order. See `ops.gated_delta`.

Yang et al. 2024, "Gated Delta Networks" (arXiv:2412.06464). For each head, whose state S is [values, keys]:

    S decays;  S += strength (v - S k) kᵀ;  output = S q
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, PieceTiles, ScanWeights, StateCache
from jsg.kernels_pallas.reference_convolution import convolve, last_inputs
from jsg.kernels_pallas.tile import QUERY_TILE

UNIT_EPS = 1e-6
"""What is added to the sum of squares of a query or key before its root."""


class Gates(NamedTuple):
    """What each token does to the state of each head, in float32.

    Attributes:
        decay: What multiplies the state, from 0 to 1: one number, or one for each number of a key.
        strength: How much of the difference from the new value is written.
    """

    decay: Float[Array, "T N *keys"]
    strength: Float[Array, "T N"]


def gated_delta(
    joint: Float[Array, "T K joint"],
    raw_gates: Float[Array, "T K gates"],
    weights: DeltaWeights | ScanWeights,
    cache: StateCache,
    pieces: Pieces,
    apart: GatesApart | None = None,
) -> tuple[Float[Array, "T N Dv"], StateCache]:
    """See `ops.gated_delta`. Computes in float32, and returns float32."""
    values, keys = cache.states.shape[2:]
    group = cache.states.shape[1] // joint.shape[1]
    mixed, gate = jnp.split(joint, [weights.taps.shape[2]], axis=-1)
    query, key, value = jnp.split(convolved(mixed, weights, cache, pieces), [keys, 2 * keys], axis=-1)
    value = value.reshape(len(joint), -1, values)
    skip = weights.skip if isinstance(weights, ScanWeights) else None
    if skip is None:
        query, key = unit(query) * keys**-0.5, unit(key)
    query, key = (jnp.repeat(x, group, axis=1) for x in (query, key))
    of_tokens = gates(raw_gates, weights, apart)
    out, states = recurrent(query, key, value, of_tokens, cache.states, pieces, skip=skip)
    kept = StateCache(last_inputs(mixed, cache.inputs, pieces), states)
    if isinstance(weights, ScanWeights):
        return out, kept
    out *= lax.rsqrt(jnp.mean(jnp.square(out), -1, keepdims=True) + weights.eps) * weights.norm.astype(jnp.float32)
    gate, activation = (gate, jax.nn.silu) if apart is None else (apart.output, jax.nn.sigmoid)
    out *= activation(gate.astype(jnp.float32)).reshape(out.shape)
    return out, kept


def convolved(
    mixed: Float[Array, "T K mixed"], weights: DeltaWeights | ScanWeights, cache: StateCache, pieces: Pieces
) -> Float[Array, "T K mixed"]:
    """The queries, keys and values as the convolution makes them."""
    made = convolve(mixed, weights.taps, cache.inputs, pieces)
    return jax.nn.silu(made + weights.bias.astype(jnp.float32) if isinstance(weights, ScanWeights) else made)


def gates(
    raw: Float[Array, "T K gates"], weights: DeltaWeights | ScanWeights, apart: GatesApart | None = None
) -> Gates:
    """The gates of all heads."""
    decay, strength = log_gates(raw, weights, apart)
    return Gates(jnp.exp(decay), strength)


def log_gates(
    raw: Float[Array, "T K gates"], weights: DeltaWeights | ScanWeights, apart: GatesApart | None = None
) -> Gates:
    """The same, but the logarithm of decay: for each key head the projections give the strengths, then the decays.

    Of a selective scan both come from the size of a step.
    """
    if isinstance(weights, ScanWeights):
        size = jax.nn.softplus(raw.astype(jnp.float32).reshape(len(raw), -1) + weights.step_bias)
        size = jnp.clip(size, *weights.steps)
        return Gates(-jnp.exp(weights.decay_rate) * size, size)
    strength, decay = jnp.split(raw, 2, axis=-1) if apart is None else (raw, apart.decay)
    bias = weights.decay_bias.astype(jnp.float32)
    rate = jnp.exp(weights.decay_rate.astype(jnp.float32)).reshape(-1, *[1] * (bias.ndim - 1))
    decay = decay.astype(jnp.float32).reshape(len(raw), *bias.shape)
    decay = -rate * jax.nn.softplus(decay + bias)
    return Gates(decay, jax.nn.sigmoid(strength.astype(jnp.float32)).reshape(len(raw), -1))


def unit(x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    """Queries or keys of length one."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + UNIT_EPS)


def tiles_of(pieces: Pieces, count: int) -> PieceTiles:
    """The pieces cut into tiles, of which a step has room for `count`."""
    counts = -(-pieces.lens // QUERY_TILE)
    ends = jnp.cumsum(counts)
    firsts, tile = ends - counts, jnp.arange(count)
    piece = jnp.minimum(jnp.sum(tile[:, None] >= ends, axis=1), len(ends) - 1)
    done = (tile - firsts[piece]) * QUERY_TILE
    return PieceTiles(pieces.starts[piece] + done, jnp.clip(pieces.lens[piece] - done, 0, QUERY_TILE), firsts)


def recurrent(
    query: Float[Array, "T N Dk"],
    key: Float[Array, "T N Dk"],
    value: Float[Array, "T N Dv"],
    gates: Gates,
    states: Float[Array, "slots N Dv Dk"],
    pieces: Pieces,
    *,
    skip: Float[Array, " N"] | None = None,
) -> tuple[Float[Array, "T N Dv"], Float[Array, "slots N Dv Dk"]]:
    """The outputs of all tokens, zero for those in no piece, and the states, piece after piece.

    With `skip`, which multiplies a token's value in its own output, values are written as they are.
    """

    def one_piece(
        index: Int[Array, ""], carry: tuple[Float[Array, "T N Dv"], Float[Array, "slots N Dv Dk"]]
    ) -> tuple[Float[Array, "T N Dv"], Float[Array, "slots N Dv Dk"]]:
        out, states = carry
        start, is_real = pieces.starts[index], pieces.lens[index] > 0
        is_fresh = (pieces.positions[index] == 0) & (pieces.is_known[index] == 0)
        state = jnp.where(is_fresh, 0, states[pieces.sources[index]])  # a slot may hold NaN

        def one_token(
            token: Int[Array, ""], carry: tuple[Float[Array, "N Dv Dk"], Float[Array, "T N Dv"]]
        ) -> tuple[Float[Array, "N Dv Dk"], Float[Array, "T N Dv"]]:
            state, out = carry
            is_known = (token == start) & (pieces.is_known[index] > 0)
            state = _updated(state, key[token], value[token], Gates(*(x[token] for x in gates)), is_known, skip is None)
            made = jnp.sum(state * query[token][:, None], axis=-1)
            if skip is not None:
                made += skip[:, None] * value[token]
            return state, lax.dynamic_update_index_in_dim(out, made, token, 0)

        state, out = lax.fori_loop(start, start + pieces.lens[index], one_token, (state, out))
        target = jnp.where(is_real, pieces.targets[index], 0)
        return out, lax.dynamic_update_index_in_dim(states, jnp.where(is_real, state, 0), target, 0)

    out = jnp.zeros(value.shape, jnp.float32)
    return lax.fori_loop(0, len(pieces.lens), one_piece, (out, states))


def _updated(
    state: Float[Array, "N Dv Dk"],
    key: Float[Array, "N Dk"],
    value: Float[Array, "N Dv"],
    gates: Gates,
    is_known: Bool[Array, ""],
    has_delta: bool,
) -> Float[Array, "N Dv Dk"]:
    """The state after a token, which it may have already. Products and sums only: there is no choice of a matmul."""
    decayed = state * gates.decay.reshape(len(state), 1, -1)
    seen = jnp.sum(decayed * key[:, None], axis=-1) if has_delta else 0
    difference = (value - seen) * gates.strength[:, None]
    return jnp.where(is_known, state, decayed + difference[..., None] * key[:, None])
