"""Configs of small checkpoints of families whose tensors transformers names for the recorder: see `variants.py`.

Their numbers are unusual but legal: heads that are not the width divided by their number, groups of three, layers of
every kind that the family has.
"""

from typing import Any

VOCAB = 512


def small(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    """A small config; a field of None is absent."""
    shape = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **fields,
    }
    return {name: value for name, value in shape.items() if value is not None}


_QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_EVEN = {"num_experts": 6}
"""So that two groups of devices can share them."""
_QWEN2_MOE = small(
    "Qwen2MoeForCausalLM", "qwen2_moe", **_QWEN_EXPERTS, shared_expert_intermediate_size=48, num_hidden_layers=3
)
_QWEN3_MOE = small("Qwen3MoeForCausalLM", "qwen3_moe", **_QWEN_EXPERTS, norm_topk_prob=True)

_GROWTH = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 32}
_GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    **_GROWTH,
}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 0.9,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
}

_LATENT = {
    "num_key_value_heads": 6,
    "head_dim": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 1.5,
}
_OSS_EXPERTS = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}
_TOWER = {
    "model_type": "pixtral",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}


def around(architecture: str, model_type: str, text: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A model around a text model; its small tower is there, and is not read."""
    half = {name: value for name, value in text.items() if name not in ("architectures", "tie_word_embeddings")}
    return {"architectures": [architecture], "model_type": model_type, "text_config": half, **fields}


_MISTRAL3 = {"vision_config": _TOWER, "image_token_index": 10, "spatial_merge_size": 2, "vision_feature_layer": -1}
_GLM4_MOE = {"moe_intermediate_size": 32, "first_k_dense_replace": 1, "pad_token_id": 0}
_ERNIE_MOE = {"moe_intermediate_size": 32, "head_dim": None, "hidden_size": 96, "rope_theta": 500.0}

_COHERE = {
    "hidden_size": 96,
    "head_dim": None,
    "rms_norm_eps": None,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "sliding_window_pattern": 3,
    "logit_scale": 0.95,
}

_SIGHT = {
    "model_type": "qwen3_5_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_HYBRID = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-2,  # outputs of heads are normed, and rounding changes the direction of small ones
    "rope_theta": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_HYBRID_EXPERTS = {**_QWEN_EXPERTS, "shared_expert_intermediate_size": 48, "intermediate_size": None}
_QWEN3_NEXT = {
    **_HYBRID,
    **_HYBRID_EXPERTS,
    "intermediate_size": 96,
    "rope_theta": 1e4,
    "rope_parameters": None,
    "partial_rotary_factor": 0.5,
}

OTHERS: dict[str, dict[str, Any]] = {
    "qwen3_5": small("Qwen3_5ForCausalLM", "qwen3_5_text", **_HYBRID),
    "qwen3_5_around": around(
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        small(
            "Qwen3_5ForCausalLM",
            "qwen3_5_text",
            **{**_HYBRID, "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_value_head_dim": 16},
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        ),
        vision_config=_SIGHT,
        tie_word_embeddings=True,
    ),
    "qwen3_5_moe": small("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **{**_HYBRID, **_HYBRID_EXPERTS, **_EVEN}),
    "qwen3_5_moe_around": around(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        small(
            "Qwen3_5MoeForCausalLM",
            "qwen3_5_moe_text",
            # Every token uses all experts, so that weights in few bits choose no other: a state would remember it.
            **{**_HYBRID, "num_hidden_layers": 3, **_HYBRID_EXPERTS, "num_experts": 4, "num_experts_per_tok": 4},
            full_attention_interval=2,
        ),
        vision_config=_SIGHT | {"model_type": "qwen3_5_moe_vision"},
        tie_word_embeddings=False,
    ),
    "qwen3_next": small("Qwen3NextForCausalLM", "qwen3_next", **{**_QWEN3_NEXT, **_EVEN}),
    "qwen3_next_mixed": small(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        **{**_QWEN3_NEXT, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3},
        mlp_only_layers=[1],
        norm_topk_prob=False,
    ),
    "qwen2_moe": {**_QWEN2_MOE, "mlp_only_layers": [1], **_EVEN},
    "qwen2_moe_window": {
        **_QWEN2_MOE,
        "head_dim": 32,
        "num_key_value_heads": 3,
        "norm_topk_prob": True,
        "qkv_bias": False,
        "use_sliding_window": True,
        "sliding_window": 24,
        "max_window_layers": 3,
        "tie_word_embeddings": True,
    },
    "qwen3_moe": {**_QWEN3_MOE, **_EVEN},
    "qwen3_moe_mixed": {
        **_QWEN3_MOE,
        "norm_topk_prob": False,
        "num_hidden_layers": 3,
        "decoder_sparse_step": 2,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 40,
        "tie_word_embeddings": True,
    },
    "seed_oss": small("SeedOssForCausalLM", "seed_oss", num_key_value_heads=3, attention_out_bias=True, mlp_bias=True),
    "seed_oss_silent": small("SeedOssForCausalLM", "seed_oss", head_dim=32, num_attention_heads=4),
    "ministral": small(
        "MinistralForCausalLM",
        "ministral",
        sliding_window=24,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "ministral_all": small("MinistralForCausalLM", "ministral", sliding_window=40, head_dim=32),
    "ministral3": small("Ministral3ForCausalLM", "ministral3", rope_theta=None, rope_parameters=_GROWING),
    "ministral3_window": small(
        "Ministral3ForCausalLM",
        "ministral3",
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, **_GROWTH},
        sliding_window=40,
        num_key_value_heads=3,
        head_dim=32,
    ),
    "deepseek_v3": small(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_LATENT | {"qk_nope_head_dim": 12},
        q_lora_rank=24,
        num_hidden_layers=3,
        n_group=3,
        topk_group=2,
        rope_scaling={
            "type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.5,
        },
    ),
    "deepseek_v3_direct": small(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        **_LATENT | {"v_head_dim": 16, "kv_lora_rank": 48},
        n_group=1,
        topk_group=1,
        rope_interleave=False,
        attention_bias=True,
        norm_topk_prob=False,
    )
    | {"q_lora_rank": None},
    "gpt_oss": small(
        "GptOssForCausalLM",
        "gpt_oss",
        num_hidden_layers=3,
        num_attention_heads=12,
        num_key_value_heads=4,
        sliding_window=24,
        rope_theta=1000.0,
        rope_scaling={"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False},
        **_OSS_EXPERTS,
    ),
    "gpt_oss_clamped": small(
        "GptOssForCausalLM",
        "gpt_oss",
        hidden_size=96,
        num_key_value_heads=3,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=40,
        rope_theta=None,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        attention_bias=False,
        swiglu_limit=0.75,
        swiglu_alpha=1.25,
        **_OSS_EXPERTS | {"num_local_experts": 5, "num_experts_per_tok": 3},
    ),
    "olmo2": small("Olmo2ForCausalLM", "olmo2", head_dim=None, hidden_size=96),
    "olmo2_mha": small(
        "Olmo2ForCausalLM", "olmo2", head_dim=None, hidden_size=96, num_key_value_heads=6, num_hidden_layers=3
    ),
    "smollm3": small("SmolLM3ForCausalLM", "smollm3", num_hidden_layers=4, no_rope_layer_interval=3, pad_token_id=0),
    "smollm3_window": small(
        "SmolLM3ForCausalLM",
        "smollm3",
        num_hidden_layers=3,
        no_rope_layers=[0, 1, 0],
        pad_token_id=0,
        use_sliding_window=True,
        sliding_window=24,
        # Without rope a bias of keys changes nothing, and a test wants every weight to matter.
        mlp_bias=True,
    ),
    "phi3": small(
        "Phi3ForCausalLM",
        "phi3",
        head_dim=24,
        sliding_window=24,
        pad_token_id=0,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.75},
    ),
    "phi3_longrope": small(
        "Phi3ForCausalLM",
        "phi3",
        head_dim=None,
        hidden_size=96,
        num_key_value_heads=3,
        num_hidden_layers=3,
        pad_token_id=0,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=32,
        rope_scaling={"type": "longrope", "short_factor": [1.5] * 6, "long_factor": [1.0, 1.1, 1.5, 2.5, 4.0, 6.0]},
        tie_word_embeddings=True,
    ),
    "phi3_short": small(
        "Phi3ForCausalLM",
        "phi3",
        head_dim=None,
        hidden_size=96,
        num_key_value_heads=6,
        pad_token_id=0,
        original_max_position_embeddings=512,
        rope_scaling={
            "type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0, 2.5, 3.0],
            "long_factor": [9.0] * 8,
        },
    ),
    "glm4": small("Glm4ForCausalLM", "glm4", pad_token_id=0),
    "glm4_whole": small(
        "Glm4ForCausalLM",
        "glm4",
        head_dim=20,
        num_key_value_heads=3,
        num_hidden_layers=3,
        pad_token_id=0,
        attention_bias=False,
        partial_rotary_factor=1.0,
        tie_word_embeddings=True,
    ),
    "gemma2": small(
        "Gemma2ForCausalLM",
        "gemma2",
        sliding_window=24,
        tie_word_embeddings=None,
        hidden_size=48,
        num_hidden_layers=4,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=4.0,
        query_pre_attn_scalar=1,
    ),
    "gemma2_silent": small(
        "Gemma2ForCausalLM",
        "gemma2",
        sliding_window=24,
        hidden_size=72,
        attention_bias=True,
        head_dim=32,
        num_key_value_heads=3,
        layer_types=["full_attention", "sliding_attention"],
    ),
    "gemma3": small(
        "Gemma3ForCausalLM",
        "gemma3_text",
        sliding_window=24,
        tie_word_embeddings=None,
        hidden_size=48,
        num_hidden_layers=4,
        query_pre_attn_scalar=10,
        sliding_window_pattern=3,
        rope_theta=50000.0,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "gemma3_nested": small(
        "Gemma3ForCausalLM",
        "gemma3_text",
        sliding_window=24,
        hidden_size=72,
        query_pre_attn_scalar=30,
        attention_bias=True,
        final_logit_softcapping=3.0,
        head_dim=32,
        num_key_value_heads=3,
        layer_types=["full_attention", "sliding_attention"],
        rope_theta=None,
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "rope_theta": 3000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
        },
    ),
    "gemma3_around": around(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        small(
            "Gemma3ForCausalLM",
            "gemma3_text",
            hidden_size=72,
            query_pre_attn_scalar=16,
            rope_theta=None,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 16,
            "patch_size": 4,
        },
        mm_tokens_per_image=4,
        image_token_index=500,
        boi_token_index=501,
        eoi_token_index=502,
        tie_word_embeddings=False,
    ),
    "ernie4_5": small("Ernie4_5ForCausalLM", "ernie4_5", use_bias=True, num_key_value_heads=3),
    "ernie4_5_tied": small(
        "Ernie4_5ForCausalLM", "ernie4_5", head_dim=24, rope_theta=2000.0, num_hidden_layers=3, tie_word_embeddings=None
    ),
    "cohere2": small("Cohere2ForCausalLM", "cohere2", **_COHERE),
    "cohere2_biases": small(
        "Cohere2ForCausalLM",
        "cohere2",
        **_COHERE,
        num_key_value_heads=3,
        layer_norm_eps=1e-3,
        # Without rope a bias of keys changes nothing, and a test wants every weight to matter.
        layer_types=["sliding_attention"] * 4,
        attention_bias=True,
        tie_word_embeddings=None,
    ),
    "olmo3": small(
        "Olmo3ForCausalLM",
        "olmo3",
        head_dim=None,
        hidden_size=96,
        num_hidden_layers=4,
        sliding_window=24,
        rope_theta=500000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "attention_factor": 1.2,
        },
    ),
    "olmo3_nested": small(
        "Olmo3ForCausalLM",
        "olmo3",
        head_dim=None,
        hidden_size=96,
        num_key_value_heads=6,
        sliding_window=24,
        num_hidden_layers=3,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        rope_theta=None,
        rope_parameters={"full_attention": {"rope_theta": 3000.0}, "sliding_attention": {"rope_theta": 200.0}},
    ),
    "exaone4": small(
        "Exaone4ForCausalLM",
        "exaone4",
        num_hidden_layers=3,
        sliding_window=24,
        sliding_window_pattern=2,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "exaone4_whole": {
        **small("Exaone4ForCausalLM", "exaone4", head_dim=32, num_key_value_heads=3, tie_word_embeddings=True),
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
    },
    "hunyuan": small(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        rope_theta=100.0,
        rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0},
        tie_word_embeddings=True,
    ),
    "hunyuan_biases": small(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", attention_bias=True, head_dim=32, num_key_value_heads=3
    ),
    "granite": small("GraniteForCausalLM", "granite", **_GRANITE),
    "granite_biases": small(
        "GraniteForCausalLM",
        "granite",
        **{**_GRANITE, "residual_multiplier": 1.5},
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=1,
    ),
    "mistral3": around(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        small("MistralForCausalLM", "mistral", num_key_value_heads=3, sliding_window=24),
        **_MISTRAL3,
        tie_word_embeddings=False,
    ),
    "mistral3_tied": around(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        small("Ministral3ForCausalLM", "ministral3", rope_theta=None, rope_parameters=_GROWING, head_dim=32),
        **_MISTRAL3,
    ),
    "granitemoe": small(
        "GraniteMoeForCausalLM",
        "granitemoe",
        **_GRANITE,
        intermediate_size=48,
        num_local_experts=5,
        num_experts_per_tok=3,
        attention_bias=True,
    ),
    "granitemoe_many": small(
        "GraniteMoeForCausalLM",
        "granitemoe",
        **_GRANITE,
        intermediate_size=32,
        num_local_experts=18,
        num_experts_per_tok=4,
        num_key_value_heads=3,
    ),
    "glm4_moe": small(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        **_GLM4_MOE,
        num_hidden_layers=3,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=3,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        use_qk_norm=True,
    ),
    "glm4_moe_biases": small(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        **_GLM4_MOE,
        n_routed_experts=5,
        num_experts_per_tok=2,
        num_key_value_heads=3,
        head_dim=32,
        partial_rotary_factor=0.25,
        norm_topk_prob=False,
        attention_bias=True,
    ),
    "minimax_m2": small(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        rotary_dim=8,
        intermediate_size=32,
        num_local_experts=5,
        num_experts_per_tok=3,
    ),
    "minimax_m2_many": small(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        rotary_dim=24,
        head_dim=32,
        num_key_value_heads=3,
        intermediate_size=32,
        num_local_experts=7,
        num_experts_per_tok=4,
        num_hidden_layers=3,
    ),
    "ernie4_5_moe": small(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        **_ERNIE_MOE,
        num_hidden_layers=3,
        moe_num_experts=6,
        moe_k=3,
        moe_num_shared_experts=2,
        moe_layer_end_index=1,
    ),
    "ernie4_5_moe_steps": small(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        **_ERNIE_MOE,
        num_hidden_layers=4,
        moe_num_experts=5,
        moe_k=2,
        moe_num_shared_experts=0,
        moe_layer_start_index=2,
        moe_layer_interval=2,
        moe_norm_min=0.7,
        num_key_value_heads=3,
    ),
}
