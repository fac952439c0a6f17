"""GLM-4-0414 and GLM-Z1 (9B, 32B): four norms, fused gates, and half of each head is turned, neighbours together."""

import dataclasses

from jsg.fields import Fields
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import num_layers, read_attention, read_feed_forward, read_layer, read_model, read_norm
from jsg.models.spec import ModelSpec


def spec(config: Fields) -> ModelSpec:
    """`attention_bias` means queries, keys and values."""
    attention = read_attention(config, is_partial=True, is_interleaved=True)
    attention = dataclasses.replace(attention, qkv_bias=config.flag("attention_bias", default=False))
    layer = dataclasses.replace(
        read_layer(config, attention, read_feed_forward(config, is_fused=True)),
        after_attention=read_norm(config, "post_self_attn_layernorm"),
        after_mlp=read_norm(config, "post_mlp_layernorm"),
    )
    return read_model(config, [layer] * num_layers(config))


FAMILY = Family(
    architecture="Glm4ForCausalLM",
    model_type="glm4",
    defaults=llama.DEFAULTS
    | {
        "vocab_size": 151552,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "bos_token_id": None,
        "eos_token_id": [151329, 151336, 151338],
    },
    spec=spec,
)
