"""ERNIE 4.5, dense (0.3B): Llama in which neighbours are turned together."""

import dataclasses

from jsg.fields import Fields
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import num_layers, read_attention, read_feed_forward, read_layer, read_model
from jsg.models.spec import ModelSpec


def spec(config: Fields) -> ModelSpec:
    """`use_bias` means all projections."""
    has_bias = config.flag("use_bias", default=False)
    attention = read_attention(config, is_interleaved=True)
    attention = dataclasses.replace(attention, qkv_bias=has_bias, output_bias=has_bias)
    mlp = dataclasses.replace(read_feed_forward(config), has_bias=has_bias)
    return read_model(config, [read_layer(config, attention, mlp)] * num_layers(config))


FAMILY = Family(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    defaults=llama.DEFAULTS
    | {
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "use_bias": False,
        "tie_word_embeddings": True,
    },
    spec=spec,
)
