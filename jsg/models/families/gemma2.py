"""Gemma 2 (2B, 9B, 27B): four norms in a layer, windows in every other layer, and bounds of scores and logits."""

import dataclasses
import math
from typing import Any

from jsg.models.block_spec import AttentionSpec
from jsg.models.family import PLAIN, usual
from jsg.models.parts import read_heads
from jsg.models.rope_fields import read_rope
from jsg.models.spec import ModelSpec
from jsg.sources import Fields

MLP: dict[str, Any] = {"activation": "gelu_tanh"}


def attention(config: Fields) -> AttentionSpec:
    """Attention with the same rope in all layers."""
    plain = heads(config, softcap=_cap(config, "attn_logit_softcapping"))
    return dataclasses.replace(plain, rope=read_rope(config, head_dim=plain.head_dim))


def heads(config: Fields, **own: Any) -> AttentionSpec:
    """Attention without rope, whose scale the file says. It has these other fields."""
    scale = config.number("query_pre_attn_scalar") ** -0.5
    return dataclasses.replace(read_heads(config, bias="attention_bias", **own), scale=scale)


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """The model with its factor of embeddings and its bound of logits."""
    factor, cap = math.sqrt(plain.hidden_size), _cap(config, "final_logit_softcapping")
    return dataclasses.replace(plain, embedding_factor=factor, logit_softcap=cap)


def _cap(config: Fields, name: str) -> float | None:
    """The bound of scores or logits; None for none."""
    return None if config.get(name) is None else config.number(name)


FAMILY = PLAIN.variant(
    model_type="gemma2",
    defaults=usual(
        vocab=256000, width=2304, inner=9216, layers=26, heads=8, kv_heads=4, head_dim=256, context=8192, window=4096
    )
    | usual(tied=True, bos=2, eos=1)
    | {
        "query_pre_attn_scalar": 256,
        "layer_types": None,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    only={"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": False},
    without="hidden_act",
    ignored="hidden_act sliding_window_size",
    attention=attention,
    kinds=2,
    mlp=MLP,
    norms={
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
    norm={"is_wide": True, "adds_one": True},
    model=model,
)
