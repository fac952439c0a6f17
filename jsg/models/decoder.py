"""The decoder-only transformer of all families. Letters: `jsg/models/inputs.py`.

Families differ in the records that they give it: see `jsg/models/spec.py`. The query, key and value projections are one
matmul, and so are gate and up: decode spends its time reading kernels, and fewer, larger matmuls read faster. The
joint kernels keep an axis that devices can share out. [D, K, (G+2)·H] holds for each key-value head its G query heads,
its key and its value, and [D, 2, F] holds gate and up, so a slice along K or F is a smaller layer.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jsg.cache.pool import KVPool
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import Fp8Kernel, Fp8Rows, HeadNorms, LayerCache
from jsg.kernels_pallas.reference_write import rotate
from jsg.models.block_spec import AttentionSpec, ExpertsSpec, NoMixer, NormSpec, QueryKeyNormSpec
from jsg.models.convolution import GatedConvolution
from jsg.models.delta import DeltaAttention
from jsg.models.experts import ExpertsBeside, SparseFeedForward
from jsg.models.feed_forward import FeedForward
from jsg.models.inputs import ForwardInputs, LayerArrays
from jsg.models.latent import LatentAttention
from jsg.models.latent_spec import LatentSpec
from jsg.models.layer_inputs import LayerInput, LayerInputs
from jsg.models.layers import Embedding, Linear, RMSNorm, parameter, project, whole
from jsg.models.mamba import Mamba
from jsg.models.origin import Origin, Source, side_by_side
from jsg.models.rope import Rotation, grown, rotation
from jsg.models.spec import DraftSpec, LayerSpec, Mixer, ModelSpec
from jsg.models.state_specs import ConvolutionSpec, DeltaSpec, MambaSpec
from jsg.models.tensor_parallel import add_up


class Attention(nnx.Module):
    """Grouped-query attention over the paged pool of one layer."""

    def __init__(self, spec: AttentionSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        heads, kv_heads, head_dim = spec.heads, spec.kv_heads, spec.head_dim
        order = spec.rope.row_order(head_dim) if spec.rope else None
        kv_parts, kv_width = len(spec.projections[:3]) - 1, kv_heads // spec.kv_repeats * head_dim
        num_queries = 2 if spec.has_gate else 1  # rows of queries and of their gates
        query_order = _gated_order(order, heads // kv_heads, head_dim) if spec.has_gate else order
        self.spec = spec
        self.qkv = Linear(
            tuple(f"{prefix}.{name}" for name in spec.projections[:3]),
            width,
            (kv_heads, (num_queries * heads // kv_heads + kv_parts) * head_dim),
            dtype,
            out_dims=(num_queries * heads * head_dim, *(kv_width,) * kv_parts),
            out_repeats=(1, *(spec.kv_repeats,) * kv_parts),
            out_orders=(query_order, order, None)[: 1 + kv_parts],
            join_axis=1,
            split_axis=1,
            bias=spec.qkv_bias,
        )
        output = f"{prefix}.{spec.output}"
        self.output = Linear((output,), heads * head_dim, (width,), dtype, split_axis=0, bias=spec.output_bias)
        self.sinks = whole(f"{prefix}.{spec.sinks}", (heads,), dtype, split_axis=0) if spec.sinks else None
        norm = spec.qk_norm
        per_head = norm.per_head if norm and not norm.spans_heads else (None, None)
        self.query_norm, self.key_norm = (
            RMSNorm(each, f"{prefix}.", head_dim, dtype, order=order) if each else None
            for each in (per_head if kv_parts else (per_head[0], None))
        )
        self.joint_norm = NormsOverHeads(spec, norm, prefix, dtype, order) if norm and norm.spans_heads else None

    @property
    def norms(self) -> HeadNorms | None:
        """The norms of each head's query and key; None if there are none."""
        norm = self.spec.qk_norm
        if self.query_norm is None or self.key_norm is None or norm is None:
            return None
        return HeadNorms(self.query_norm.factor, self.key_norm.factor, norm.eps, norm.is_late, norm.norms_values)

    def __call__(
        self,
        x: Float[Array, "T D"] | Fp8Rows,
        inputs: ForwardInputs,
        turn: Rotation,
        cache: LayerCache,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """Attention of the tokens to their context. If it makes their keys and values, it writes these first."""
        spec, sinks, gates = self.spec, None if self.sinks is None else self.sinks[...], None
        qkv = self.qkv(x)
        if spec.has_gate:  # for each key-value head its queries, their gates, its key and its value
            width = spec.heads // spec.kv_heads * spec.head_dim
            queries, gates, keys = jnp.split(qkv, [width, 2 * width], axis=2)
            qkv = jnp.concatenate([queries, keys], axis=2)
        qkv = qkv if self.joint_norm is None else self.joint_norm(qkv)
        if len(spec.projections) == 1:
            heads = qkv.reshape(len(qkv), -1, spec.head_dim)
            queries = rotate(heads if self.query_norm is None else self.query_norm(heads), turn.cos, turn.sin)
        else:
            if len(spec.projections) == 2:
                qkv = jnp.concatenate([qkv, qkv[..., -spec.head_dim :]], axis=-1)
            queries, cache = ops.rotate_and_write(qkv, turn.cos, turn.sin, inputs.slots, cache, norms=self.norms)
        queries = grown(queries, inputs.positions, spec.query_scale)
        gathered = ops.paged_attention(
            queries, cache, inputs.attention, scale=spec.scale, window=spec.window, softcap=spec.softcap, sinks=sinks
        )
        gathered = gathered.reshape(len(qkv), -1)
        if gates is not None:
            gathered *= jax.nn.sigmoid(gates.astype(jnp.float32)).astype(qkv.dtype).reshape(gathered.shape)
        return self.output(gathered), cache


def _gated_order(order: tuple[int, ...] | None, group: int, head_dim: int) -> tuple[int, ...]:
    """The rows of a group of queries, in this order, and then those of their gates."""
    heads = [2 * head_dim * head for head in range(group)]
    queries = (first + row for first in heads for row in order or range(head_dim))
    return (*queries, *(first + head_dim + row for first in heads for row in range(head_dim)))


class NormsOverHeads(nnx.Module):
    """Norms of the queries and of the keys of all heads together, which several devices have a part of."""

    def __init__(
        self,
        spec: AttentionSpec,
        norm: QueryKeyNormSpec,
        prefix: str,
        dtype: jax.typing.DTypeLike,
        order: tuple[int, ...] | None,
    ):
        self.eps = norm.eps
        self.num_queries, self.num_keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

        def weight(name: str | None, length: int, repeats: int) -> nnx.Param:
            """The weight of each key-value head's queries, or of its key."""
            sources = side_by_side([f"{prefix}.{name}.weight"], [length // repeats], (), [repeats], [order])
            return parameter(
                (spec.kv_heads, length // spec.kv_heads), dtype, Origin(sources, join_axis=1, split_axis=0)
            )

        self.query = weight(norm.query, self.num_queries, 1)
        self.key = weight(norm.key, self.num_keys, spec.kv_repeats)

    def __call__(self, qkv: Float[Array, "T K joint"]) -> Float[Array, "T K joint"]:
        """The joint projection with normed queries and keys. A repeated key counts as often in sum and number."""
        key_dim = self.key[...].shape[1]
        *parts, value = jnp.split(qkv, [-2 * key_dim, -key_dim], axis=-1)
        wide = [part.astype(jnp.float32) for part in parts]
        sums = add_up(jnp.stack([jnp.square(part).sum((1, 2), keepdims=True) for part in wide]))
        for i, (weight, count) in enumerate(((self.query, self.num_queries), (self.key, self.num_keys))):
            normed = wide[i] * lax.rsqrt(sums[i] / count + self.eps)
            parts[i] = (weight[...].astype(jnp.float32) * normed).astype(qkv.dtype)
        return jnp.concatenate([*parts, value], axis=-1)


def _mixer(
    spec: Mixer, prefix: str, width: int, dtype: jax.typing.DTypeLike
) -> Attention | LatentAttention | DeltaAttention | Mamba | GatedConvolution | None:
    match spec:
        case LatentSpec():
            return LatentAttention(spec, prefix, width, dtype)
        case DeltaSpec():
            return DeltaAttention(spec, prefix, width, dtype)
        case MambaSpec():
            return Mamba(spec, prefix, width, dtype)
        case ConvolutionSpec():
            return GatedConvolution(spec, prefix, width, dtype)
        case NoMixer():
            return None
        case _:
            return Attention(spec, prefix, width, dtype)


class Stream(NamedTuple):
    """The residual stream.

    Attributes:
        sums: [T, D]
        more: [T, D] What is still to be added, as whoever reads it next can do with its norm; None for nothing.
    """

    sums: Any
    more: Any = None

    @property
    def whole(self) -> Float[Array, "T D"]:
        """All of it."""
        return self.sums if self.more is None else self.sums + self.more


class Layer(nnx.Module):
    """Attention and feed-forward, each added to the residual stream."""

    def __init__(self, spec: LayerSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        def norm(spec: NormSpec | None) -> RMSNorm | None:
            if spec is None:
                return None
            return RMSNorm(spec, f"{prefix}.", width, dtype)

        mlp, where = spec.mlp, (prefix, width, dtype)
        self.spec = spec
        self.attention_norm = norm(spec.before_attention)
        self.attention = _mixer(spec.attention, *where)
        self.attention_post_norm = norm(spec.after_attention)
        self.mlp_norm = norm(spec.before_mlp)
        block = SparseFeedForward(mlp, *where) if isinstance(mlp, ExpertsSpec) else mlp and FeedForward(mlp, *where)
        self.mlp = block
        self.beside = ExpertsBeside(spec.beside, *where) if spec.beside else None
        self.mlp_post_norm = norm(spec.after_mlp)
        self.own_input = LayerInput(spec.own_input, *where) if spec.own_input else None
        self.scalar = whole(f"{prefix}.{spec.scalar}", (1,), dtype) if spec.scalar else None

    def __call__(
        self,
        stream: Stream,
        inputs: ForwardInputs,
        turn: Rotation,
        cache: LayerArrays,
        own: Float[Array, "T width"] | None = None,
    ) -> tuple[Stream, LayerArrays]:
        """The residual stream after this layer, and the part of the pool that it reads."""
        x, read = self._read(stream, self.attention_norm, self.attention)
        stream = Stream(x)
        if self.attention is not None:
            gathered, cache = self.attention(read, inputs, turn, cache)
            stream = Stream(x, self._scaled(_normed(gathered, self.attention_post_norm)))
        if self.mlp is not None:
            if not self.spec.is_parallel:
                x, read = self._read(stream, self.mlp_norm, self.mlp)
                stream = Stream(x)
            elif self.mlp_norm is not None:
                read = self.mlp_norm(x)
            else:  # two products of the same rows XLA makes one, for which it joins their kernels in every step
                read = lax.optimization_barrier(read)
            num_real, x = inputs.attention.num_tokens, stream.whole
            made = self.mlp(read, num_real=num_real) if isinstance(self.mlp, SparseFeedForward) else self.mlp(read)
            made = made if self.beside is None else self.beside(x, made, num_real)
            stream = Stream(x, self._scaled(_normed(made, self.mlp_post_norm)))
        if self.own_input is not None and own is not None:
            stream = Stream(stream.whole, self.own_input(stream.whole, own))
        if self.scalar is not None:
            stream = Stream(stream.whole * self.scalar[...])
        return stream if _kernel_of(self.attention) else Stream(stream.whole), cache

    def _read(self, stream: Stream, norm: RMSNorm | None, block: nnx.Module | None) -> tuple[Float[Array, "T D"], Any]:
        """The residual stream, and what the block reads of it: rows, or rounded ones if it takes these."""
        kernel = None if self.spec.is_parallel or norm is None or norm.is_centred else _kernel_of(block)
        if kernel is None or norm is None:
            return stream.whole, _normed(stream.whole, norm)
        return ops.normed_rows(*stream, norm.factor, norm.eps, kernel)

    def _scaled(self, added: Float[Array, "T D"]) -> Float[Array, "T D"]:
        return added if self.spec.residual_factor == 1 else added * self.spec.residual_factor


def _kernel_of(block: nnx.Module | None) -> Fp8Kernel | None:
    """The kernel of the only product that reads what a block is given, if its rows are rounded."""
    first = block.qkv if isinstance(block, Attention) else block.gate_up if isinstance(block, FeedForward) else None
    kernel = None if first is None else first.kernel.get_value()
    return kernel if isinstance(kernel, Fp8Kernel) else None


def _normed(x: Float[Array, "T D"], norm: RMSNorm | None) -> Float[Array, "T D"]:
    return x if norm is None else norm(x)


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graph: nnx.GraphDef,
    state: Any,
    stream: Stream,
    inputs: ForwardInputs,
    turn: Rotation,
    cache: LayerArrays,
    own: Float[Array, "T width"] | None,
) -> tuple[Stream, LayerArrays]:
    """`Layer.__call__`, traced and lowered once for all layers of equal records.

    Nothing is compiled here: inside the trace of a step, this `jit` makes a function that XLA inlines. For 32 layers
    with kernels, tracing and lowering a step takes a small part of the time that it would take layer by layer.
    """
    return nnx.merge(graph, state)(stream, inputs, turn, cache, own)


def _forms(layer: Layer) -> tuple[Any, ...]:
    """How each parameter of a layer is kept. A file may have some layers in fewer bits than others."""
    params = jax.tree.leaves(nnx.state(layer), is_leaf=lambda node: isinstance(node, nnx.Variable))
    return tuple(jax.tree.structure(param.get_value()) for param in params)


class DraftLayer(nnx.Module):
    """See `DraftSpec`. What it keeps of token t_j, at position j, is made of t_j and of the hidden state of t_(j-1).

    So a prefix has the same keys and values in it, whatever follows. The first token has nothing before it, and counts
    as zeros.
    """

    def __init__(self, spec: DraftSpec, width: int, dtype: jax.typing.DTypeLike):
        self.spec = spec
        norms = (spec.embedding_norm, spec.hidden_norm, spec.final_norm)
        self.embedding_norm, self.hidden_norm, self.final_norm = (
            RMSNorm(each, f"{spec.prefix}.", width, dtype) for each in norms
        )
        self.joined = Linear((f"{spec.prefix}.{spec.joined}",), 2 * width, (width,), dtype)
        self.block = Layer(spec.layer, spec.block_prefix, width, dtype)

    def __call__(
        self,
        embedded: Float[Array, "T D"],
        before: Float[Array, "T D"],
        inputs: ForwardInputs,
        cache: LayerArrays,
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], LayerArrays]:
        """What the head reads to predict the next token, what takes the place of the hidden state, and the cache."""
        attention = self.spec.layer.attention
        pairs = jnp.concatenate([self.embedding_norm(embedded), self.hidden_norm(before)], axis=1)
        x = jnp.where(inputs.positions[:, None] > 0, self.joined(pairs), 0)
        turn = rotation(inputs.positions, attention.rope, attention.head_dim)
        stream, cache = self.block(Stream(x), inputs, turn, cache)
        normed = self.final_norm(stream.whole)
        return normed, normed if self.spec.repeats_normed else stream.whole, cache


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. Implements `jsg.models.model.Model`.

    Layers are unrolled and not scanned, because a scan would copy the pool. Layers of equal records, with kernels kept
    alike, differ only in their parameters. They are traced once, with those of each in place of those of the first.
    """

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike):
        """Declares the parameters: those of `spec`, in `dtype`, which is also the type of activations."""
        self.spec = spec
        is_tied, width = spec.tie_word_embeddings, spec.hidden_size
        self.embedding = Embedding("model.embed_tokens", spec.vocab_size, width, dtype, is_head=is_tied)
        layers = [Layer(layer, f"model.layers.{i}", width, dtype) for i, layer in enumerate(spec.layers)]
        self.layers = nnx.List(layers)
        self.draft = DraftLayer(spec.draft, width, dtype) if spec.draft else None
        own = spec.layer_inputs
        self.own_inputs = LayerInputs(own, width, dtype) if own else None
        self.final_norm = RMSNorm(spec.final_norm, "", width, dtype)
        head = Origin((Source("lm_head.weight", (spec.vocab_size, width)),), transposed=True, split_axis=1)
        self.head = None if is_tied else parameter((width, spec.vocab_size), dtype, head, is_kernel=True)

    def __call__(self, inputs: ForwardInputs, pool: KVPool) -> tuple[Float[Array, "T D"], KVPool]:
        """See `Model`."""
        x, inputs = self._embed(inputs)
        own = None if self.own_inputs is None else self.own_inputs(inputs.token_ids, x)
        stream = Stream(x)
        caches, states, turns, kinds = list(pool.layers), list(pool.states), {}, {}
        groups = inputs.of_groups()
        of_layers = self.spec.layer_groups if len(groups) > 1 else [0] * len(caches)
        num_caches, num_states, places = 0, 0, list[int]()
        for layer in self.layers:
            attention = layer.spec.attention
            has_keys = attention.kv_shape is not None
            kept, i = (
                (caches, num_caches) if has_keys else (states, num_states) if attention.state_shapes else ([()], 0)
            )
            angles = attention.rope, attention.head_dim
            if angles not in turns:
                turns[angles] = rotation(inputs.positions, *angles)
            kind = layer.spec, _forms(layer)
            if kind not in kinds:
                kinds[kind] = nnx.split(layer)
            graph, state = kinds[kind]
            alike = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(nnx.state(layer)))
            places.append(i if layer.spec.kv_source is None else places[layer.spec.kv_source])
            group, given = groups[of_layers[i] if has_keys else 0], None if own is None else own[:, len(places) - 1]
            stream, kept[places[-1]] = _run_layer(graph, alike, stream, group, turns[angles], kept[places[-1]], given)
            num_caches, num_states = num_caches + has_keys, num_states + bool(attention.state_shapes)
        pool = pool._replace(layers=tuple(caches), states=tuple(states))
        return self.final_norm(stream.whole), pool

    def drafted(
        self, inputs: ForwardInputs, before: Float[Array, "T D"], cache: LayerArrays
    ) -> tuple[Float[Array, "T D"], Float[Array, "T D"], LayerArrays]:
        """See `DraftLayer`, of the tokens of a step and the hidden state of the one before each."""
        assert self.draft is not None, "a model without a layer that drafts is not asked to"
        embedded, inputs = self._embed(inputs)
        return self.draft(embedded, before, inputs, cache)

    def _embed(self, inputs: ForwardInputs) -> tuple[Float[Array, "T D"], ForwardInputs]:
        """The residual stream before the first layer, and the inputs that the layers need."""
        x, factor = self.embedding(inputs.token_ids), self.spec.embedding_factor
        x = x if factor == 1 else x * factor
        if inputs.vision is None:
            return x, inputs
        row = inputs.token_ids - self.spec.vocab_size
        seen = inputs.vision.at[row].get(mode="clip").astype(x.dtype)
        return jnp.where(row[:, None] >= 0, seen, x), inputs._replace(vision=None)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """See `Model`."""
        logits = self.embedding.logits(hidden) if self.head is None else project(hidden, self.head.get_value())
        logits = logits if self.spec.logit_factor == 1 else logits * self.spec.logit_factor
        cap = self.spec.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
