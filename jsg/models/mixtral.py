"""Mixtral: Mistral with several feed-forward blocks a layer, of which each token uses two."""

import jax

from jsg.models.config import ModelConfig
from jsg.models.decoder import Decoder


def build_mixtral(config: ModelConfig, dtype: jax.typing.DTypeLike) -> Decoder:
    """The plain decoder, with `config.num_experts` experts."""
    return Decoder(config, dtype)
