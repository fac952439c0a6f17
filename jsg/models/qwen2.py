"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, whatever config.json says."""

import jax

from jsg.models.config import ModelConfig
from jsg.models.decoder import Decoder


def build_qwen2(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Decoder:
    """The decoder with biases on queries, keys and values."""
    return Decoder(config, dtype, qkv_bias=True)
