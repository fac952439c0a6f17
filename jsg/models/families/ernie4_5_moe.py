"""ERNIE 4.5 with experts (21B-A3B, 300B-A47B), whose router is float32; rope turns neighbours together."""

from jsg.models import parts
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.family import PLAIN, usual
from jsg.sources import Fields


def mlp(config: Fields) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer: experts in each so-many-th layer of a range, else one block."""
    experts = parts.read_experts(
        config,
        "moe_num_experts",
        "moe_intermediate_size",
        "moe_k",
        choice={"least_sum": config.number("moe_norm_min")},
        router={
            "choice_bias": "mlp.moe_statics.e_score_correction_bias",
            "choice_bias_axes": 2,
            "is_float32": True,
        },
        shared=parts.read_shared_experts(config, "moe_num_shared_experts"),
    )
    count, step = parts.num_layers(config), config.integer("moe_layer_interval", high=parts.MAX_LAYERS)
    first = config.integer("moe_layer_start_index", low=0, high=parts.MAX_LAYERS)
    last = config.integer("moe_layer_end_index", low=-1, high=parts.MAX_LAYERS)
    sparse = {layer for layer in range(first, count if last == -1 else last + 1) if (layer + 1) % step == 0}
    return [experts if layer in sparse else parts.read_feed_forward(config) for layer in range(count)]


FAMILY = PLAIN.variant(
    model_type="ernie4_5_moe",
    only={"compression_ratio": 1.0, "use_bias": False},  # with biases the head has one, too
    defaults=usual(
        vocab=103424, width=2560, inner=12288, layers=28, heads=20, kv_heads=4, context=131072, expert_inner=1536
    )
    | usual(eps=1e-5, theta=500_000.0, tied=True)
    | {
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "moe_norm_min": 1e-12,
    },
    ignored="moe_capacity moe_gate num_nextn_predict_layers",
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    attention={"is_interleaved": True},
    mlp=mlp,
    unread=r"(model\.)?mtp_.*",  # blocks that predict later tokens
)
