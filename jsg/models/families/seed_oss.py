"""Seed-OSS: Llama with biases that the file names one by one: `attention_bias` means queries, keys and values."""

from jsg.models.family import PLAIN, usual

FAMILY = PLAIN.variant(
    model_type="seed_oss",
    defaults=usual(vocab=155136, inner=27648, layers=64, heads=80, kv_heads=8, head_dim=128, context=524288)
    | {
        "attention_bias": True,
        "attention_out_bias": False,
        "bos_token_id": 0,
    },
    attention={"qkv_bias": "attention_bias", "output_bias": "attention_out_bias"},
    mlp={"bias": "mlp_bias"},
)
