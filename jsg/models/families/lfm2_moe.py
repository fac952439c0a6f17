"""LFM2 with experts (8B-A1B), by sigmoids that a bias changes for the choice."""

from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.families import lfm2
from jsg.models.family import usual
from jsg.models.parts import first_dense, is_on, read_experts
from jsg.sources import Fields

ADDED = 1e-6
"""What is added to the sum of weights."""


def mlp(config: Fields) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer: the first have no experts."""
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
    return first_dense(config, "num_dense_layers", experts, lfm2.read_block)


FAMILY = lfm2.FAMILY.variant(
    model_type="lfm2_moe",
    defaults=usual(width=2048, inner=7168, expert_inner=1792, per_token=4)
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
