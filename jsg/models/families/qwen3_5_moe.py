"""Qwen3.5 and 3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B)."""

import dataclasses

from jsg.models.block_spec import ExpertsSpec
from jsg.models.families import qwen2_moe, qwen3_5
from jsg.models.family import usual
from jsg.models.parts import read_experts
from jsg.sources import Fields


def mlp(config: Fields) -> ExpertsSpec:
    """All layers have experts, and the block that all tokens use beside them."""
    return read_experts(config, "num_experts", "moe_intermediate_size", **qwen2_moe.shared(config))


FAMILY = qwen3_5.FAMILY.variant(
    model_type="qwen3_5_moe_text",
    defaults=usual(width=2048, layers=40, kv_heads=2, expert_inner=512, per_token=8)
    | {
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
    },
    without="intermediate_size",
    ignored=f"{qwen3_5.FAMILY.ignored} intermediate_size decoder_sparse_step mlp_only_layers norm_topk_prob",
    mlp=mlp,
)

WRAPPER = dataclasses.replace(qwen3_5.WRAPPER, text_type="qwen3_5_moe_text")
