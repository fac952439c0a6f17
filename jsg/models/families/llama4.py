"""Llama 4 and Llama Guard 4, the text model: aligned windows where there is rope, and a block that tokens share."""

import dataclasses

from jsg.models import parts
from jsg.models.block_spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, QueryScaleSpec, stacked
from jsg.models.families.smollm3 import read_roped_layers
from jsg.models.family import PLAIN, usual
from jsg.models.rope_fields import MAX_CONTEXT_LEN
from jsg.models.wrapper import Wrapper
from jsg.sources import Fields
from jsg.window import Window

CHUNKED = "chunked_attention"


def attention(config: Fields) -> list[AttentionSpec]:
    """That of each layer. Norms are of layers with rope, and queries grow with the position in those without."""
    norm = {"query": None, "key": None, "is_late": True} if parts.is_on(config, "use_qk_norm") else None
    turned = parts.read_attention(config, bias="attention_bias", qk_norm=norm, is_interleaved=True)
    length = config.integer("floor_scale", high=MAX_CONTEXT_LEN)
    growth = QueryScaleSpec(beta=config.number("attn_scale", low=0.0), length=length, offset=1)
    growth = growth if parts.is_on(config, "attn_temperature_tuning") else None
    plain = dataclasses.replace(turned, rope=None, qk_norm=None, query_scale=growth)
    ropes = read_roped_layers(config)
    kinds, named = parts.read_layer_types(config, (parts.FULL, CHUNKED)), config.get("no_rope_layers") or ropes
    if kinds is None:
        rule = f"be a number for each of {len(ropes)} layers, whose kinds it gives"
        config.require(len(named) == len(ropes), "no_rope_layers", rule, named)
        kinds = [CHUNKED if has_rope else parts.FULL for has_rope in ropes]
    windows: dict[str, Window | None] = {parts.FULL: None}
    if CHUNKED in kinds:
        windows[CHUNKED] = Window(config.integer("attention_chunk_size", high=MAX_CONTEXT_LEN), is_aligned=True)
    return [
        dataclasses.replace(turned if has_rope else plain, window=windows[kind])
        for has_rope, kind in zip(ropes, kinds, strict=True)
    ]


def mlp(config: Fields) -> list[FeedForwardSpec | ExpertsSpec]:
    """The block of each layer. In a file without layers with experts the numbers of these are 0."""
    sparse, count = config.get("moe_layers"), parts.num_layers(config)
    if sparse is None:
        step = config.integer("interleave_moe_layer_step", high=parts.MAX_LAYERS)
        sparse = list(range(step - 1, count, step))
    ok = isinstance(sparse, list) and all(type(layer) is int and 0 <= layer < count for layer in sparse)
    config.require(ok, "moe_layers", f"be a list of numbers of layers below {count}", sparse)
    parts.require_silu(config)
    dense = parts.block_of("feed_forward", config.integer("intermediate_size_mlp"))
    experts = _experts(config) if sparse else dense
    return [experts if layer in sparse else dense for layer in range(count)]


def _experts(config: Fields) -> ExpertsSpec:
    """What an expert reads is multiplied by the sigmoid of its logit."""
    return parts.read_experts(
        config,
        "num_local_experts",
        "intermediate_size",
        choice={"score": "sigmoid", "is_renormed": False},
        router={"name": "feed_forward.router", "weighs_input": True},
        **stacked("feed_forward.experts", is_transposed=True),
        shared=parts.block_of("feed_forward.shared_expert", config.integer("intermediate_size")),
    )


FAMILY = PLAIN.variant(
    model_type="llama4_text",
    defaults=usual(
        vocab=202048, width=5120, inner=8192, layers=48, heads=40, kv_heads=8, head_dim=128, context=131072, per_token=1
    )
    | usual(eps=1e-5, theta=500_000.0)
    | {
        "intermediate_size_mlp": 16384,
        "use_qk_norm": True,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "layer_types": None,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "num_local_experts": 16,
        "moe_layers": None,
        "interleave_moe_layer_step": 1,
    },
    attention=attention,
    mlp=mlp,
)

WRAPPER = Wrapper(
    text_type="llama4_text",
    fields="boi_token_index eoi_token_index",
    unread=r"(model\.)?(vision_model|multi_modal_projector)\..*",
)
