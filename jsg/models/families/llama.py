"""Llama 1 to 3.x, and models of its shape such as Vicuna and Yi."""

import dataclasses
from typing import Any

from jsg.fields import Fields
from jsg.models.family import Family
from jsg.models.parts import (
    SLIDING,
    num_layers,
    read_attention,
    read_feed_forward,
    read_layer,
    read_layer_types,
    read_model,
)
from jsg.models.spec import ModelSpec

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Those of most families, which replace what is different in theirs."""


def spec(config: Fields) -> ModelSpec:
    """`attention_bias` means all four projections of attention. Windows have no effect."""
    has_bias = config.flag("attention_bias", default=False)
    attention = dataclasses.replace(read_attention(config), qkv_bias=has_bias, output_bias=has_bias)
    mlp = dataclasses.replace(read_feed_forward(config), has_bias=config.flag("mlp_bias", default=False))
    is_on = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
    if is_on or SLIDING in (read_layer_types(config) or ()):
        config.notes.append("config.json names a sliding window, but Llama has none, so it has no effect")
    return read_model(config, [read_layer(config, attention, mlp)] * num_layers(config))


FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults=DEFAULTS | {"attention_bias": False, "mlp_bias": False},
    spec=spec,
    ignored=frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
)
