"""Qwen3: Llama with normed queries and keys."""

import jax

from jsg.models.config import ModelConfig
from jsg.models.decoder import Decoder


def build_qwen3(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Decoder:
    """The decoder with query and key norms; `attention_bias` means all four projections of attention."""
    return Decoder(config, dtype, qkv_bias=config.attention_bias, output_bias=config.attention_bias, qk_norm=True)
