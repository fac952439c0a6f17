"""GLM-4.5, 4.6 and 4.7: experts by sigmoids that a bias changes for the choice, and half of each head with rope."""

import dataclasses

from jsg.fields import Fields
from jsg.kernels_pallas.choice_spec import ChoiceSpec
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec, QueryKeyNormSpec, SharedExpertSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import (
    MAX_EXPERTS,
    MAX_LAYERS,
    later_layers,
    num_layers,
    read_attention,
    read_eps,
    read_experts,
    read_feed_forward,
    read_layer,
    read_model,
    with_unread,
)
from jsg.models.spec import ModelSpec

LEAST_SUM = 1e-20
"""What transformers adds to the sum of weights."""


def spec(config: Fields) -> ModelSpec:
    """`attention_bias` means queries, keys and values. The layers that predict later tokens are not read."""
    attention = dataclasses.replace(
        read_attention(config, is_partial=True),
        qkv_bias=config.flag("attention_bias", default=False),
        qk_norm=QueryKeyNormSpec(eps=read_eps(config)) if config.flag("use_qk_norm", default=False) else None,
    )
    model = read_model(config, [read_layer(config, attention, mlp) for mlp in blocks(config)])
    return with_unread(model, later_layers(config, "num_nextn_predict_layers"))


def blocks(config: Fields) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer. The first ones have no experts."""
    experts = read_experts(config, "n_routed_experts", "moe_intermediate_size")
    router = dataclasses.replace(
        experts.router,
        choice=read_choice(config, experts),
        choice_bias="mlp.gate.e_score_correction_bias",
        rounds_weights=False,
    )
    num_shared = config.integer("n_shared_experts", low=0, high=MAX_EXPERTS)
    shared = shared_experts(num_shared * experts.inner) if num_shared else None
    experts = dataclasses.replace(experts, router=router, shared=shared)
    dense = config.integer("first_k_dense_replace", low=0, high=MAX_LAYERS)
    return [read_feed_forward(config) if layer < dense else experts for layer in range(num_layers(config))]


def read_choice(config: Fields, experts: ExpertsSpec) -> ChoiceSpec:
    """The choice by sigmoids, from the best groups."""
    groups = config.integer("n_group", high=MAX_EXPERTS)
    kept = config.integer("topk_group", high=groups)
    length, per_token = experts.count // groups, experts.router.choice.per_token
    is_even = experts.count % groups == 0 and (length >= 2 or kept == groups)
    config.require(is_even, "n_group", f"divide {experts.count} experts into groups of at least two", groups)
    config.require(kept * length >= per_token, "topk_group", f"be groups of at least {per_token} experts", kept)
    return ChoiceSpec(
        per_token=per_token,
        score="sigmoid",
        groups=groups,
        kept_groups=kept,
        is_renormed=config.flag("norm_topk_prob", default=True),
        least_sum=LEAST_SUM,
        factor=config.number("routed_scaling_factor"),
    )


def shared_experts(inner: int) -> SharedExpertSpec:
    """The block that every token uses, of the width of several experts."""
    name = "mlp.shared_experts"
    block = FeedForwardSpec(inner=inner, gate=f"{name}.gate_proj", up=f"{name}.up_proj", down=f"{name}.down_proj")
    return SharedExpertSpec(block=block)


FAMILY = Family(
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    defaults=llama.DEFAULTS
    | {
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,  # as in all files; without it transformers would turn an odd number of 42
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "bos_token_id": None,
        "eos_token_id": None,
        "attention_bias": False,
        "use_qk_norm": False,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    },
    spec=spec,
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
)
