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
