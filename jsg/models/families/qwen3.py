"""Qwen3, dense: Qwen2 with norms of queries and keys in place of biases."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import AttentionSpec, QueryKeyNormSpec
from jsg.models.families import qwen2
from jsg.models.family import Family
from jsg.models.parts import MAX_HEAD_DIM, read_attention, read_eps, read_feed_forward, read_layer, with_windows
from jsg.models.spec import ModelSpec

DEFAULTS = qwen2.DEFAULTS | {"head_dim": 128, "attention_bias": False}


def spec(config: Fields) -> ModelSpec:
    """A null `head_dim` is refused, which elsewhere is the width divided by the heads."""
    config.integer("head_dim", high=MAX_HEAD_DIM)
    layer = read_layer(config, attention(config), read_feed_forward(config))
    return qwen2.read_qwen(config, with_windows(layer, qwen2.windows(config)))


def attention(config: Fields) -> AttentionSpec:
    """`attention_bias` means all four projections."""
    has_bias = config.flag("attention_bias", default=False)
    return dataclasses.replace(
        read_attention(config),
        qk_norm=QueryKeyNormSpec(eps=read_eps(config)),
        qkv_bias=has_bias,
        output_bias=has_bias,
    )


FAMILY = Family(architecture="Qwen3ForCausalLM", model_type="qwen3", defaults=DEFAULTS, spec=spec)
