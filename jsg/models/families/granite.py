"""Granite 3 (2B, 8B): Llama with a factor of embeddings, of scores, of what blocks add, and of logits."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import num_layers, read_attention, read_feed_forward, read_layer, read_model
from jsg.models.spec import ModelSpec


def spec(config: Fields) -> ModelSpec:
    """The model of a file."""
    has_bias = config.flag("mlp_bias", default=False)
    return model_of(config, dataclasses.replace(read_feed_forward(config), has_bias=has_bias))


def model_of(config: Fields, mlp: FeedForwardSpec | ExpertsSpec) -> ModelSpec:
    """Granite with this block. `attention_bias` means all four projections of attention."""
    has_bias = config.flag("attention_bias", default=False)
    scale = config.number("attention_multiplier")
    attention = dataclasses.replace(read_attention(config), scale=scale, qkv_bias=has_bias, output_bias=has_bias)
    layer = read_layer(config, attention, mlp)
    layer = dataclasses.replace(layer, residual_factor=config.number("residual_multiplier"))
    return dataclasses.replace(
        read_model(config, [layer] * num_layers(config)),
        embedding_factor=config.number("embedding_multiplier"),
        logit_factor=1 / config.number("logits_scaling"),
    )


FAMILY = Family(
    architecture="GraniteForCausalLM",
    model_type="granite",
    defaults=llama.DEFAULTS
    | {
        "attention_bias": False,
        "mlp_bias": False,
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    spec=spec,
)
