"""OLMo 2: Llama with norms of what blocks add, not of what they read, and of all heads together."""

from jsg.models.family import PLAIN, usual

FAMILY = PLAIN.variant(
    model_type="olmo2",
    defaults=usual(eps=1e-5, bos=None, eos=50279)
    | {
        "vocab_size": 50304,
    },
    attention={"bias": "attention_bias", "qk_norm": {"spans_heads": True}},
    norms={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    norm={"is_wide": True},
)
