"""Granite 3 (2B, 8B): Llama with a factor of embeddings, of scores, of what blocks add, and of logits."""

import dataclasses
from functools import partial

from jsg.fields import Fields
from jsg.models.block_spec import AttentionSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import read_attention, read_feed_forward
from jsg.models.spec import ModelSpec


def attention(config: Fields) -> AttentionSpec:
    """Attention whose scale the file says."""
    return read_attention(config, bias="attention_bias", scale=config.number("attention_multiplier"))


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """The model with its factors."""
    factor = config.number("residual_multiplier")
    return dataclasses.replace(
        plain,
        layers=tuple(dataclasses.replace(layer, residual_factor=factor) for layer in plain.layers),
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
    attention=attention,
    mlp=partial(read_feed_forward, bias="mlp_bias"),
    model=model,
)
