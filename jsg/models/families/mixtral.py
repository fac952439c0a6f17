"""Mixtral: Mistral with a feed-forward block of several experts."""

from jsg.models.families import mistral
from jsg.models.family import usual

TENSORS = {
    "gate": "block_sparse_moe.experts.{expert}.w1",
    "up": "block_sparse_moe.experts.{expert}.w3",
    "down": "block_sparse_moe.experts.{expert}.w2",
}

FAMILY = mistral.FAMILY.variant(
    model_type="mixtral",
    defaults=usual(window=None, per_token=2)
    | usual(eps=1e-5, theta=1_000_000.0)
    | {
        "num_local_experts": 8,
    },
    aliases={"num_experts": "num_local_experts"},
    mlp={
        "count_field": "num_local_experts",
        "inner_field": "intermediate_size",
        "router": {"name": "block_sparse_moe.gate"},
        **TENSORS,
    },
)
