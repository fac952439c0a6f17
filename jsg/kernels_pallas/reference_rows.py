"""What is computed of each row by itself, in plain `jnp`. Letters: `jsg/models/inputs.py`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*rows D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """Divides by the root mean square of the last axis in float32, and scales in the dtype of `x`, as in training."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return weight * normed.astype(x.dtype)


def gated(gate_up: Float[Array, "T 2 F"], wide: jax.typing.DTypeLike) -> Float[Array, "T F"]:
    """See `ops.gated`. `wide` is the type of what is computed."""
    gate, up = gate_up[:, 0].astype(wide), gate_up[:, 1].astype(wide)
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)
