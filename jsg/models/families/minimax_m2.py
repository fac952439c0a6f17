"""MiniMax-M2 and M2.x: experts by sigmoids, norms over all heads together, and rope on a part of each head."""

from jsg.models.block_spec import AttentionSpec
from jsg.models.families import mixtral
from jsg.models.family import PLAIN, usual
from jsg.models.parts import MAX_HEAD_DIM, read_attention
from jsg.sources import Fields


def attention(config: Fields) -> AttentionSpec:
    """`rotary_dim` says how many numbers of a head have rope."""
    kinds = config.get("attn_type_list", [])
    is_full = isinstance(kinds, list) and kinds == [1] * len(kinds)
    config.require(is_full, "attn_type_list", "be 1 for each layer, which is full attention", kinds)
    head_dim = config.integer("head_dim", high=MAX_HEAD_DIM)
    if config.get("rotary_dim") is not None:
        share = config.integer("rotary_dim", high=head_dim) / head_dim
        config = config.over({"partial_rotary_factor": share})
    return read_attention(config, is_partial=True, qk_norm={"spans_heads": True})


FAMILY = PLAIN.variant(
    model_type="minimax_m2",
    only={
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "layernorm_full_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
    },
    defaults=usual(
        vocab=200064, width=3072, inner=1536, layers=62, heads=48, kv_heads=8, head_dim=128, context=196608, per_token=8
    )
    | usual(theta=5_000_000.0, bos=200034, eos=200020)
    | {
        "rotary_dim": None,
        "num_local_experts": 256,
        "attn_type_list": None,
        "num_mtp_modules": 0,
    },
    ignored="layernorm_linear_attention_beta mlp_intermediate_size mtp_transformer_layers shared_moe_mode use_mtp",
    aliases={"num_experts": "num_local_experts"},
    attention=attention,
    mlp={
        "count_field": "num_local_experts",
        "inner_field": "intermediate_size",
        "choice": {"score": "sigmoid"},
        "router": {
            "name": "block_sparse_moe.gate",
            "choice_bias": "block_sparse_moe.e_score_correction_bias",
            "rounds_weights": False,
        },
        **mixtral.TENSORS,
    },
    later_layers="num_mtp_modules",
)
