"""DeepSeek V2 Lite and Coder V2 Lite: latent attention, and experts by a softmax whose weights are left as they are."""

from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.families import deepseek_v3, glm4_moe
from jsg.models.family import usual
from jsg.models.latent_spec import LatentSpec
from jsg.sources import Fields


def attention(config: Fields) -> LatentSpec:
    """Attention whose rope always turns neighbours together."""
    return deepseek_v3.attention(config.under({"rope_interleave": True}))


def mlp(config: Fields) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer. A greedy choice is from all experts, whatever groups the file has."""
    all_in_one = config.under({"n_group": 1, "topk_group": 1})
    return glm4_moe.mlp(all_in_one, choice={"is_renormed": False}, router={"rounds_weights": False})


FAMILY = deepseek_v3.FAMILY.variant(
    model_type="deepseek_v2",
    only={"scoring_func": "softmax", "topk_method": "greedy", "moe_layer_freq": 1}
    | {"norm_topk_prob": False, "rope_interleave": True, "mlp_bias": False},
    defaults=usual(
        vocab=102400, width=4096, inner=11008, layers=32, heads=32, kv_heads=None, context=2048, expert_inner=1407
    )
    | usual(bos=1, eos=2)
    | {
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,  # as in all files; transformers has no default
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
    },
    without="n_group topk_group norm_topk_prob rope_interleave num_nextn_predict_layers",
    ignored=f"{deepseek_v3.FAMILY.ignored} n_group topk_group",
    aliases={"num_experts": "n_routed_experts"},
    attention=attention,
    mlp=mlp,
    later_layers=None,
)
