"""Granite 3 with experts (1B-A400M, 3B-A800M), PowerMoE: Granite with experts, whose kernels stand in one tensor."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import StackSpec
from jsg.models.families import granite
from jsg.models.family import Family
from jsg.models.parts import read_experts
from jsg.models.spec import ModelSpec


def spec(config: Fields) -> ModelSpec:
    """The softmax of the chosen logits is that of all, divided by the sum of those that are chosen."""
    experts = read_experts(config, "num_local_experts", "intermediate_size")
    experts = dataclasses.replace(
        experts,
        router=dataclasses.replace(experts.router, name="block_sparse_moe.router.layer"),
        stack=StackSpec(),
        gate="block_sparse_moe.input_linear",
        up="block_sparse_moe.input_linear",
        down="block_sparse_moe.output_linear",
    )
    return granite.model_of(config, experts)


FAMILY = Family(
    architecture="GraniteMoeForCausalLM",
    model_type="granitemoe",
    defaults={name: value for name, value in granite.FAMILY.defaults.items() if name != "mlp_bias"}
    | {"num_local_experts": 8, "num_experts_per_tok": 2},
    spec=spec,
    aliases={"num_experts": "num_local_experts"},
)
