"""GLM-4.5, 4.6 and 4.7: experts by sigmoids that a bias changes for the choice, and half of each head with rope."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from jsg.models import parts
from jsg.models.block_spec import AttentionSpec, ExpertsSpec
from jsg.models.family import PLAIN, usual
from jsg.models.spec import DraftSpec, ModelSpec
from jsg.sources import Fields

LEAST_SUM = 1e-20
"""What transformers adds to the sum of weights."""


def attention(config: Fields) -> AttentionSpec:
    """Attention that may have norms."""
    norms = {} if parts.is_on(config, "use_qk_norm") else None
    return parts.read_attention(config, qkv_bias="attention_bias", qk_norm=norms, is_partial=True)


SIGMOIDS: dict[str, Any] = {
    "choice": {"score": "sigmoid"},
    "router": {"choice_bias": "mlp.gate.e_score_correction_bias", "rounds_weights": False},
}


def read_grouped(
    config: Fields,
    *,
    choice: Mapping[str, Any],
    count_field: str = "n_routed_experts",
    **own: Any,
) -> ExpertsSpec:
    """Experts of which a token chooses from the best groups.

    Args:
        config: The fields.
        choice: Fields of `ChoiceSpec` that no field of the file gives.
        count_field: The field with the number of experts.
        **own: What else `read_experts` is given.
    """
    count = config.integer(count_field, high=parts.MAX_EXPERTS)
    groups = config.integer("n_group", high=parts.MAX_EXPERTS)
    kept = config.integer("topk_group", high=groups)
    length = count // groups
    is_even = count % groups == 0 and (length >= 2 or kept == groups)
    config.require(is_even, "n_group", f"divide {count} experts into groups of at least two", groups)
    experts = parts.read_experts(
        config,
        count_field,
        "moe_intermediate_size",
        choice={
            "groups": groups,
            "kept_groups": kept,
            "is_renormed": parts.is_on(config, "norm_topk_prob"),
            "least_sum": LEAST_SUM,
            "factor": config.number("routed_scaling_factor"),
            **choice,
        },
        **{"shared": parts.read_shared_experts(config, "n_shared_experts"), **own},
    )
    per_token = experts.router.choice.per_token
    config.require(kept * length >= per_token, "topk_group", f"be groups of at least {per_token} experts", kept)
    return experts


def mlp(config: Fields, kinds_field: str | None = None, **of_experts: Any) -> list[parts.MLP]:
    """The feed-forward block of each layer."""
    experts = read_grouped(config, **of_experts)
    return parts.first_dense(config, "first_k_dense_replace", experts, kinds_field=kinds_field)


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """A layer behind the last drafts. Its embedding and head are those of the model once more, so they are not read."""
    if config.integer("num_nextn_predict_layers", low=0, high=parts.MAX_LAYERS) != 1:
        return plain
    embedding, hidden, final = (parts.read_norm(config, name) for name in ("enorm", "hnorm", "shared_head.norm"))
    draft = DraftSpec(
        prefix=f"model.layers.{plain.num_layers}",
        layer=plain.layers[-1],
        joined="eh_proj",
        embedding_norm=embedding,
        hidden_norm=hidden,
        final_norm=final,
    )
    return dataclasses.replace(plain, draft=draft)


FAMILY = PLAIN.variant(
    model_type="glm4_moe",
    defaults=usual(
        vocab=151552, inner=10944, layers=46, heads=96, kv_heads=8, context=131072, expert_inner=1408, per_token=8
    )
    | usual(eps=1e-5, bos=None, eos=None)
    | {
        "head_dim": 128,  # as in all files; without it transformers would turn an odd number of 42
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    },
    aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
    attention=attention,
    mlp=partial(mlp, **SIGMOIDS),
    model=model,
    later_layers="num_nextn_predict_layers",
)
