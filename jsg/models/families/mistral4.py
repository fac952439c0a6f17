"""Mistral Small 4, the text model: latent attention whose queries grow, and experts by a softmax."""

from functools import partial

from jsg.models.block_spec import stacked
from jsg.models.families import deepseek_v3, glm4_moe
from jsg.models.families.ministral3 import OWN_ROPE_FIELDS, YARN, read_growth
from jsg.models.family import usual
from jsg.models.latent_spec import LatentSpec
from jsg.models.rope_fields import rope_section
from jsg.sources import Fields


def attention(config: Fields) -> LatentSpec:
    """Attention of which the file must say nothing but that the parts with rope have it in whole."""
    name, scaling = "partial_rotary_factor", rope_section(config)
    plain, turned = (config.integer(width) for width in ("qk_nope_head_dim", "qk_rope_head_dim"))
    share = scaling.number(name, default=turned / (plain + turned), high=1.0)
    scaling.require(int((plain + turned) * share) == turned, name, f"give the {turned} of qk_rope_head_dim", share)
    rope = {field: scaling.get(field) for field in scaling.names() - {name}}
    whole = config.under({"rope_parameters": rope, "rope_scaling": None, name: None})
    return deepseek_v3.attention(whole, OWN_ROPE_FIELDS, read_growth(config))


FAMILY = deepseek_v3.FAMILY.variant(
    model_type="mistral4",
    only={},
    defaults=usual(
        vocab=131072, width=4096, inner=12288, layers=36, heads=32, kv_heads=32, context=1048576, per_token=4
    )
    | usual(bos=1, eos=2)
    | {
        "q_lora_rank": 1024,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "n_routed_experts": 128,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "rope_parameters": YARN | {"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192},
    },
    without="num_nextn_predict_layers",
    ignored="head_dim qk_head_dim",
    aliases={"num_local_experts": "n_routed_experts"},
    attention=attention,
    mlp=partial(glm4_moe.mlp, choice={"masked_score": 0.0}, **stacked("mlp.experts")),
    later_layers=None,
)
