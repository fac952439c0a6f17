"""Qwen3, dense: Qwen2 with norms of queries and keys in place of biases."""

from typing import Any

from jsg.models.block_spec import AttentionSpec
from jsg.models.families import qwen2
from jsg.models.parts import MAX_HEAD_DIM, read_attention
from jsg.sources import Fields

NORMED: dict[str, Any] = {"bias": "attention_bias", "qk_norm": {}}


def attention(config: Fields) -> AttentionSpec:
    """A null `head_dim` is refused, which elsewhere is the width divided by the heads."""
    config.integer("head_dim", high=MAX_HEAD_DIM)
    return read_attention(config, **NORMED)


FAMILY = qwen2.FAMILY.variant(
    model_type="qwen3",
    defaults={"head_dim": 128},
    attention=attention,
)
