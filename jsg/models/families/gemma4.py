"""Gemma 4: layers of two shapes, keys and values that later layers read, inputs of layers, experts beside blocks."""

import dataclasses
from typing import Any

from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.models import parts
from jsg.models.block_spec import (
    AttentionSpec,
    BesideSpec,
    ExpertsSpec,
    FeedForwardSpec,
    LayerInputSpec,
    NormSpec,
    RouterSpec,
    stacked,
)
from jsg.models.families import gemma2
from jsg.models.family import usual
from jsg.models.spec import ModelSpec
from jsg.models.wrapper import Wrapper
from jsg.sources import Fields

ROPES = {
    parts.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    parts.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
THETA = 10_000.0
"""The base of a rope that no layer has."""
OWN_SHAPE = frozenset({"head_dim", "num_key_value_heads"})
"""What a layer may have of its own."""
IMPLIED: dict[str, Any] = {}
"""The shapes of layers in a file that does not give them, which is no file that gives none."""
WIDE: dict[str, Any] = {"is_wide": True}


def kinds(config: Fields) -> list[str]:
    """The kind of each layer's attention. The last is full, whatever the file says, as in transformers."""
    return [*parts.read_kinds(config, 6)[:-1], parts.FULL]


def attention(config: Fields) -> list[AttentionSpec]:
    """Of each layer. One that reads keys and values of another has a projection to queries only."""
    two_way = config.get("use_bidirectional_attention")
    rule = "be null or 'vision': attention to text must be causal"  # 'vision' is about pictures, which are refused
    config.require(two_way in (None, False, "vision"), "use_bidirectional_attention", rule, two_way)
    config = config.under({"rope_parameters": config.get("rope_parameters", ROPES)})
    ropes, of_layers = config.get("rope_parameters"), kinds(config)
    rule = "be absent: rope_parameters has an object for each kind of layer"
    config.require(config.get("rope_scaling") is None, "rope_scaling", rule, config.get("rope_scaling"))
    is_whole = isinstance(ropes, dict) and set(of_layers) <= set(ropes)
    config.require(
        is_whole, "rope_parameters", f"have an object for each of {', '.join(sorted(set(of_layers)))}", ropes
    )
    is_key = parts.is_on(config, "attention_k_eq_v")
    thetas = {kind: None if kind in of_layers else THETA for kind in ROPES}
    layers: list[AttentionSpec] = []
    for kind, source, shape in zip(of_layers, _sources(config), _shapes(config), strict=True):
        heads = parts.read_heads(shape, bias="attention_bias", qk_norm={**WIDE, "norms_values": True})
        count = 3 if not is_key or kind == parts.SLIDING else 2  # without one to values, these are the keys
        if source is not None:
            there, count = layers[source], 1
            is_alike = (heads.kv_heads, heads.head_dim) == (there.kv_heads, there.head_dim)
            rule = f"give layer {len(layers)} the shape of layer {source}, whose keys and values it reads"
            config.require(is_alike, "per_layer_config", rule, config.get("per_layer_config"))
        rope = parts.read_ropes(config, thetas, heads.head_dim)[kind]
        layers.append(dataclasses.replace(heads, scale=1.0, rope=rope, projections=heads.projections[:count]))
    return layers


def _sources(config: Fields) -> list[int | None]:
    """For each layer the one whose keys and values it reads: the last of its kind that has some of its own."""
    of_layers = kinds(config)
    num_shared = config.integer("num_kv_shared_layers", default=0, low=0, high=len(of_layers) - 1)
    own = of_layers[: len(of_layers) - num_shared]
    has_kind = set(own) == set(of_layers)
    config.require(has_kind, "num_kv_shared_layers", "leave a layer of each kind before those", num_shared)
    last = {kind: i for i, kind in enumerate(own)}
    return [None if i < len(own) else last[kind] for i, kind in enumerate(of_layers)]


def _shapes(config: Fields) -> list[Fields]:
    """The fields of each layer's heads: a full one has those of `global_head_dim`, or what `per_layer_config` says."""
    own = config.get("per_layer_config")
    if own is IMPLIED:
        wide: dict[str, Any] = {"head_dim": config.get("global_head_dim", 512)}
        kv_heads = config.get("num_global_key_value_heads")
        if kv_heads is not None and parts.is_on(config, "attention_k_eq_v"):
            wide["num_key_value_heads"] = kv_heads
        return [config.under(wide) if kind == parts.FULL else config for kind in kinds(config)]
    count = parts.num_layers(config)
    ok = isinstance(own, dict) and all(name.isascii() and name.isdecimal() and len(name) < 10 for name in own)
    by_layer = {int(name): fields for name, fields in own.items()} if ok else {}  # transformers writes 03 beside 12
    ok = ok and len(by_layer) == len(own) and all(layer < count for layer in by_layer)
    ok = ok and all(isinstance(fields, dict) and set(fields) <= OWN_SHAPE for fields in by_layer.values())
    rule = f"have numbers of layers up to {count - 1}, each with an object of {' and '.join(sorted(OWN_SHAPE))}"
    config.require(ok, "per_layer_config", rule, own)
    return [config.under(by_layer.get(layer, {})) for layer in range(count)]


def mlp(config: Fields) -> list[FeedForwardSpec]:
    """The block of each layer. Layers without keys and values of their own may have one that is twice as wide."""
    block, is_wide = parts.read_feed_forward(config, **gemma2.MLP), parts.is_on(config, "use_double_wide_mlp")
    wide = dataclasses.replace(block, inner=2 * block.inner) if is_wide else block
    return [block if source is None else wide for source in _sources(config)]


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """The tensors of keys and values that a layer does without may be in a file, and are not read."""
    if parts.read_kinds(config, 6)[-1] != parts.FULL:
        config.notes.append("config.json gives the last layer a window, but it sees all tokens, as in transformers")
    sources = _sources(config)
    of_each: dict[str, Any] = {"beside": _beside(config), "own_input": _own_input(config), "scalar": "layer_scalar"}
    layers = tuple(
        dataclasses.replace(layer, kv_source=source, **of_each)
        for layer, source in zip(plain.layers, sources, strict=True)
    )
    whole = gemma2.model(config, dataclasses.replace(plain, layers=layers))
    numbers = "|".join(str(i) for i, source in enumerate(sources) if source is not None)
    unread = rf"model\.layers\.({numbers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    names = dataclasses.replace(whole.names, unread=unread)
    return dataclasses.replace(whole, names=names) if numbers else whole


def _own_input(config: Fields) -> LayerInputSpec | None:
    """Its table has a row for each token."""
    width = config.integer("hidden_size_per_layer_input", default=0, low=0)
    if not width:
        return None
    vocab_size, rows = config.integer("vocab_size"), config.integer("vocab_size_per_layer_input")
    config.require(rows >= vocab_size, "vocab_size_per_layer_input", f"be at least vocab_size = {vocab_size}", rows)
    return LayerInputSpec(
        count=parts.num_layers(config),
        width=width,
        vocab_size=rows,
        activation="gelu_tanh",
        norm=parts.read_norm(config, "post_per_layer_input_norm", **WIDE),
        table_norm=parts.read_norm(config, "model.per_layer_projection_norm", **WIDE),
    )


def _beside(config: Fields) -> BesideSpec | None:
    """One tensor has all experts. The router norms what it reads, and scales it."""
    if not parts.is_on(config, "enable_moe_block"):
        return None
    count = config.integer("num_experts", high=parts.MAX_EXPERTS)
    router = RouterSpec(
        name="router.proj",
        choice=ChoiceSpec(per_token=config.integer("top_k_experts", high=count)),
        norm=NormSpec(name="router.scale", suffix="", eps=parts.read_eps(config)),
        input_factor=config.integer("hidden_size") ** -0.5,
        expert_scale="router.per_expert_scale",
        rounds_weights=False,
    )
    experts = ExpertsSpec(
        count=count,
        inner=config.integer("moe_intermediate_size"),
        activation="gelu_tanh",
        router=router,
        **stacked("experts"),
    )
    return BesideSpec(
        experts=experts,
        before=parts.read_norm(config, "pre_feedforward_layernorm_2", **WIDE),
        after=parts.read_norm(config, "post_feedforward_layernorm_2", **WIDE),
        after_block=parts.read_norm(config, "post_feedforward_layernorm_1", **WIDE),
    )


FAMILY = gemma2.FAMILY.variant(
    model_type="gemma4_text",
    defaults=usual(vocab=262144, layers=30, context=131072, window=512, expert_inner=None)
    | {
        "rope_parameters": ROPES,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": None,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": IMPLIED,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
    },
    only={"hidden_activation": "gelu_pytorch_tanh"},
    without="query_pre_attn_scalar rope_theta attn_logit_softcapping",
    ignored="hidden_act",
    attention=attention,
    kinds=kinds,
    mlp=mlp,
    norm=WIDE,
    scales_context=False,
    model=model,
)

WRAPPER = Wrapper(
    text_type="gemma4_text",
    is_tied=True,
    fields="audio_config eoa_token_index vision_soft_tokens_per_image",
    unread=r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
    note="the model is served without its towers for pictures and sounds, so it takes text only",
)
