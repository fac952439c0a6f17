"""Seed-OSS: Llama with biases that the file names one by one: `attention_bias` means queries, keys and values."""

from jsg.models.family import PLAIN

FAMILY = PLAIN.variant(
    architecture="SeedOssForCausalLM",
    model_type="seed_oss",
    defaults={
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
    attention={"qkv_bias": "attention_bias", "output_bias": "attention_out_bias"},
    mlp={"bias": "mlp_bias"},
)
