"""The causal convolution of each channel over packed pieces, in plain `jnp`. See `ops.short_convolution`.

A slot has a column for each tap, and the input of position p is in column p modulo the taps.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas.inputs import Pieces


def convolve(
    x: Float[Array, "T *channels"],
    taps: Float[Array, "taps *channels"],
    inputs: Float[Array, "slots taps *channels"],
    pieces: Pieces,
    *,
    has_one_token: bool = False,
) -> Float[Array, "T *channels"]:
    """The convolution in float32, summed from the oldest tap on. For tokens in no piece, numbers without a meaning."""
    count, (piece, offset) = len(taps), owners(pieces, len(x), has_one_token=has_one_token)
    source, position = pieces.sources[piece], pieces.positions[piece] + offset
    total, wide = jnp.zeros(x.shape, jnp.float32), _rounded(x)
    for back in range(count - 1, -1, -1):
        seen = wide
        if back:
            kept = inputs[source, (position - back) % count].astype(jnp.float32)
            seen = jnp.where(_spread(offset >= back, x), jnp.roll(wide, back, axis=0), kept)
            seen = jnp.where(_spread(position >= back, x), seen, 0)  # a slot may hold NaN
        total += seen * taps[count - 1 - back].astype(jnp.float32)
    return total


def _rounded(x: Float[Array, "T *channels"]) -> Float[Array, "T *channels"]:
    """The same in float32. XLA may leave out that what was computed was rounded to a shorter type; a slot has that."""
    kind = jnp.finfo(x.dtype)
    return lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


def owners(
    pieces: Pieces, num_tokens: int, *, has_one_token: bool = False
) -> tuple[Int[Array, " T"], Int[Array, " T"]]:
    """For each token its piece, and its place in it. For tokens in no piece, numbers without a meaning."""
    token = jnp.arange(num_tokens)
    if has_one_token:
        return token, jnp.zeros_like(token)
    is_inside = (token[:, None] >= pieces.starts) & (token[:, None] < pieces.starts + pieces.lens)
    piece = jnp.argmax(is_inside, axis=1)
    return piece, token - pieces.starts[piece]


def last_inputs(
    x: Float[Array, "T *channels"], inputs: Float[Array, "slots taps *channels"], pieces: Pieces
) -> Float[Array, "slots taps *channels"]:
    """The inputs of all slots after the last token of each piece."""
    count, last = inputs.shape[1], (pieces.positions + pieces.lens - 1)[:, None]
    position = last - (last - jnp.arange(count)) % count  # the last that belongs into each column
    offset = position - pieces.positions[:, None]
    new = x[jnp.maximum(pieces.starts[:, None] + offset, 0)].astype(inputs.dtype)
    kept = jnp.where(_spread(position >= 0, new), inputs[pieces.sources], 0)
    new = jnp.where(_spread(offset >= 0, new), new, kept)
    is_real = pieces.lens > 0
    return inputs.at[jnp.where(is_real, pieces.targets, 0)].set(jnp.where(_spread(is_real, new), new, 0))


def _spread(is_so: Bool[Array, "*first"], x: Float[Array, "*first_and_more"]) -> Bool[Array, "*first_and_ones"]:
    """With axes for the rest of those of `x`."""
    return is_so.reshape(*is_so.shape, *[1] * (x.ndim - is_so.ndim))
