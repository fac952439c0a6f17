"""A feed-forward block of several experts, of which each token uses a few. Letters: `jsg/models/inputs.py`; E experts.

Shazeer et al. 2017 (arXiv:1701.06538), with the router of Mixtral (arXiv:2401.04088): a softmax over the experts, of
which the `experts_per_token` largest count, made to sum to one.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import ops
from jsg.models.config import ModelConfig
from jsg.models.layers import Linear, Origin, Source, activation_result, parameter, project


class SparseFeedForward(nnx.Module):
    """The weighted sum of the gated blocks that the router chooses for a token: w · down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jax.typing.DTypeLike):
        prefix, width, inner = f"model.layers.{layer}.block_sparse_moe", config.hidden_size, config.intermediate_size
        self.num_experts, self.experts_per_token = config.num_experts, config.experts_per_token
        self.router = Linear((f"{prefix}.gate",), width, (config.num_experts,), dtype)
        names = [f"{prefix}.experts.{expert}" for expert in range(config.num_experts)]
        self.gate = _stacked([f"{name}.w1" for name in names], width, inner, dtype)
        self.up = _stacked([f"{name}.w3" for name in names], width, inner, dtype)
        self.down = _stacked([f"{name}.w2" for name in names], inner, width, dtype)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Each token on its own. Its copies, one for each of its experts, are sorted by expert, and back."""
        weights, experts = self._route(x)
        order = jnp.argsort(experts.reshape(-1), stable=True)
        sizes = jnp.bincount(experts.reshape(-1), length=self.num_experts).astype(jnp.int32)
        copies = x[order // self.experts_per_token]
        gated = jax.nn.silu(_grouped(copies, self.gate, sizes)) * _grouped(copies, self.up, sizes)
        made = _grouped(gated, self.down, sizes)[jnp.argsort(order)]
        weighted = weights[..., None].astype(jnp.float32) * made.reshape(
            *weights.shape, -1
        )  # no matmul, which may round
        return weighted.sum(1).astype(x.dtype)

    def _route(self, x: Float[Array, "T D"]) -> tuple[Float[Array, "T k"], Int[Array, "T k"]]:
        """The weights and the indices of each token's experts."""
        logits = project(x, self.router.kernel[...])
        likely, experts = lax.top_k(jax.nn.softmax(logits), self.experts_per_token)
        return (likely / likely.sum(-1, keepdims=True)).astype(x.dtype), experts


def _stacked(names: list[str], in_dim: int, out_dim: int, dtype: jax.typing.DTypeLike) -> nnx.Param:
    """One kernel [in_dim, out_dim] for each expert."""
    sources = tuple(Source(f"{name}.weight", (out_dim, in_dim)) for name in names)
    return parameter((len(names), in_dim, out_dim), dtype, Origin(sources, join_axis=0, transposed=True))


def _grouped(rows: Float[Array, "R D"], kernels: nnx.Param, sizes: Int[Array, " E"]) -> Float[Array, "R F"]:
    result = activation_result(rows.dtype)
    return ops.grouped_matmul(rows, kernels[...], sizes, result=result).astype(rows.dtype)
