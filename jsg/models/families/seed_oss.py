"""Seed-OSS: Llama with biases that the file names one by one."""

from functools import partial

from jsg.fields import Fields
from jsg.models.block_spec import AttentionSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import is_on, read_attention, read_feed_forward


def attention(config: Fields) -> AttentionSpec:
    """`attention_bias` means queries, keys and values, `attention_out_bias` the projection after attention."""
    return read_attention(config, qkv_bias="attention_bias", output_bias=is_on(config, "attention_out_bias"))


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
    attention=attention,
    mlp=partial(read_feed_forward, bias="mlp_bias"),
)
