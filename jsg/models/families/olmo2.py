"""OLMo 2: Llama with norms of what blocks add, not of what they read, and of all heads together."""

from jsg.models.family import PLAIN

FAMILY = PLAIN.variant(
    model_type="olmo2",
    defaults={
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "bos_token_id": None,
        "eos_token_id": 50279,
    },
    attention={"bias": "attention_bias", "qk_norm": {"spans_heads": True}},
    norms={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    norm={"is_wide": True},
)
