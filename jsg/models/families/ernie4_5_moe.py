"""ERNIE 4.5 with experts (21B-A3B, 300B-A47B), whose router is float32; rope turns neighbours together."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.families import llama
from jsg.models.families.glm4_moe import shared_experts
from jsg.models.family import Family
from jsg.models.parts import (
    MAX_EXPERTS,
    MAX_LAYERS,
    num_layers,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layer,
    read_model,
    require_values,
    with_unread,
)
from jsg.models.spec import ModelSpec

LATER_TOKENS = r"(model\.)?mtp_.*"
"""Tensors of blocks that predict later tokens."""

ALWAYS = {"compression_ratio": 1.0, "use_bias": False}
"""Fields of published files with their only supported value."""


def spec(config: Fields) -> ModelSpec:
    """The model of a file, without biases: with `use_bias` the head has one, too."""
    require_values(config, ALWAYS)
    attention = read_attention(config, is_interleaved=True)
    model = read_model(config, [read_layer(config, attention, mlp) for mlp in blocks(config)])
    return with_unread(model, LATER_TOKENS)


def blocks(config: Fields) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer: experts in each so-many-th layer of a range, else one block."""
    experts = read_experts(config, "moe_num_experts", "moe_intermediate_size", "moe_k")
    router = dataclasses.replace(
        experts.router,
        choice=dataclasses.replace(experts.router.choice, least_sum=config.number("moe_norm_min")),
        choice_bias="mlp.moe_statics.e_score_correction_bias",
        choice_bias_axes=2,
        is_float32=True,
    )
    num_shared = config.integer("moe_num_shared_experts", low=0, high=MAX_EXPERTS)
    shared = shared_experts(num_shared * experts.inner) if num_shared else None
    experts = dataclasses.replace(experts, router=router, shared=shared)
    count, step = num_layers(config), config.integer("moe_layer_interval", high=MAX_LAYERS)
    first = config.integer("moe_layer_start_index", low=0, high=MAX_LAYERS)
    last = config.integer("moe_layer_end_index", low=-1, high=MAX_LAYERS)
    sparse = {layer for layer in range(first, count if last == -1 else last + 1) if (layer + 1) % step == 0}
    return [experts if layer in sparse else read_feed_forward(config) for layer in range(count)]


FAMILY = Family(
    architecture="Ernie4_5_MoeForCausalLM",
    model_type="ernie4_5_moe",
    defaults=llama.DEFAULTS
    | dict.fromkeys(ALWAYS)
    | {
        "vocab_size": 103424,
        "hidden_size": 2560,
        "intermediate_size": 12288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    spec=spec,
    ignored=frozenset("moe_capacity moe_gate moe_use_aux_free num_nextn_predict_layers".split()),
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)
