"""GLM-4-0414 and GLM-Z1 (9B, 32B): four norms, fused gates, and half of each head is turned, neighbours together."""

from jsg.models.family import PLAIN, usual

FAMILY = PLAIN.variant(
    model_type="glm4",
    defaults=usual(vocab=151552, inner=13696, layers=40, kv_heads=2, head_dim=128, context=131072)
    | usual(eps=1.5625e-7, bos=None, eos=[151329, 151336, 151338])
    | {
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    },
    attention={"qkv_bias": "attention_bias", "is_partial": True, "is_interleaved": True},
    mlp={"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"},
    norms={
        "before_attention": "input_layernorm",
        "after_attention": "post_self_attn_layernorm",
        "before_mlp": "post_attention_layernorm",
        "after_mlp": "post_mlp_layernorm",
    },
)
