"""What is computed of each row by itself, in plain `jnp`. Letters: `jsg/models/inputs.py`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jsg.kernels_pallas.activation import Activation, ClampedGate


def rms_norm(x: Float[Array, "*rows D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """Divides by the root mean square of the last axis in float32, and scales in the dtype of the weight.

    So the result is rounded twice, as in training, or once if the weight is float32.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (weight * normed.astype(weight.dtype)).astype(x.dtype)


def gated(gate_up: Float[Array, "T _ F"], activation: Activation, wide: jax.typing.DTypeLike) -> Float[Array, "T F"]:
    """See `ops.gated`. `wide` is the type of what is computed. What is of more steps than silu is float32."""
    if activation == "relu2":
        return jnp.square(jax.nn.relu(gate_up[:, 0].astype(wide))).astype(gate_up.dtype)
    if isinstance(activation, ClampedGate):
        limit, (gate, up) = activation.limit, jnp.unstack(gate_up.astype(jnp.float32), axis=1)
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return ((up + 1) * gate * jax.nn.sigmoid(activation.slope * gate)).astype(gate_up.dtype)
    gate, up = gate_up[:, 0].astype(wide), gate_up[:, 1].astype(wide)
    if activation == "gelu_tanh":
        opened = jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(wide)
    else:
        opened = jax.nn.silu(gate)
    return (opened * up).astype(gate_up.dtype)
