"""The gated delta rule in plain `jnp`: token by token, in one fixed order. See `ops.gated_delta`.

Yang et al. 2024, "Gated Delta Networks" (arXiv:2412.06464). For each head, whose state S is [values, keys]:

    S decays;  S += strength (v - S k) kᵀ;  output = S q
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas.inputs import DeltaWeights, Pieces, PieceTiles, StateCache
from jsg.kernels_pallas.tile import QUERY_TILE

UNIT_EPS = 1e-6
"""What is added to the sum of squares of a query or key before its root."""


class Gates(NamedTuple):
    """What each token does to the state of each head, in float32.

    Attributes:
        decay: What multiplies the state, from 0 to 1.
        strength: How much of the difference from the new value is written.
    """

    decay: Float[Array, "T N"]
    strength: Float[Array, "T N"]


def gated_delta(
    joint: Float[Array, "T K joint"],
    raw_gates: Float[Array, "T K gates"],
    weights: DeltaWeights,
    cache: StateCache,
    pieces: Pieces,
) -> tuple[Float[Array, "T N Dv"], StateCache]:
    """See `ops.gated_delta`. Computes in float32, and returns float32."""
    values, keys = cache.states.shape[2:]
    group = cache.states.shape[1] // joint.shape[1]
    mixed, gate = jnp.split(joint, [weights.taps.shape[2]], axis=-1)
    convolved = convolve(mixed, weights.taps, cache.inputs, pieces)
    query, key, value = jnp.split(convolved, [keys, 2 * keys], axis=-1)
    query, key = (jnp.repeat(x, group, axis=1) for x in (unit(query) * keys**-0.5, unit(key)))
    value = value.reshape(len(joint), -1, values)
    out, states = recurrent(query, key, value, gates(raw_gates, weights), cache.states, pieces)
    return gated_norm(out, gate, weights), StateCache(last_inputs(mixed, cache.inputs, pieces), states)


def gated_norm(
    out: Float[Array, "T N Dv"], gate: Float[Array, "T K gates"], weights: DeltaWeights
) -> Float[Array, "T N Dv"]:
    """The norm of what each head has found, and its gate, in float32."""
    out = out.astype(jnp.float32)
    out *= lax.rsqrt(jnp.mean(jnp.square(out), -1, keepdims=True) + weights.eps) * weights.norm.astype(jnp.float32)
    return out * jax.nn.silu(gate.astype(jnp.float32)).reshape(out.shape)


def gates(raw: Float[Array, "T K gates"], weights: DeltaWeights) -> Gates:
    """The gates of all heads: for each key head the projections give the strengths, then the decays."""
    decay, strength = log_gates(raw, weights)
    return Gates(jnp.exp(decay), strength)


def log_gates(raw: Float[Array, "T K gates"], weights: DeltaWeights) -> Gates:
    """The same with the logarithm of decay."""
    strength, decay = (x.reshape(len(raw), -1) for x in jnp.split(raw.astype(jnp.float32), 2, axis=-1))
    rate = jnp.exp(weights.decay_rate.astype(jnp.float32))
    return Gates(-rate * jax.nn.softplus(decay + weights.decay_bias.astype(jnp.float32)), jax.nn.sigmoid(strength))


def unit(x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    """Queries or keys of length one."""
    return x * lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + UNIT_EPS)


def convolve(
    mixed: Float[Array, "T K mixed"],
    taps: Float[Array, "taps K mixed"],
    inputs: Float[Array, "slots taps K mixed"],
    pieces: Pieces,
) -> Float[Array, "T K mixed"]:
    """The causal convolution of each channel, and SiLU, in float32. Taps are summed from the oldest token on."""
    count, (piece, offset) = len(taps), owners(pieces, len(mixed))
    old, position = inputs[pieces.sources], pieces.positions[piece] + offset
    total = jnp.zeros(mixed.shape, jnp.float32)
    for back in range(count - 1, -1, -1):
        before = old[piece, (position - back) % count]
        x = jnp.where((offset >= back)[:, None, None], jnp.roll(mixed, back, axis=0), before)
        x = jnp.where((position >= back)[:, None, None], x, 0)
        total += x.astype(jnp.float32) * taps[count - 1 - back].astype(jnp.float32)
    return jax.nn.silu(total)


def owners(pieces: Pieces, num_tokens: int) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """For each token its piece, and its place in it. For tokens in no piece, numbers without a meaning."""
    token = jnp.arange(num_tokens)
    is_inside = (token[:, None] >= pieces.starts) & (token[:, None] < pieces.starts + pieces.lens)
    piece = jnp.argmax(is_inside, axis=1)
    return piece, token - pieces.starts[piece]


def tiles_of(pieces: Pieces, count: int) -> PieceTiles:
    """The pieces cut into tiles, of which a step has room for `count`."""
    counts = -(-pieces.lens // QUERY_TILE)
    ends = jnp.cumsum(counts)
    firsts, tile = ends - counts, jnp.arange(count)
    piece = jnp.minimum(jnp.sum(tile[:, None] >= ends, axis=1), len(ends) - 1)
    done = (tile - firsts[piece]) * QUERY_TILE
    return PieceTiles(pieces.starts[piece] + done, jnp.clip(pieces.lens[piece] - done, 0, QUERY_TILE), firsts)


def last_inputs(
    mixed: Float[Array, "T K mixed"], inputs: Float[Array, "slots taps K mixed"], pieces: Pieces
) -> Float[Array, "slots taps K mixed"]:
    """The inputs of all slots after the last token of each piece."""
    count, last = inputs.shape[1], (pieces.positions + pieces.lens - 1)[:, None]
    position = last - (last - jnp.arange(count)) % count  # the last that belongs into each column
    offset = position - pieces.positions[:, None]
    new = mixed[jnp.maximum(pieces.starts[:, None] + offset, 0)].astype(inputs.dtype)
    kept = jnp.where((position >= 0)[..., None, None], inputs[pieces.sources], 0)
    new = jnp.where((offset >= 0)[..., None, None], new, kept)
    is_real = (pieces.lens > 0)[:, None, None, None]
    return inputs.at[jnp.where(pieces.lens > 0, pieces.targets, 0)].set(jnp.where(is_real, new, 0))


def recurrent(
    query: Float[Array, "T N Dk"],
    key: Float[Array, "T N Dk"],
    value: Float[Array, "T N Dv"],
    gates: Gates,
    states: Float[Array, "slots N Dv Dk"],
    pieces: Pieces,
) -> tuple[Float[Array, "T N Dv"], Float[Array, "slots N Dv Dk"]]:
    """The outputs of all tokens, zero for those in no piece, and the states, piece after piece."""

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
            state = _updated(state, key[token], value[token], Gates(*(x[token] for x in gates)), is_known)
            made = jnp.sum(state * query[token][:, None], axis=-1)
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
) -> Float[Array, "N Dv Dk"]:
    """The state after a token, which it may have already. Products and sums only: there is no choice of a matmul."""
    decayed = state * gates.decay[:, None, None]
    difference = (value - jnp.sum(decayed * key[:, None], axis=-1)) * gates.strength[:, None]
    return jnp.where(is_known, state, decayed + difference[..., None] * key[:, None])
