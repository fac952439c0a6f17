"""Configs of small checkpoints of families whose tensors transformers names for the recorder: see `variants.py`.

Their numbers are unusual but legal: heads that are not the width divided by their number, groups of three, layers of
every kind that the family has.
"""

from typing import Any

VOCAB = 512


def small(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """A small config; a field of None is absent."""
    shape = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }
    return {name: value for name, value in shape.items() if value is not None}


_QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_QWEN2_MOE = small(
    "Qwen2MoeForCausalLM", "qwen2_moe", **_QWEN_EXPERTS, shared_expert_intermediate_size=48, num_hidden_layers=3
)
_QWEN3_MOE = small("Qwen3MoeForCausalLM", "qwen3_moe", **_QWEN_EXPERTS, norm_topk_prob=True)

OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {**_QWEN2_MOE, "mlp_only_layers": [1]},
    "qwen2_moe_window": {
        **_QWEN2_MOE,
        "head_dim": 32,
        "num_key_value_heads": 3,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 3,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_mixed": {
        **_QWEN3_MOE,
        "norm_topk_prob": False,
        "num_hidden_layers": 3,
        "decoder_sparse_step": 2,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 40,
        "tie_word_embeddings": True,
    },
}
