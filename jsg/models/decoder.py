"""The decoder-only transformer of all families. Letters: `jsg/models/inputs.py`.

Families differ in the records that they give it: see `jsg/models/spec.py`. The query, key and value projections are one
matmul, and so are gate and up: decode spends its time reading kernels, and fewer, larger matmuls read faster. The
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
from jsg.models.experts import SparseFeedForward
from jsg.models.feed_forward import FeedForward
from jsg.models.inputs import ForwardInputs
from jsg.models.layers import Embedding, Linear, Origin, RMSNorm, Source, parameter, project
from jsg.models.rope import Rotation, rotation
from jsg.models.spec import AttentionSpec, ExpertsSpec, LayerSpec, ModelSpec, NormSpec


class Attention(nnx.Module):
    """Grouped-query attention over the paged pool of one layer."""

    def __init__(self, spec: AttentionSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        heads, kv_heads, head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.spec = spec
        self.qkv = Linear(
            tuple(f"{prefix}.{name}" for name in spec.projections),
            width,
            (kv_heads, (heads // kv_heads + 2) * head_dim),
            dtype,
            out_dims=(heads * head_dim, *(kv_heads // spec.kv_repeats * head_dim,) * 2),
            out_repeats=(1, spec.kv_repeats, spec.kv_repeats),
            join_axis=1,
            split_axis=1,
            bias=spec.qkv_bias,
        )
        output = f"{prefix}.{spec.output}"
        self.output = Linear((output,), heads * head_dim, (width,), dtype, split_axis=0, bias=spec.output_bias)
        norm = spec.qk_norm
        self.query_norm = RMSNorm(f"{prefix}.{norm.query}", head_dim, norm.eps, dtype) if norm else None
        self.key_norm = RMSNorm(f"{prefix}.{norm.key}", head_dim, norm.eps, dtype) if norm else None

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
        scale, window = self.spec.scale, self.spec.window
        gathered = ops.paged_attention(queries, cache, inputs.attention, scale=scale, window=window)
        return self.output(gathered.reshape(len(x), -1)), cache


class Layer(nnx.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, spec: LayerSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        def norm(spec: NormSpec) -> RMSNorm:
            return RMSNorm(f"{prefix}.{spec.name}", width, spec.eps, dtype)

        mlp, where = spec.mlp, (prefix, width, dtype)
        self.spec = spec
        self.attention_norm = norm(spec.before_attention)
        self.attention = Attention(spec.attention, *where)
        self.mlp_norm = norm(spec.before_mlp)
        self.mlp = SparseFeedForward(mlp, *where) if isinstance(mlp, ExpertsSpec) else FeedForward(mlp, *where)

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
    """`Layer.__call__`, traced and lowered once for all layers of equal records.

    Nothing is compiled here: inside the trace of a step, this `jit` makes a function that XLA inlines. For 32 layers
    with kernels, tracing and lowering a step takes a small part of the time that it would take layer by layer.
    """
    return nnx.merge(graph, state)(x, inputs, turn, cache)


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. Implements `jsg.models.model.Model`.

    Layers are unrolled and not scanned, because a scan would copy the pool. Layers of equal records, which differ only
    in their parameters, are traced once, with the parameters of each in place of those of the first.
    """

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike):
        """Declares the parameters: those of `spec`, in `dtype`, which is also the type of activations."""
        self.spec = spec
        is_tied, width, final = spec.tie_word_embeddings, spec.hidden_size, spec.final_norm
        self.embedding = Embedding("model.embed_tokens", spec.vocab_size, width, dtype, is_head=is_tied)
        layers = [Layer(layer, f"model.layers.{i}", width, dtype) for i, layer in enumerate(spec.layers)]
        self.layers = nnx.List(layers)
        self.final_norm = RMSNorm(final.name, width, final.eps, dtype)
        head = Origin((Source("lm_head.weight", (spec.vocab_size, width)),), transposed=True, split_axis=1)
        self.head = None if is_tied else parameter((width, spec.vocab_size), dtype, head, is_kernel=True)

    def __call__(self, inputs: ForwardInputs, pool: KVPool) -> tuple[Float[Array, "T D"], KVPool]:
        """See `Model`."""
        x, inputs = self._embed(inputs)
        layers, turns, kinds = list(pool.layers), {}, {}
        for i, layer in enumerate(self.layers):
            attention = layer.spec.attention
            angles = attention.rope, attention.head_dim
            if angles not in turns:
                turns[angles] = rotation(inputs.positions, *angles)
            if layer.spec not in kinds:
                kinds[layer.spec] = nnx.split(layer)
            graph, state = kinds[layer.spec]
            alike = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(nnx.state(layer)))
            x, layers[i] = _run_layer(graph, alike, x, inputs, turns[angles], layers[i])
        return self.final_norm(x), KVPool(tuple(layers))

    def _embed(self, inputs: ForwardInputs) -> tuple[Float[Array, "T D"], ForwardInputs]:
        """The residual stream before the first layer, and the inputs that the layers need."""
        x = self.embedding(inputs.token_ids)
        if inputs.vision is None:
            return x, inputs
        row = inputs.token_ids - self.spec.vocab_size
        seen = inputs.vision.at[row].get(mode="clip").astype(x.dtype)
        return jnp.where(row[:, None] >= 0, seen, x), inputs._replace(vision=None)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """See `Model`."""
        return self.embedding.logits(hidden) if self.head is None else project(hidden, self.head.get_value())
