"""MiniMax-M2 and M2.x: experts by sigmoids, norms over all heads together, and rope on a part of each head."""

import dataclasses

from jsg.fields import Fields
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.models.block_spec import QueryKeyNormSpec
from jsg.models.families import llama, mixtral
from jsg.models.family import Family
from jsg.models.parts import (
    MAX_HEAD_DIM,
    later_layers,
    num_layers,
    read_attention,
    read_eps,
    read_experts,
    read_layer,
    read_model,
    require_values,
    with_unread,
)
from jsg.models.spec import ModelSpec

ALWAYS = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "layernorm_full_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
}
"""Fields of published files that name a switch, and its only value that transformers computes."""


def spec(config: Fields) -> ModelSpec:
    """`rotary_dim` says how many numbers of a head have rope."""
    require_values(config, ALWAYS)
    kinds = config.get("attn_type_list", [])
    config.require(kinds == [1] * len(kinds), "attn_type_list", "be 1 for each layer, which is full attention", kinds)
    head_dim = config.integer("head_dim", high=MAX_HEAD_DIM)
    if config.get("rotary_dim") is not None:
        share = config.integer("rotary_dim", high=head_dim) / head_dim
        config = config.over({"partial_rotary_factor": share})
    attention = dataclasses.replace(
        read_attention(config, is_partial=True), qk_norm=QueryKeyNormSpec(eps=read_eps(config), spans_heads=True)
    )
    experts = mixtral.named(read_experts(config, "num_local_experts", "intermediate_size"))
    router = dataclasses.replace(
        experts.router,
        choice=ChoiceSpec(per_token=experts.router.choice.per_token, score="sigmoid"),
        choice_bias="block_sparse_moe.e_score_correction_bias",
        rounds_weights=False,
    )
    layer = read_layer(config, attention, dataclasses.replace(experts, router=router))
    model = read_model(config, [layer] * num_layers(config))
    return with_unread(model, later_layers(config, "num_mtp_modules"))


FAMILY = Family(
    architecture="MiniMaxM2ForCausalLM",
    model_type="minimax_m2",
    defaults=llama.DEFAULTS
    | dict.fromkeys(ALWAYS)
    | {
        "vocab_size": 200064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rotary_dim": None,
        "max_position_embeddings": 196608,
        "rope_theta": 5_000_000.0,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "attn_type_list": None,
        "num_mtp_modules": 0,
    },
    spec=spec,
    ignored=frozenset(
        "layernorm_linear_attention_beta mlp_intermediate_size mtp_transformer_layers shared_moe_mode use_mtp".split()
    ),
    aliases={"num_experts": "num_local_experts"},
)
