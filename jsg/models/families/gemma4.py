"""Gemma 4: layers of two shapes, keys and values that later layers read, inputs of layers, experts beside blocks."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jsg.fields import Fields
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.models.block_spec import (
    AttentionSpec,
    BesideSpec,
    ExpertsSpec,
    LayerInputSpec,
    NormSpec,
    QueryKeyNormSpec,
    RouterSpec,
    StackSpec,
)
from jsg.models.families import gemma2
from jsg.models.family import Family
from jsg.models.parts import (
    FULL,
    MAX_EXPERTS,
    SLIDING,
    num_layers,
    read_eps,
    read_heads,
    read_layer_kinds,
    read_norm,
    read_ropes,
    read_window,
    with_unread,
)
from jsg.models.spec import ModelSpec, TensorNames
from jsg.models.wrapper import TEXT_PREFIXES, Wrapper

ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
THETA = 10_000.0
"""The base of a rope that is there without one."""
OWN_SHAPE = frozenset({"head_dim", "num_key_value_heads"})
"""What a layer may have of its own."""


def spec(config: Fields) -> ModelSpec:
    """The tensors of keys and values that a layer does without may be in a file, and are not read."""
    config = config.under({"rope_parameters": config.get("rope_parameters", ROPES)})
    kinds = read_layer_kinds(config, full_every=6)
    if kinds[-1] != FULL:
        config.notes.append("config.json gives the last layer a window, but it sees all tokens, as in transformers")
        kinds[-1] = FULL
    num_shared = config.integer("num_kv_shared_layers", default=0, low=0, high=num_layers(config) - 1)
    first = len(kinds) - num_shared
    sources = _sources(config, kinds, first)
    model = gemma2.read_gemma(config, _attention(config, kinds, sources), scales_context=False, adds_one=False)
    widening = 2 if config.flag("use_double_wide_mlp", default=False) else 1
    beside, own_input = _beside(config), _own_input(config)
    layers = tuple(
        dataclasses.replace(
            layer,
            kv_source=source,
            mlp=dataclasses.replace(layer.mlp, inner=layer.mlp.inner * (1 if source is None else widening)),
            beside=beside,
            own_input=own_input,
            scalar="layer_scalar",
        )
        for layer, source in zip(model.layers, sources, strict=True)
    )
    model = dataclasses.replace(model, layers=layers)
    numbers = "|".join(map(str, range(first, len(layers))))
    unread = rf"model\.layers\.({numbers})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\..*"
    return with_unread(model, unread) if num_shared else model


def _sources(config: Fields, kinds: Sequence[str], first: int) -> list[int | None]:
    """For each layer the one whose keys and values it reads: from the `first` on, the last before it of their kind."""
    has_kind = set(kinds[:first]) == set(kinds)
    config.require(has_kind, "num_kv_shared_layers", "leave a layer of each kind before those", len(kinds) - first)
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return [None if i < first else last[kind] for i, kind in enumerate(kinds)]


def _attention(config: Fields, kinds: Sequence[str], sources: Sequence[int | None]) -> list[AttentionSpec]:
    """Of each layer."""
    two_way = config.get("use_bidirectional_attention")
    rule = "be null or 'vision': attention to text must be causal"  # 'vision' is about pictures, which are refused
    config.require(two_way in (None, False, "vision"), "use_bidirectional_attention", rule, two_way)
    ropes = config.get("rope_parameters")
    is_whole = isinstance(ropes, dict) and set(kinds) <= set(ropes)
    config.require(is_whole, "rope_parameters", f"have an object for each of {', '.join(sorted(set(kinds)))}", ropes)
    is_key, has_bias = config.flag("attention_k_eq_v", default=False), config.flag("attention_bias", default=False)
    layers: list[AttentionSpec] = []
    for kind, source, shape in zip(kinds, sources, _shapes(config, kinds), strict=True):
        heads = read_heads(shape)
        if source is not None:
            there = layers[source]
            is_alike = (heads.kv_heads, heads.head_dim) == (there.kv_heads, there.head_dim)
            rule = f"give layer {len(layers)} the shape of layer {source}, whose keys and values it reads"
            config.require(is_alike, "per_layer_config", rule, config.get("per_layer_config"))
        projections = heads.projections[:1] if source is not None else heads.projections
        layers.append(
            dataclasses.replace(
                heads,
                scale=1.0,
                rope=read_ropes(config, {SLIDING: THETA, FULL: THETA}, heads.head_dim)[kind],
                window=read_window(config) if kind == SLIDING else None,
                qk_norm=QueryKeyNormSpec(eps=read_eps(config), is_wide=True, norms_values=True),
                qkv_bias=has_bias,
                output_bias=has_bias,
                projections=projections[:2] if is_key and kind == FULL else projections,
            )
        )
    return layers


def _shapes(config: Fields, kinds: Sequence[str]) -> list[Fields]:
    """The fields of each layer's heads: a full one has those of `global_head_dim`, or what `per_layer_config` says."""
    own = config.get("per_layer_config")
    if own is None:
        wide: dict[str, Any] = {"head_dim": config.get("global_head_dim", 512)}
        kv_heads = config.get("num_global_key_value_heads")
        if kv_heads is not None and config.flag("attention_k_eq_v", default=False):
            wide["num_key_value_heads"] = kv_heads
        return [config.under(wide) if kind == FULL else config for kind in kinds]
    numbers = [str(i) for i in range(len(kinds))]
    ok = isinstance(own, dict) and set(own) <= set(numbers)
    ok = ok and all(isinstance(fields, dict) and set(fields) <= OWN_SHAPE for fields in own.values())
    rule = f"have numbers of layers up to {numbers[-1]}, each with an object of {' and '.join(sorted(OWN_SHAPE))}"
    config.require(ok, "per_layer_config", rule, own)
    return [config.under(own.get(number, {})) for number in numbers]


def _norm(config: Fields, name: str) -> NormSpec:
    return dataclasses.replace(read_norm(config, name), is_wide=True)


def _own_input(config: Fields) -> LayerInputSpec | None:
    """Its table has a row for each token."""
    width = config.integer("hidden_size_per_layer_input", default=0, low=0)
    if not width:
        return None
    vocab_size, rows = config.integer("vocab_size"), config.integer("vocab_size_per_layer_input")
    config.require(rows >= vocab_size, "vocab_size_per_layer_input", f"be at least vocab_size = {vocab_size}", rows)
    return LayerInputSpec(
        count=num_layers(config),
        width=width,
        vocab_size=rows,
        activation="gelu_tanh",
        norm=_norm(config, "post_per_layer_input_norm"),
        table_norm=_norm(config, "model.per_layer_projection_norm"),
    )


def _beside(config: Fields) -> BesideSpec | None:
    """One tensor has all experts. The router norms what it reads, and scales it."""
    if not config.flag("enable_moe_block", default=False):
        return None
    count = config.integer("num_experts", high=MAX_EXPERTS)
    router = RouterSpec(
        name="router.proj",
        choice=ChoiceSpec(per_token=config.integer("top_k_experts", high=count)),
        norm=NormSpec(name="router.scale", suffix="", eps=read_eps(config)),
        input_factor=config.integer("hidden_size") ** -0.5,
        expert_scale="router.per_expert_scale",
        rounds_weights=False,
    )
    experts = ExpertsSpec(
        count=count,
        inner=config.integer("moe_intermediate_size"),
        activation="gelu_tanh",
        router=router,
        gate="experts.gate_up_proj",
        up="experts.gate_up_proj",
        down="experts.down_proj",
        stack=StackSpec(suffix=""),
    )
    return BesideSpec(
        experts=experts,
        before=_norm(config, "pre_feedforward_layernorm_2"),
        after=_norm(config, "post_feedforward_layernorm_2"),
        after_block=_norm(config, "post_feedforward_layernorm_1"),
    )


FAMILY = Family(
    architecture="Gemma4ForCausalLM",
    model_type="gemma4_text",
    defaults={
        name: value for name, value in gemma2.DEFAULTS.items() if name not in ("query_pre_attn_scalar", "rope_theta")
    }
    | {
        "vocab_size": 262144,
        "num_hidden_layers": 30,
        "max_position_embeddings": 131072,
        "rope_parameters": ROPES,
        "sliding_window": 512,
        "use_bidirectional_attention": None,
        "global_head_dim": 512,
        "num_global_key_value_heads": None,
        "per_layer_config": None,
        "vocab_size_per_layer_input": 262144,
        "hidden_size_per_layer_input": 256,
        "attention_k_eq_v": False,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    },
    spec=spec,
    ignored=frozenset({"hidden_act"}),
)

WRAPPER = Wrapper(
    text_type="gemma4_text",
    is_tied=True,
    fields=frozenset(
        "text_config vision_config audio_config tie_word_embeddings boi_token_id eoi_token_id boa_token_id "
        "eoa_token_index image_token_id video_token_id audio_token_id vision_soft_tokens_per_image".split()
    ),
    names=TensorNames(
        prefixes=TEXT_PREFIXES, unread=r"(model\.)?(vision_tower|audio_tower|embed_vision|embed_audio)\..*"
    ),
    notes=("the model is served without its towers for pictures and sounds, so it takes text only",),
)
