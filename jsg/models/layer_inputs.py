"""Inputs that each token has for each layer, beside the residual stream. Letters: `jsg/models/inputs.py`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import ops
from jsg.models.block_spec import LayerInputSpec
from jsg.models.layers import Embedding, Linear, RMSNorm


class LayerInputs(nnx.Module):
    """Makes the inputs of all layers, of a token's id and of its embedding."""

    def __init__(self, spec: LayerInputSpec, width: int, dtype: jax.typing.DTypeLike):
        shape = (spec.count, spec.width)
        self.factors = spec.width**0.5, width**-0.5
        self.table = Embedding(
            "model.embed_tokens_per_layer", spec.vocab_size, spec.count * spec.width, dtype, is_head=False
        )
        self.projection = Linear(("model.per_layer_model_projection",), width, shape, dtype)
        self.norm = RMSNorm(spec.table_norm, "", spec.width, dtype)

    def __call__(self, token_ids: Int[Array, " T"], x: Float[Array, "T D"]) -> Float[Array, "T layers width"]:
        """The inputs of each token."""
        projected = self.norm(self.projection(x) * self.factors[1])
        rows = self.table(token_ids).reshape(projected.shape) * self.factors[0]
        return (projected + rows) * 2**-0.5


class LayerInput(nnx.Module):
    """Makes what a layer adds of its input."""

    def __init__(self, spec: LayerInputSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        self.activation = spec.activation
        self.gate = Linear((f"{prefix}.per_layer_input_gate",), width, (spec.width,), dtype)
        self.projection = Linear((f"{prefix}.per_layer_projection",), spec.width, (width,), dtype)
        self.norm = RMSNorm(spec.norm, f"{prefix}.", width, dtype)

    def __call__(self, x: Float[Array, "T D"], own: Float[Array, "T width"]) -> Float[Array, "T D"]:
        """What is added to the residual stream."""
        opened = ops.gated(jnp.stack([self.gate(x), own], axis=1), self.activation)
        return self.norm(self.projection(opened))
