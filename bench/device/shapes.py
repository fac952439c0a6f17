"""The shapes of published models for accelerators: large ones, ones with experts, and vision models.

There are only shapes, as in `bench.shapes`.
"""

from typing import Any

from bench.shapes import LLAMA_8B

LLAMA_70B: dict[str, Any] = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "max_position_embeddings": 8192,
}
MISTRAL_7B: dict[str, Any] = LLAMA_8B | {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 32_000,
    "sliding_window": 4096,
}
MIXTRAL_8X7B: dict[str, Any] = MISTRAL_7B | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32_768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
MIXTRAL_8X22B: dict[str, Any] = MIXTRAL_8X7B | {
    "vocab_size": 32_768,
    "hidden_size": 6144,
    "intermediate_size": 16_384,
    "num_hidden_layers": 56,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "max_position_embeddings": 65_536,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 131_072,
}
QWEN3_8B: dict[str, Any] = LLAMA_8B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
QWEN3_30B_A3B: dict[str, Any] = {name: value for name, value in QWEN3_8B.items() if name != "intermediate_size"} | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
QWEN3_5_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 16_384,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""Three layers of gated DeltaNet for one of attention, as the two below."""
QWEN3_5_35B_A3B: dict[str, Any] = {name: value for name, value in QWEN3_5_9B.items() if name != "intermediate_size"} | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
CLIP_L_336: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""The vision tower of every published LLaVA: CLIP ViT-L/14 at 336 pixels, with 576 patches in a tile."""
