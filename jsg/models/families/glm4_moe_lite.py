"""GLM-4.7-Flash: the layers of DeepSeek V3, of which a list may say which ones have no experts."""

from functools import partial

from jsg.models.families import deepseek_v3, glm4_moe
from jsg.models.family import usual

MLP = {**glm4_moe.SIGMOIDS, "kinds_field": "mlp_layer_types"}

FAMILY = deepseek_v3.FAMILY.variant(
    model_type="glm4_moe_lite",
    only={**deepseek_v3.FAMILY.only, "first_k_dense_replace": 1},
    defaults=usual(
        vocab=154880, width=2048, inner=10240, layers=47, heads=20, kv_heads=20, context=202752, expert_inner=1536
    )
    | {
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "num_nextn_predict_layers": 0,
        "mlp_layer_types": None,
        "first_k_dense_replace": 1,
        "num_experts_per_tok": 4,
    },
    ignored="qk_head_dim ep_size",
    aliases={**deepseek_v3.FAMILY.aliases, "head_dim": "qk_rope_head_dim"},
    mlp=partial(glm4_moe.mlp, **MLP),
)
