"""Command R7B, Command A and their kin: both blocks read the same, and only layers with a window have rope."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import NormSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    of_kinds,
    read_attention,
    read_feed_forward,
    read_layer_kinds,
    read_model,
)
from jsg.models.spec import LayerSpec, ModelSpec


def spec(config: Fields) -> ModelSpec:
    """`attention_bias` means all four projections of attention. A head is as wide as the number of heads makes it."""
    has_bias = config.flag("attention_bias", default=False)
    attention = read_attention(config.under({"head_dim": None}), is_interleaved=True)
    attention = dataclasses.replace(attention, qkv_bias=has_bias, output_bias=has_bias)
    kinds = read_layer_kinds(config, config.integer("sliding_window_pattern", high=MAX_LAYERS))
    mlp, norm = read_feed_forward(config), _layer_norm(config, "input_layernorm")
    layers = [
        LayerSpec(before_attention=norm, attention=layer, mlp=mlp, is_parallel=True)
        for layer in of_kinds(config, kinds, attention, {SLIDING: attention.rope, FULL: None})
    ]
    model = read_model(config, layers, _layer_norm(config, "model.norm"))
    return dataclasses.replace(model, logit_factor=config.number("logit_scale"))


def _layer_norm(config: Fields, name: str) -> NormSpec:
    eps = config.number("layer_norm_eps", low=0.0, high=1.0)
    return NormSpec(name=name, eps=eps, is_wide=True, is_centred=True)


FAMILY = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    defaults={name: value for name, value in llama.DEFAULTS.items() if name != "rms_norm_eps"}
    | {
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "attention_bias": False,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    spec=spec,
    ignored=frozenset(
        "layer_switch order_of_interleaved_layers position_embedding_type rotary_pct use_embedding_sharing "
        "use_gated_activation use_parallel_block use_parallel_embedding".split()
    ),
)
