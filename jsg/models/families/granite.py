"""Granite 3 (2B, 8B): Llama with a factor of embeddings, of scores, of what blocks add, and of logits."""

import dataclasses

from jsg.models.family import PLAIN
from jsg.models.spec import ModelSpec
from jsg.sources import Fields


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """The model with its factors."""
    factor = config.number("residual_multiplier")
    return dataclasses.replace(
        plain,
        layers=tuple(dataclasses.replace(layer, residual_factor=factor) for layer in plain.layers),
        embedding_factor=config.number("embedding_multiplier"),
        logit_factor=1 / config.number("logits_scaling"),
    )


FAMILY = PLAIN.variant(
    model_type="granite",
    defaults={
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    attention={"bias": "attention_bias", "scale": "attention_multiplier"},
    mlp={"bias": "mlp_bias"},
    model=model,
)
