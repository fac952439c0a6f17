"""Granite 3 with experts (1B-A400M, 3B-A800M), PowerMoE: Granite with experts, whose kernels are in one tensor.

The softmax of the chosen logits is that of all, divided by the sum of those that are chosen.
"""

from typing import Any

from jsg.models.block_spec import StackSpec
from jsg.models.families import granite

EXPERTS: dict[str, Any] = {
    "count_field": "num_local_experts",
    "inner_field": "intermediate_size",
    "router": {"name": "block_sparse_moe.router.layer"},
    "stack": StackSpec(),
    "gate": "block_sparse_moe.input_linear",
    "up": "block_sparse_moe.input_linear",
    "down": "block_sparse_moe.output_linear",
}

FAMILY = granite.FAMILY.variant(
    model_type="granitemoe",
    defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    mlp=EXPERTS,
)
