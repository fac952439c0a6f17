"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): Qwen3 with experts."""

from jsg.models.families import qwen2, qwen2_moe, qwen3
from jsg.models.family import usual
from jsg.models.parts import FULL, SLIDING, is_on, num_layers
from jsg.sources import Fields


def kinds(config: Fields) -> list[str]:
    """A window is for all layers, if its switch is on."""
    has_window = config.get("sliding_window") is not None and is_on(config, "use_sliding_window")
    return [SLIDING if has_window else FULL] * num_layers(config)


FAMILY = qwen2.FAMILY.variant(
    model_type="qwen3_moe",
    defaults=qwen2_moe.EXPERTS
    | usual(width=2048, inner=6144, layers=24, kv_heads=4, expert_inner=768, per_token=8)
    | {
        "num_experts": 128,
    },
    without="max_window_layers layer_types",
    ignored="max_window_layers layer_types",
    aliases={"num_local_experts": "num_experts"},
    attention=qwen3.NORMED,
    kinds=kinds,
    mlp=qwen2_moe.blocks,
)
