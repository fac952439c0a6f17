"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 with experts, and a block that all tokens use beside them."""

from functools import partial
from typing import Any

from jsg.models import parts
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.families import qwen2
from jsg.models.family import usual
from jsg.sources import Fields

EXPERTS = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
"""The fields of experts in the files of Qwen."""


def mlp(config: Fields) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer, with what all tokens use."""
    return blocks(config, **shared(config))


def shared(config: Fields) -> dict[str, Any]:
    """What all tokens use, times a sigmoid."""
    inner = config.integer("shared_expert_intermediate_size")
    return {"shared": parts.block_of("mlp.shared_expert", inner), "shared_gate": "mlp.shared_expert_gate"}


def blocks(config: Fields, **beside: Any) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer. The file says which have experts; the others are of another width."""
    count, dense = parts.num_layers(config), parts.read_feed_forward(config)
    choice = {"is_renormed": parts.is_on(config, "norm_topk_prob")}
    experts = parts.read_experts(config, "num_experts", "moe_intermediate_size", choice=choice, **beside)
    step, whole = config.integer("decoder_sparse_step", high=parts.MAX_LAYERS), config.get("mlp_only_layers", [])
    ok = isinstance(whole, list) and all(type(layer) is int and 0 <= layer < count for layer in whole)
    config.require(ok, "mlp_only_layers", f"be numbers of layers from 0 to {count - 1}", whole)
    return [dense if layer in whole or (layer + 1) % step else experts for layer in range(count)]


def slides(config: Fields, layer: int) -> bool:
    """Every other one of the first layers has a window."""
    return layer % 2 == 0 and layer < config.integer("max_window_layers", low=0)


FAMILY = qwen2.FAMILY.variant(
    model_type="qwen2_moe",
    defaults=EXPERTS
    | usual(width=2048, inner=5632, layers=24, heads=16, kv_heads=16)
    | {
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    attention={"qkv_bias": "qkv_bias"},
    kinds=partial(parts.read_switched_kinds, slides=slides),
    mlp=mlp,
)
