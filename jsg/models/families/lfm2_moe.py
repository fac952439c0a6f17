"""LFM2 with experts (8B-A1B), by sigmoids that a bias changes for the choice."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.families import lfm2
from jsg.models.family import sizes
from jsg.models.parts import MAX_LAYERS, is_on, num_layers, read_experts, read_feed_forward

ADDED = 1e-6
"""What is added to the sum of weights."""


def mlp(config: Fields) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer: the first have no experts."""
    dense = dataclasses.replace(read_feed_forward(config), **lfm2.FEED_FORWARD)
    bias = "feed_forward.expert_bias" if is_on(config, "use_expert_bias") else None
    experts = read_experts(
        config,
        "num_experts",
        "moe_intermediate_size",
        choice={
            "score": "sigmoid",
            "is_renormed": is_on(config, "norm_topk_prob"),
            "added_sum": ADDED,
            "factor": config.number("routed_scaling_factor"),
        },
        router={"name": "feed_forward.gate", "choice_bias": bias},
        **{name: tensor.replace(".", ".experts.{expert}.") for name, tensor in lfm2.FEED_FORWARD.items()},
    )
    first = config.integer("num_dense_layers", low=0, high=MAX_LAYERS)
    return [dense if layer < first else experts for layer in range(num_layers(config))]


FAMILY = lfm2.FAMILY.variant(
    model_type="lfm2_moe",
    defaults=sizes(width=2048, inner=7168, expert_inner=1792, per_token=4)
    | {
        "num_dense_layers": 2,
        "num_experts": 32,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    without="block_ff_dim block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of",
    mlp=mlp,
)
