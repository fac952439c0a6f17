"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): Qwen3 with experts."""

import dataclasses

from jsg.fields import Fields
from jsg.models.families import qwen2, qwen2_moe, qwen3
from jsg.models.family import Family
from jsg.models.parts import read_layer, read_window
from jsg.models.spec import ModelSpec


def spec(config: Fields) -> ModelSpec:
    """A window is for all layers, if its switch is on."""
    has_window = config.get("sliding_window") is not None and config.flag("use_sliding_window", default=False)
    attention = dataclasses.replace(qwen3.attention(config), window=read_window(config) if has_window else None)
    return qwen2.read_qwen(config, [read_layer(config, attention, mlp) for mlp in qwen2_moe.blocks(config, None)])


FAMILY = Family(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    defaults={name: value for name, value in qwen2.DEFAULTS.items() if name not in ("max_window_layers", "layer_types")}
    | qwen2_moe.EXPERTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_key_value_heads": 4,
        "attention_bias": False,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    spec=spec,
    ignored=frozenset({"max_window_layers", "layer_types"}),
)
