"""The models that are measured: shapes only, for the weights are random. No file is read."""

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
"""About 100 million parameters: what a CPU is measured with."""

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
"""The shape of Llama 3 8B: what an accelerator is measured with."""

LLAMA_SMALL: dict[str, Any] = LLAMA_100M | {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Runs anywhere in a moment."""


def write_model(directory: Path, shape: dict[str, Any]) -> Path:
    """Makes `directory` a model directory that `--load-format dummy` can load; returns it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return directory
