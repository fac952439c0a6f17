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
    return opened(tuple(gate_up[:, part] for part in range(gate_up.shape[1])), activation, wide)


def opened(
    gate_up: tuple[Float[Array, "T F"], ...], activation: Activation, wide: jax.typing.DTypeLike
) -> Float[Array, "T F"]:
    """The same of gates, and of what each of them lets through, in arrays of their own. Without gates there is one."""
    dtype = gate_up[0].dtype
    if activation == "relu2":
        return jnp.square(jax.nn.relu(gate_up[0].astype(wide))).astype(dtype)
    if isinstance(activation, ClampedGate):
        limit, (gate, up) = activation.limit, (part.astype(jnp.float32) for part in gate_up)
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return ((up + 1) * gate * jax.nn.sigmoid(activation.slope * gate)).astype(dtype)
    gate, up = (part.astype(wide) for part in gate_up)
    if activation == "gelu_tanh":
        let = jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(wide)
    else:
        let = jax.nn.silu(gate)
    return (let * up).astype(dtype)
