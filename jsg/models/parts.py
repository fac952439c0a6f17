"""Reads the parts of a model that families share, as Llama has them, from the fields of `config.json`. No JAX.

A family takes these, and replaces what is different in its own.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from jsg.fields import Fields
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.models.block_spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, NormSpec, RopeSpec, RouterSpec
from jsg.models.rope_fields import MAX_CONTEXT_LEN, context_field, read_context, read_rope
from jsg.models.spec import LayerSpec, Mixer, ModelSpec
from jsg.models.without_effect import ROPE_DICTS

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_EXPERTS = 1024
FULL, SLIDING = LAYER_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers: a token sees all positions before it, or those of a window."""


def read_model(
    config: Fields,
    layers: Iterable[LayerSpec],
    final_norm: NormSpec | None = None,
    *,
    scales_context: bool = True,
) -> ModelSpec:
    """A model of these layers.

    Args:
        config: The fields of the file.
        layers: The transformer blocks.
        final_norm: The norm behind them; None for one of the root mean square.
        scales_context: Without it the file says how long a sequence with scaled rope may be.
    """
    layers = tuple(layers)
    ropes = {layer.attention.rope for layer in layers} - {None}
    rope = ropes.pop() if len(ropes) == 1 else None
    return ModelSpec(
        architecture="",  # `Family.read` knows it
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        final_norm=final_norm or read_norm(config, "model.norm"),
        max_position_embeddings=read_context(config, rope) if scales_context else context_field(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", default=False),
        eos_token_ids=config.token_ids("eos_token_id"),
        bos_token_id=next(iter(config.token_ids("bos_token_id")), None),
    )


def num_layers(config: Fields) -> int:
    """How many layers the model has."""
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


def read_layer(config: Fields, attention: Mixer, mlp: FeedForwardSpec | ExpertsSpec) -> LayerSpec:
    """A layer with a norm before each of its two blocks."""
    return LayerSpec(
        before_attention=read_norm(config, "input_layernorm"),
        attention=attention,
        before_mlp=read_norm(config, "post_attention_layernorm"),
        mlp=mlp,
    )


def with_windows(layer: LayerSpec, windows: Iterable[int | None]) -> Iterable[LayerSpec]:
    """A layer for each window, which differs in nothing else."""
    return (
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=window)) for window in windows
    )


def read_norm(config: Fields, name: str) -> NormSpec:
    """The norm of this name."""
    return NormSpec(name=name, eps=read_eps(config))


def read_eps(config: Fields) -> float:
    """What norms add to the mean square."""
    return config.number("rms_norm_eps", low=0.0, high=1.0)


def read_attention(
    config: Fields,
    own_rope_fields: AbstractSet[str] = frozenset(),
    *,
    is_partial: bool = False,
    is_interleaved: bool = False,
) -> AttentionSpec:
    """Attention with rope, without windows, norms and biases.

    Args:
        config: The fields.
        own_rope_fields: Fields of rope that the family reads itself.
        is_partial: Whether the family may turn a part of each head.
        is_interleaved: Whether it turns neighbours together.
    """
    heads = read_heads(config)
    rope = read_rope(config, own_rope_fields, heads.head_dim, is_partial=is_partial)
    return dataclasses.replace(heads, rope=dataclasses.replace(rope, is_interleaved=is_interleaved))


def read_heads(config: Fields) -> AttentionSpec:
    """Attention without rope, windows, norms and biases."""
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", default=heads, high=MAX_HEADS)
    config.require(heads % kv_heads == 0, "num_key_value_heads", f"divide {heads} heads", kv_heads)
    head_dim = config.integer("head_dim", default=max(width // heads, 1), high=MAX_HEAD_DIM)
    config.require(head_dim % 2 == 0, "head_dim", "be even, for rope turns pairs", head_dim)
    return AttentionSpec(heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5, rope=None)


def read_ropes(config: Fields, thetas: Mapping[str, float], head_dim: int) -> dict[str, RopeSpec]:
    """The rope of each kind of layer, in families whose `rope_parameters` has an object for each kind.

    `rope_scaling`, of transformers 4, is about full layers, and replaces what `rope_parameters` says of them.

    Args:
        config: The fields of the file.
        thetas: The base of each kind of layer, if its object has none.
        head_dim: The width of a head.
    """
    new, old = (config.get(name, {}) if config.section(name) else {} for name in ROPE_DICTS)
    ok = set(new) <= set(thetas) and all(isinstance(each or {}, dict) for each in new.values())
    config.require(ok, "rope_parameters", f"have an object for each kind of layer, {' and '.join(thetas)}", new)
    ropes = {}
    for kind, theta in thetas.items():
        own = {**(new.get(kind) or {}), **(old if kind == FULL else {})}
        flat = {"rope_parameters": own, "rope_theta": theta, "rope_scaling": None}
        config_of_kind = config.under({**flat, "original_max_position_embeddings": None})
        ropes[kind] = read_rope(config_of_kind, head_dim=head_dim)
    return ropes


def of_kinds(
    config: Fields, kinds: Iterable[str], attention: AttentionSpec, ropes: Mapping[str, RopeSpec | None]
) -> list[AttentionSpec]:
    """The attention of each layer, which differs by its kind: in its rope, and in its window."""
    kinds = list(kinds)
    windows = {SLIDING: read_window(config)} if SLIDING in kinds else {}
    by_kind = {
        kind: dataclasses.replace(attention, rope=rope, window=windows.get(kind)) for kind, rope in ropes.items()
    }
    return [by_kind[kind] for kind in kinds]


def read_layer_kinds(config: Fields, full_every: int) -> list[str]:
    """The kind of each layer's attention. If the file does not say, every so-manyth is full, and the others slide."""
    default = [SLIDING if layer % full_every else FULL for layer in range(1, num_layers(config) + 1)]
    return read_layer_types(config) or default


def read_feed_forward(config: Fields, *, is_fused: bool = False) -> FeedForwardSpec:
    """The gated block, without biases. If it is fused, one tensor has the gates and what they let through."""
    require_silu(config)
    block = FeedForwardSpec(inner=config.integer("intermediate_size"))
    return dataclasses.replace(block, gate="mlp.gate_up_proj", up="mlp.gate_up_proj") if is_fused else block


def read_experts(
    config: Fields, count_field: str, inner_field: str, per_token_field: str = "num_experts_per_tok"
) -> ExpertsSpec:
    """Experts whose weights sum to one."""
    require_silu(config)
    count = config.integer(count_field, high=MAX_EXPERTS)
    per_token = config.integer(per_token_field, high=count)
    router = RouterSpec(choice=ChoiceSpec(per_token=per_token))
    return ExpertsSpec(count=count, inner=config.integer(inner_field), router=router)


def with_unread(model: ModelSpec, pattern: str) -> ModelSpec:
    """A text model in whose checkpoints tensors of this pattern may be, which nothing reads: see `TensorNames`."""
    return dataclasses.replace(model, names=dataclasses.replace(model.names, unread=pattern))


def later_layers(config: Fields, count_field: str) -> str:
    """The pattern of the tensors of so many layers behind the last, which predict later tokens."""
    count, first = config.integer(count_field, default=0, low=0, high=MAX_LAYERS), num_layers(config)
    numbers = "|".join(str(layer) for layer in range(first, first + count))
    return rf"model\.layers\.({numbers})\..*"


def require_values(config: Fields, values: Mapping[str, Any]) -> None:
    """Raises ModelError if one of these fields has another value. A null is an absence."""
    for name, value in values.items():
        found = config.get(name, value)
        config.require(found == value, name, f"be {value!r}, the only supported value", found)


def require_silu(config: Fields) -> None:
    """Raises ModelError for another activation."""
    activation = config.get("hidden_act")
    is_silu = activation in ("silu", "swish")
    config.require(is_silu, "hidden_act", "be silu, the only supported activation", activation)


def read_window(config: Fields) -> int:
    """How many last positions a token sees, in a layer with a window."""
    return config.integer("sliding_window", high=MAX_CONTEXT_LEN)


def read_layer_types(config: Fields) -> list[str] | None:
    """The kind of each layer's attention; None if the file does not say."""
    kinds, count = config.get("layer_types"), num_layers(config)
    ok = isinstance(kinds, list) and len(kinds) == count and all(kind in LAYER_KINDS for kind in kinds)
    ok = ok or kinds is None
    config.require(ok, "layer_types", f"be {count} of {' or '.join(LAYER_KINDS)}", kinds)
    return kinds
