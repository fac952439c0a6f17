"""Qwen3.5 and 3.6 with experts (35B-A3B, 122B-A10B, 397B-A17B)."""

import dataclasses

from jsg.fields import Fields
from jsg.models.families import qwen2_moe, qwen3_5, qwen3_next
from jsg.models.family import Family
from jsg.models.parts import num_layers, read_experts
from jsg.models.spec import ModelSpec


def spec(config: Fields) -> ModelSpec:
    """All layers have experts, and the block that all tokens use beside them."""
    experts = read_experts(config, "num_experts", "moe_intermediate_size")
    experts = dataclasses.replace(experts, shared=qwen2_moe.shared(config))
    return qwen3_next.read_hybrid(config, qwen3_5.read_delta(config), [experts] * num_layers(config))


FAMILY = Family(
    architecture="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    defaults={name: value for name, value in qwen3_5.DEFAULTS.items() if name != "intermediate_size"}
    | qwen3_next.EXPERTS
    | {"num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8},
    spec=spec,
    ignored=qwen3_next.LATER | {"intermediate_size", "decoder_sparse_step", "mlp_only_layers", "norm_topk_prob"},
)

WRAPPER = dataclasses.replace(qwen3_5.WRAPPER, text_type="qwen3_5_moe_text")
