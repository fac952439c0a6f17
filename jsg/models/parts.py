"""Reads the parts of a model that families share, as Llama has them, from the fields of `config.json`. No JAX.

A family takes these, and replaces what is different in its own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.models.block_spec import (
    AttentionSpec,
    ExpertsSpec,
    FeedForwardSpec,
    NormSpec,
    QueryKeyNormSpec,
    RopeSpec,
    RouterSpec,
)
from jsg.models.rope_fields import MAX_CONTEXT_LEN, read_rope
from jsg.models.without_effect import ROPE_DICTS
from jsg.sources import Fields
from jsg.window import Window

MAX_LAYERS = 1024
MAX_HEADS = 4096
MAX_HEAD_DIM = 4096
MAX_EXPERTS = 1024
MAX_TAPS = 16
FULL, SLIDING = LAYER_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers: a token sees all positions before it, or those of a window."""
LINEAR = "linear_attention"
"""Layers that keep a state of each request."""
MLP = FeedForwardSpec | ExpertsSpec


def num_layers(config: Fields) -> int:
    """How many layers the model has."""
    return config.integer("num_hidden_layers", high=MAX_LAYERS)


def read_norm(config: Fields, name: str, *, eps_field: str = "rms_norm_eps", **own: Any) -> NormSpec:
    """The norm of this name, with other fields of `NormSpec`."""
    return NormSpec(name=name, eps=read_eps(config, eps_field), **own)


def read_eps(config: Fields, name: str = "rms_norm_eps") -> float:
    """What norms add to the mean square."""
    return config.number(name, low=0.0, high=1.0)


def read_attention(
    config: Fields,
    *,
    is_partial: bool = False,
    is_interleaved: bool = False,
    own_rope_fields: AbstractSet[str] = frozenset(),
    **of_heads: Any,
) -> AttentionSpec:
    """Attention with rope.

    Args:
        config: The fields.
        is_partial: Whether the family may turn a part of each head.
        is_interleaved: Whether it turns neighbours together.
        own_rope_fields: Fields of rope that the family reads itself.
        **of_heads: What `read_heads` is given.
    """
    heads = read_heads(config, **of_heads)
    rope = read_rope(config, own_rope_fields, heads.head_dim, is_partial=is_partial)
    return dataclasses.replace(heads, rope=dataclasses.replace(rope, is_interleaved=is_interleaved))


def read_heads(
    config: Fields,
    *,
    bias: str | bool = False,
    qkv_bias: str | bool = False,
    output_bias: str | bool = False,
    scale: str | None = None,
    qk_norm: Mapping[str, Any] | None = None,
    eps_field: str = "rms_norm_eps",
    **own: Any,
) -> AttentionSpec:
    """Attention without rope.

    Args:
        config: The fields.
        bias: Whether all four projections have biases, or the field that says so.
        qkv_bias: The same of queries, keys and values.
        output_bias: The same of the projection after attention.
        scale: The field that has the scale; None for 1/√head_dim.
        qk_norm: How queries and keys are normed: fields of `QueryKeyNormSpec`. None for not at all.
        eps_field: The field with what these norms add to the mean square.
        **own: Other fields of `AttentionSpec`.
    """
    width, heads = config.integer("hidden_size"), config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", default=heads, high=MAX_HEADS)
    config.require(heads % kv_heads == 0, "num_key_value_heads", f"divide {heads} heads", kv_heads)
    head_dim = config.integer("head_dim", default=max(width // heads, 1), high=MAX_HEAD_DIM)
    config.require(head_dim % 2 == 0, "head_dim", "be even, for rope turns pairs", head_dim)
    has_bias = is_on(config, bias)
    plain = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5 if scale is None else config.number(scale),
        rope=None,
        qk_norm=None if qk_norm is None else QueryKeyNormSpec(eps=read_eps(config, eps_field), **qk_norm),
        qkv_bias=has_bias or is_on(config, qkv_bias),
        output_bias=has_bias or is_on(config, output_bias),
    )
    return dataclasses.replace(plain, **own)


def is_on(config: Fields, switch: str | bool) -> bool:
    """Whether a switch is on: the field of this name, or one that the file does not have."""
    return switch if isinstance(switch, bool) else config.flag(switch, default=False)


def read_ropes(config: Fields, thetas: Mapping[str, float | None], head_dim: int) -> dict[str, RopeSpec]:
    """The rope of each kind of layer, in families whose `rope_parameters` has an object for each kind.

    `rope_scaling`, of transformers 4, is about full layers, and replaces what `rope_parameters` says of them. No kind
    has a `truncate` of its own.

    Args:
        config: The fields of the file.
        thetas: The base of each kind of layer, if its object has none; None if it must have one.
        head_dim: The width of a head.
    """
    new, old = (config.get(name, {}) if config.section(name) else {} for name in ROPE_DICTS)
    ok = set(new) <= set(thetas) and all(isinstance(each or {}, dict) for each in new.values())
    config.require(ok, "rope_parameters", f"have an object for each kind of layer, {' and '.join(thetas)}", new)
    ropes = {}
    for kind, theta in thetas.items():
        own = {**(new.get(kind) or {}), **(old if kind == FULL else {})}
        if not own.pop("truncate", True):
            config.notes.append(f"truncate has no effect in the rope of {kind}, as in transformers")
        flat = {"rope_parameters": own, "rope_theta": theta, "rope_scaling": None}
        config_of_kind = config.under({**flat, "original_max_position_embeddings": None})
        ropes[kind] = read_rope(config_of_kind, head_dim=head_dim)
    return ropes


def by_kind(attention: AttentionSpec, ropes: Mapping[str, RopeSpec | None]) -> dict[str, AttentionSpec]:
    """The attention of each kind of layer, which differs by its rope."""
    return {kind: dataclasses.replace(attention, rope=rope) for kind, rope in ropes.items()}


def all_full(config: Fields) -> list[str]:
    """The kind of each layer in a family without windows."""
    return [FULL] * num_layers(config)


def read_kinds(config: Fields, full_every: int | str) -> list[str]:
    """The kind of each layer's attention.

    Args:
        config: The fields.
        full_every: If the file does not say, every so-manyth layer is full, and the others slide. A string is the field
            that has the number.
    """
    if (kinds := read_layer_types(config)) is not None:
        return kinds
    step = full_every if isinstance(full_every, int) else config.integer(full_every, high=MAX_LAYERS)
    return [SLIDING if layer % step else FULL for layer in range(1, num_layers(config) + 1)]


def read_switched_kinds(config: Fields, slides: Callable[[Fields, int], bool]) -> list[str]:
    """The kind of each layer's attention in a family with a switch of windows.

    Args:
        config: The fields.
        slides: Whether the layer of this number has a window, if the switch is on and the file does not name kinds.
    """
    kinds, count = read_layer_types(config), num_layers(config)
    if config.get("sliding_window") is None or not is_on(config, "use_sliding_window"):
        config.require(SLIDING not in (kinds or ()), "layer_types", "name no sliding_attention without a window", kinds)
        return [FULL] * count
    return kinds or [SLIDING if slides(config, layer) else FULL for layer in range(count)]


def read_feed_forward(config: Fields, *, bias: str | bool = False, **own: Any) -> FeedForwardSpec:
    """The gated block.

    Args:
        config: The fields.
        bias: Whether its projections have biases, or the field that says so.
        **own: Other fields of `FeedForwardSpec`.
    """
    if "activation" not in own:
        require_silu(config)
    return FeedForwardSpec(inner=config.integer("intermediate_size"), has_bias=is_on(config, bias), **own)


def read_experts(
    config: Fields,
    count_field: str,
    inner_field: str,
    per_token_field: str = "num_experts_per_tok",
    *,
    choice: Mapping[str, Any] | None = None,
    router: Mapping[str, Any] | None = None,
    **own: Any,
) -> ExpertsSpec:
    """Experts whose weights sum to one, unless the family says otherwise.

    Args:
        config: The fields.
        count_field: The field with their number.
        inner_field: The field with their width.
        per_token_field: The field that says how many a token uses.
        choice: Fields of `ChoiceSpec`.
        router: Fields of `RouterSpec`.
        **own: Fields of `ExpertsSpec`.
    """
    if own.get("gate", "gate") is not None:
        require_silu(config)
    count = config.integer(count_field, high=MAX_EXPERTS)
    chosen = ChoiceSpec(per_token=config.integer(per_token_field, high=count), **(choice or {}))
    routed = RouterSpec(choice=chosen, **(router or {}))
    return ExpertsSpec(count=count, inner=config.integer(inner_field), router=routed, **own)


def block_of(name: str, inner: int) -> FeedForwardSpec:
    """A block whose tensors have this name before their own."""
    return FeedForwardSpec(inner=inner, gate=f"{name}.gate_proj", up=f"{name}.up_proj", down=f"{name}.down_proj")


def read_shared_experts(config: Fields, count_field: str) -> FeedForwardSpec | None:
    """The block that every token uses, which is as wide as so many experts; None for none of them."""
    count = config.integer(count_field, low=0, high=MAX_EXPERTS)
    return block_of("mlp.shared_experts", count * config.integer("moe_intermediate_size")) if count else None


def first_dense(
    config: Fields,
    count_field: str,
    experts: ExpertsSpec,
    read_dense: Callable[[Fields], FeedForwardSpec] = read_feed_forward,
    kinds_field: str | None = None,
) -> list[MLP]:
    """The feed-forward block of each layer. The first have no experts: as many as a field says, or as another lists."""
    first = config.integer(count_field, low=0, high=MAX_LAYERS)
    kinds = ["dense" if layer < first else "sparse" for layer in range(num_layers(config))]
    if kinds_field is not None:
        kinds = read_list(config, kinds_field, ("dense", "sparse"), absent=kinds)
    dense = read_dense(config) if "dense" in kinds else experts
    return [dense if kind == "dense" else experts for kind in kinds]


def require_values(config: Fields, values: Mapping[str, Any]) -> None:
    """Raises ModelError if one of these fields is there with another value. A null is what is off or empty."""
    for name, value in values.items():
        found = config.over(values).get(name)
        config.require(
            found == value or (found is None and not value), name, f"be {value!r}, the only supported value", found
        )


def require_silu(config: Fields) -> None:
    """Raises ModelError for another activation."""
    activation = config.get("hidden_act")
    is_silu = activation in ("silu", "swish")
    config.require(is_silu, "hidden_act", "be silu, the only supported activation", activation)


def read_window(config: Fields) -> Window:
    """The last tokens, in a layer with a window."""
    return Window(config.integer("sliding_window", high=MAX_CONTEXT_LEN))


def read_layer_types(config: Fields, known: Sequence[str] = LAYER_KINDS) -> list[str] | None:
    """The kind of each layer's attention, one of those that are known; None if the file does not say."""
    return None if config.get("layer_types") is None else read_list(config, "layer_types", known)


def read_list(
    config: Fields, name: str, known: Sequence[str], *, absent: list[str] | None = None, needed: str | None = None
) -> list[str]:
    """What a field says of each layer, one of the words that are known.

    Args:
        config: The fields.
        name: The field.
        known: The words.
        absent: What it says where it is absent.
        needed: What at least one layer must be.
    """
    kinds, count = config.get(name, absent), num_layers(config)
    ok = isinstance(kinds, list) and len(kinds) == count and all(kind in known for kind in kinds)
    ok, rule = ok and (needed is None or needed in kinds), f", at least one of them {needed}" if needed else ""
    config.require(ok, name, f"be {count} of {' or '.join(known)}{rule}", kinds)
    return kinds
