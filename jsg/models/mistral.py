"""Mistral: Llama without biases, and in its first version with a sliding window."""

import jax

from jsg.models.config import ModelConfig
from jsg.models.decoder import Decoder


def build_mistral(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Decoder:
    """The plain decoder; the window is in `config.layer_windows`."""
    return Decoder(config, dtype)
