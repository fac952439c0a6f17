"""DeepSeek V3 and R1, and Kimi K2: latent attention, and the experts of GLM-4.5."""

import dataclasses
import math
from collections.abc import Set as AbstractSet

from jsg.models.block_spec import NormSpec, QueryScaleSpec
from jsg.models.families import glm4_moe
from jsg.models.family import PLAIN, usual
from jsg.models.latent_spec import LatentSpec
from jsg.models.parts import MAX_HEAD_DIM, MAX_HEADS, is_on
from jsg.models.rope_fields import read_rope, rope_section
from jsg.sources import Fields

LATENT_EPS = 1e-6
"""What the norms of ranks add to the mean square, whatever the file says of other norms."""


def attention(
    config: Fields,
    own_rope_fields: AbstractSet[str] = frozenset(),
    query_scale: QueryScaleSpec | None = None,
    *,
    has_rope: bool = True,
) -> LatentSpec:
    """`attention_bias` means the projections of the residual stream to ranks, and the one after attention."""
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", default=heads, high=MAX_HEADS)
    config.require(kv_heads == heads, "num_key_value_heads", f"be {heads}, the number of heads", kv_heads)
    rope = read_rope(config, own_rope_fields) if has_rope else None
    rope = rope and dataclasses.replace(rope, is_interleaved=is_on(config, "rope_interleave"))
    plain, turned, value = (
        config.integer(name, high=MAX_HEAD_DIM) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    config.require(turned % 2 == 0 or not has_rope, "qk_rope_head_dim", "be even, for rope turns pairs", turned)
    return LatentSpec(
        heads=heads,
        query_rank=config.integer("q_lora_rank") if config.get("q_lora_rank") is not None else None,
        rank=config.integer("kv_lora_rank"),
        plain_dim=plain,
        rope_dim=turned,
        value_dim=value,
        scale=(plain + turned) ** -0.5 * (_growth(config, rope.type) if rope else 1.0) ** 2,
        rope=rope,
        query_scale=query_scale,
        has_bias=config.flag("attention_bias", default=False),
        query_norm=NormSpec(name="self_attn.q_a_layernorm", eps=LATENT_EPS),
        norm=NormSpec(name="self_attn.kv_a_layernorm", eps=LATENT_EPS),
    )


def _growth(config: Fields, rope_type: str) -> float:
    """By how much scaled rope makes queries, and keys, larger."""
    scaling = rope_section(config)
    if rope_type == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    return 0.1 * scaling.number("mscale_all_dim") * math.log(scaling.number("factor")) + 1.0


FAMILY = glm4_moe.FAMILY.variant(
    model_type="deepseek_v3",
    other_types=("kimi_k2",),
    only={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
    defaults=usual(
        vocab=129280, width=7168, inner=18432, layers=61, heads=128, kv_heads=128, context=4096, expert_inner=2048
    )
    | usual(eps=1e-6, bos=0, eos=1)
    | {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_interleave": True,
        "n_routed_experts": 256,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
    },
    without="head_dim partial_rotary_factor use_qk_norm",
    ignored="head_dim qk_head_dim ep_size",
    attention=attention,
    model=PLAIN.model,
)
