"""The shapes of the models that are measured. Weights are random, and no file is read."""

import json
from pathlib import Path
from typing import Any

LLAMA_100M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 16_384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""About 100 million parameters, for measurements on a CPU."""

HYBRID_100M: dict[str, Any] = {name: value for name, value in LLAMA_100M.items() if name != "rope_parameters"} | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 6,
    "linear_num_value_heads": 12,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "rms_norm_eps": 1e-6,
}
"""A Qwen3.5 of that shape. As in the 9B, values of linear attention are as wide as the model, queries half as wide."""

LLAMA_500M: dict[str, Any] = LLAMA_100M | {
    "vocab_size": 32_000,
    "hidden_size": 1280,
    "intermediate_size": 3456,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
}
"""494.9 million parameters, for measurements of loading."""

LLAMA_8B: dict[str, Any] = LLAMA_100M | {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 16_384,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
"""The shape of Llama 3 8B, for measurements on an accelerator."""

LLAMA_SMALL: dict[str, Any] = LLAMA_100M | {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""A tiny shape that runs anywhere in a moment."""

HYBRID_SMALL: dict[str, Any] = (HYBRID_100M | LLAMA_SMALL) | {
    **{name: HYBRID_100M[name] for name in ("architectures", "model_type", "rms_norm_eps")},
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""A Qwen3.5 as tiny: three layers with states and one with attention."""

CLIP_B: dict[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "image_size": 224,
    "patch_size": 16,
}
"""The vision tower of CLIP ViT-B/16, with 196 patches in a tile."""

CLIP_SMALL: dict[str, Any] = CLIP_B | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
}
"""A tiny vision tower with 16 patches in a tile."""


def llava(text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """A LLaVA-1.5 of this text model and tower. An image is one tile, and each of its patches is a token."""
    return {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": tower,
        "image_token_index": text["vocab_size"] - 1,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def llava_next_video(text: dict[str, Any], tower: dict[str, Any]) -> dict[str, Any]:
    """A LLaVA-NeXT-Video of this text model and tower. Two by two patches of a frame are a token."""
    side = tower["image_size"]
    return llava(text, tower) | {
        "architectures": ["LlavaNextVideoForConditionalGeneration"],
        "model_type": "llava_next_video",
        "video_token_index": text["vocab_size"] - 2,
        "image_grid_pinpoints": [[side, 2 * side], [2 * side, side], [2 * side, 2 * side]],
        "spatial_pool_mode": "average",
        "spatial_pool_stride": 2,
    }


def write_model(directory: Path, shape: dict[str, Any]) -> Path:
    """Makes `directory` a model directory that `--load-format dummy` can load, and returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return directory
