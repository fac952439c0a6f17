"""Seed-OSS: Llama with biases that the file names one by one."""

import dataclasses

from jsg.fields import Fields
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import num_layers, read_attention, read_feed_forward, read_layer, read_model
from jsg.models.spec import ModelSpec


def spec(config: Fields) -> ModelSpec:
    """`attention_bias` means queries, keys and values, `attention_out_bias` the projection after attention."""
    attention = dataclasses.replace(
        read_attention(config),
        qkv_bias=config.flag("attention_bias", default=False),
        output_bias=config.flag("attention_out_bias", default=False),
    )
    mlp = dataclasses.replace(read_feed_forward(config), has_bias=config.flag("mlp_bias", default=False))
    return read_model(config, [read_layer(config, attention, mlp)] * num_layers(config))


FAMILY = Family(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    defaults=llama.DEFAULTS
    | {
        "vocab_size": 155136,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524288,
        "attention_bias": True,
        "attention_out_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
    },
    spec=spec,
)
