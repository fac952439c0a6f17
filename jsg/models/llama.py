"""Llama 1 to 3.x, and what is shaped like it: Vicuna, Yi, and many more."""

import jax

from jsg.models.config import ModelConfig
from jsg.models.decoder import Decoder


def build_llama(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Decoder:
    """The plain decoder; `attention_bias` means all four projections of attention."""
    bias = config.attention_bias
    return Decoder(config, dtype, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)
