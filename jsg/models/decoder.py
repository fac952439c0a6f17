"""The decoder-only transformer that Llama, Mistral and Qwen share. Letters: `jsg/models/inputs.py`.

These families differ in a few switches of `Decoder`, which `registry.py` sets. The query, key and value projections are
one matmul, and so are gate and up: decode spends its time reading kernels, and fewer, larger matmuls read faster. The
joint kernels keep an axis that devices can share out. [D, K, (G+2)·H] holds for each key-value head its G query heads,
its key and its value, and [D, 2, F] holds gate and up, so a slice along K or F is a smaller layer.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jsg.cache.pool import KVPool
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import HeadNorms, LayerCache
from jsg.models.config import ModelConfig
from jsg.models.experts import SparseFeedForward
from jsg.models.inputs import ForwardInputs
from jsg.models.layers import Embedding, Linear, Origin, RMSNorm, Source, parameter, project
from jsg.models.rope import Rotation, rotation


class Attention(nnx.Module):
    """Grouped-query attention over the paged pool of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: jax.typing.DTypeLike,
        *,
        qkv_bias: bool,
        output_bias: bool,
        qk_norm: bool,
    ):
        prefix = f"model.layers.{layer}.self_attn"
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.head_dim = head_dim
        self.window = config.layer_windows[layer]
        self.qkv = Linear(
            (f"{prefix}.q_proj", f"{prefix}.k_proj", f"{prefix}.v_proj"),
            config.hidden_size,
            (kv_heads, (heads // kv_heads + 2) * head_dim),
            dtype,
            out_dims=(heads * head_dim, *(kv_heads // config.kv_repeats * head_dim,) * 2),
            out_repeats=(1, config.kv_repeats, config.kv_repeats),
            join_axis=1,
            split_axis=1,
            bias=qkv_bias,
        )
        width = config.hidden_size
        self.output = Linear((f"{prefix}.o_proj",), heads * head_dim, (width,), dtype, split_axis=0, bias=output_bias)
        self.query_norm = RMSNorm(f"{prefix}.q_norm", head_dim, config.rms_norm_eps, dtype) if qk_norm else None
        self.key_norm = RMSNorm(f"{prefix}.k_norm", head_dim, config.rms_norm_eps, dtype) if qk_norm else None

    @property
    def norms(self) -> HeadNorms | None:
        """The norms of the heads' queries and keys; None if the family has none."""
        if self.query_norm is None or self.key_norm is None:
            return None
        return HeadNorms(self.query_norm.weight[...], self.key_norm.weight[...], self.query_norm.eps)

    def __call__(
        self,
        x: Float[Array, "T D"],
        inputs: ForwardInputs,
        turn: Rotation,
        cache: LayerCache,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """Attention of the tokens to their context. Writes their keys and values to the pool first."""
        queries, cache = ops.rotate_and_write(self.qkv(x), turn.cos, turn.sin, inputs.slots, cache, norms=self.norms)
        scale = self.head_dim**-0.5
        gathered = ops.paged_attention(queries, cache, inputs.attention, scale=scale, window=self.window)
        return self.output(gathered.reshape(len(x), -1)), cache


class FeedForward(nnx.Module):
    """The gated feed-forward block: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jax.typing.DTypeLike, *, bias: bool):
        prefix, width, inner = f"model.layers.{layer}.mlp", config.hidden_size, config.intermediate_size
        names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
        self.gate_up = Linear(names, width, (2, inner), dtype, split_axis=2, bias=bias)
        self.down = Linear((f"{prefix}.down_proj",), inner, (width,), dtype, split_axis=0, bias=bias)

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The block's result for each token."""
        return self.down(ops.gated(self.gate_up(x)))


class Layer(nnx.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        dtype: jax.typing.DTypeLike,
        attention: Attention,
        mlp: FeedForward | SparseFeedForward,
    ):
        prefix, width, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.attention_norm = RMSNorm(f"{prefix}.input_layernorm", width, eps, dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(f"{prefix}.post_attention_layernorm", width, eps, dtype)
        self.mlp = mlp

    def __call__(
        self,
        x: Float[Array, "T D"],
        inputs: ForwardInputs,
        turn: Rotation,
        cache: LayerCache,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """The residual stream after this layer, and the layer's part of the pool."""
        gathered, cache = self.attention(self.attention_norm(x), inputs, turn, cache)
        x = x + gathered
        return x + self.mlp(self.mlp_norm(x)), cache


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: nnx.GraphDef,
    state: Any,
    x: Float[Array, "T D"],
    inputs: ForwardInputs,
    turn: Rotation,
    cache: LayerCache,
) -> tuple[Float[Array, "T D"], LayerCache]:
    """`Layer.__call__`, traced and lowered once for all layers that differ only in their parameters.

    Nothing is compiled here: inside the trace of a step, this `jit` makes a function that XLA inlines. For 32 layers
    with kernels, tracing and lowering a step takes a small part of the time that it would take layer by layer.
    """
    return nnx.merge(graph, state)(x, inputs, turn, cache)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. Implements `jsg.models.model.Model`.

    Layers are unrolled and not scanned, because a scan would copy the pool. Layers that differ only in their parameters
    are traced once, with the parameters of each in place of those of the first.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jax.typing.DTypeLike,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
    ):
        """Declares the parameters.

        Args:
            config: The shape.
            dtype: Type of parameters and activations.
            qkv_bias: Query, key and value projections have biases.
            output_bias: The projection after attention has a bias.
            mlp_bias: The feed-forward projections have biases.
            qk_norm: Every head's query and key are normed before they are rotated.
        """
        self.config = config
        is_tied = config.tie_word_embeddings
        self.embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, dtype, is_head=is_tied)
        self.layers = nnx.List([])
        for layer in range(config.num_layers):
            attention = Attention(config, layer, dtype, qkv_bias=qkv_bias, output_bias=output_bias, qk_norm=qk_norm)
            mlp = (
                SparseFeedForward(config, layer, dtype)
                if config.num_experts
                else FeedForward(config, layer, dtype, bias=mlp_bias)
            )
            self.layers.append(Layer(config, layer, dtype, attention, mlp))
        self.final_norm = RMSNorm("model.norm", config.hidden_size, config.rms_norm_eps, dtype)
        lm_head = Source("lm_head.weight", (config.vocab_size, config.hidden_size))
        head = Origin((lm_head,), transposed=True, split_axis=1)
        head_shape = (config.hidden_size, config.vocab_size)
        self.head = None if is_tied else parameter(head_shape, dtype, head, is_kernel=True)

    def __call__(self, inputs: ForwardInputs, pool: KVPool) -> tuple[Float[Array, "T D"], KVPool]:
        """See `Model`."""
        x, inputs = self._embed(inputs)
        turn = rotation(inputs.positions, self.config.rope, self.config.head_dim)
        layers, kinds = list(pool.layers), {}
        for i, layer in enumerate(self.layers):
            window = layer.attention.window
            if window not in kinds:
                kinds[window] = nnx.split(layer)
            graph, state = kinds[window]
            alike = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(nnx.state(layer)))
            x, layers[i] = _run_layer(graph, alike, x, inputs, turn, layers[i])
        return self.final_norm(x), KVPool(tuple(layers))

    def _embed(self, inputs: ForwardInputs) -> tuple[Float[Array, "T D"], ForwardInputs]:
        """The residual stream before the first layer, and the inputs that the layers need."""
        x = self.embedding(inputs.token_ids)
        if inputs.vision is None:
            return x, inputs
        row = inputs.token_ids - self.config.vocab_size
        seen = inputs.vision.at[row].get(mode="clip").astype(x.dtype)
        return jnp.where(row[:, None] >= 0, seen, x), inputs._replace(vision=None)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """See `Model`."""
        return self.embedding.logits(hidden) if self.head is None else project(hidden, self.head.get_value())
