"""Fields of published `config.json` files, by family: they are read, and the model has the parameters of its card."""

import functools
from typing import Any

import pytest

from jsg.errors import ModelError
from jsg.models.block_spec import ExpertsSpec
from jsg.window import Window
from tests.models.sizes import num_parameters
from tests.models.test_config import read


def file(architecture: str, model_type: str, shape: tuple[int, ...], **fields: Any) -> dict[str, Any]:
    """A file with these fields. `shape` has the width, the inner width, layers, heads, KV heads and the vocabulary."""
    names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads vocab_size"
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **dict(zip(names.split(), shape, strict=True)),
        **fields,
    }


_qwen3_moe = functools.partial(
    file,
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    attention_bias=False,
    decoder_sparse_step=1,
    head_dim=128,
    mlp_only_layers=[],
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    output_router_logits=False,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    tie_word_embeddings=False,
    use_sliding_window=False,
)
_LONG_FACTORS = [
    *(1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898),
    *(2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424),
    *(6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252),
    *(16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6),
    *(32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
]
"""Of Phi-4-mini. Those of Phi-3 and 3.5 are other numbers, as many, which are not known here."""
_phi3 = functools.partial(
    file,
    "Phi3ForCausalLM",
    "phi3",
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=1,
    embd_pdrop=0.0,
    eos_token_id=32000,
    original_max_position_embeddings=4096,
    pad_token_id=32000,
    resid_pdrop=0.0,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
_PHI_LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": _LONG_FACTORS}
# From memory; the number of parameters on the card of 9B says that it has biases.
_glm4 = functools.partial(
    file,
    "Glm4ForCausalLM",
    "glm4",
    attention_bias=False,
    attention_dropout=0.0,
    eos_token_id=[151329, 151336, 151338],
    head_dim=128,
    max_position_embeddings=32768,
    pad_token_id=151329,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-5,
    rope_theta=10000.0,
    tie_word_embeddings=False,
)
_olmo3 = functools.partial(
    file,
    "Olmo3ForCausalLM",
    "olmo3",
    attention_bias=False,
    max_position_embeddings=65536,
    rms_norm_eps=1e-6,
    rope_scaling={
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    rope_theta=500000,
    sliding_window=4096,
    tie_word_embeddings=False,
)
_exaone4 = functools.partial(
    file,
    "Exaone4ForCausalLM",
    "exaone4",
    attention_dropout=0.0,
    bos_token_id=1,
    eos_token_id=361,
    rms_norm_eps=1e-5,
    rope_scaling={
        "factor": 16.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    rope_theta=1000000,
    tie_word_embeddings=False,
)
_hunyuan = functools.partial(
    file,
    "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_dense",
    add_classification_head=False,
    attention_bias=False,
    attention_head_dim=128,
    cla_share_factor=2,
    class_num=0,
    dense_list=[4096, 0],
    enable_lm_head_fp32=True,
    head_dim=128,
    im_end_id=5,
    im_newline_id=11,
    im_start_id=4,
    mask_init_id=12,
    max_position_embeddings=262144,
    mlp_bias=False,
    norm_type="rms",
    pool_type="last",
    pretraining_tp=1,
    rms_norm_eps=1e-5,
    rope_scaling={
        "alpha": 1000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "type": "dynamic",
    },
    rope_theta=10000.0,
    text_end_id=7,
    text_start_id=6,
    tie_word_embeddings=True,
    use_cla=False,
    use_qk_norm=True,
)
_gemma = functools.partial(
    file,
    attention_bias=False,
    attn_logit_softcapping=None,
    bos_token_id=2,
    cache_implementation="hybrid",
    eos_token_id=[1, 106],
    final_logit_softcapping=None,
    head_dim=256,
    hidden_act="gelu_pytorch_tanh",
    hidden_activation="gelu_pytorch_tanh",
    max_position_embeddings=32768,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    sliding_window=512,
)
_gemma2 = functools.partial(
    _gemma,
    "Gemma2ForCausalLM",
    "gemma2",
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    max_position_embeddings=8192,
    rope_theta=10000.0,
    sliding_window=4096,
)
_gemma3 = functools.partial(
    _gemma, "Gemma3ForCausalLM", "gemma3_text", rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000
)
_granitemoe = functools.partial(
    file,
    "GraniteMoeForCausalLM",
    "granitemoe",
    attention_bias=False,
    attention_dropout=0.1,
    attention_multiplier=0.015625,
    embedding_multiplier=12.0,
    logits_scaling=6.0,
    num_experts_per_tok=8,
    output_router_logits=False,
    residual_multiplier=0.22,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    router_aux_loss_coef=0.0,
    tie_word_embeddings=True,
)
_glm4_moe = functools.partial(
    file,
    "Glm4MoeForCausalLM",
    "glm4_moe",
    attention_bias=True,
    eos_token_id=[151329, 151336, 151338],
    head_dim=128,
    n_group=1,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_experts_per_tok=8,
    num_nextn_predict_layers=1,
    pad_token_id=151329,
    partial_rotary_factor=0.5,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=1000000,
    tie_word_embeddings=False,
    topk_group=1,
)
_glm_4_5 = functools.partial(
    _glm4_moe,
    (5120, 12288, 92, 96, 8, 151552),
    first_k_dense_replace=3,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    routed_scaling_factor=2.5,
    use_qk_norm=True,
)
_minimax_m2 = functools.partial(
    file,
    "MiniMaxM2ForCausalLM",
    "minimax_m2",
    (3072, 1536, 62, 48, 8, 200064),
    attn_type_list=[1] * 62,
    head_dim=128,
    mlp_intermediate_size=8192,
    mtp_transformer_layers=1,
    num_experts_per_tok=8,
    num_local_experts=256,
    num_mtp_modules=3,
    qk_norm_type="per_layer",
    rms_norm_eps=1e-6,
    rope_theta=5000000,
    rotary_dim=64,
    router_jitter_noise=0.0,
    scoring_func="sigmoid",
    shared_intermediate_size=0,
    tie_word_embeddings=False,
    use_mtp=True,
    use_qk_norm=True,
    use_routing_bias=True,
)
_ernie_moe = functools.partial(
    file,
    "Ernie4_5_MoeForCausalLM",
    "ernie4_5_moe",
    max_position_embeddings=131072,
    moe_capacity=[64, 64, 64],
    moe_gate="topk",
    moe_layer_interval=1,
    moe_num_experts=64,
    moe_use_aux_free=True,
    num_nextn_predict_layers=1,
    rms_norm_eps=1e-5,
    rope_theta=500000,
    use_bias=False,
)
_ernie_21b = functools.partial(
    _ernie_moe,
    (2560, 12288, 28, 20, 4, 103424),
    moe_intermediate_size=1536,
    moe_k=6,
    moe_layer_start_index=1,
    moe_num_shared_experts=2,
    tie_word_embeddings=True,
)
_gpt_oss = functools.partial(
    file,
    "GptOssForCausalLM",
    "gpt_oss",
    attention_bias=True,
    attention_dropout=0.0,
    eos_token_id=200002,
    experts_per_token=4,
    head_dim=64,
    initial_context_length=4096,
    max_position_embeddings=131072,
    num_experts_per_tok=4,
    output_router_logits=False,
    pad_token_id=199999,
    rms_norm_eps=1e-5,
    rope_scaling={
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    rope_theta=150000,
    router_aux_loss_coef=0.9,
    sliding_window=128,
    swiglu_limit=7.0,
    tie_word_embeddings=False,
)
"""Those of the published files but for `quantization_config`, which names MXFP4 and is refused."""
_deepseek_v3 = functools.partial(
    file,
    "DeepseekV3ForCausalLM",
    attention_bias=False,
    attention_dropout=0.0,
    aux_loss_alpha=0.001,
    ep_size=1,
    kv_lora_rank=512,
    moe_layer_freq=1,
    norm_topk_prob=True,
    pretraining_tp=1,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    scoring_func="sigmoid",
    seq_aux=True,
    tie_word_embeddings=False,
    topk_method="noaux_tc",
    v_head_dim=128,
)
_DEEPSEEK_YARN = {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}
_ernie4_5 = functools.partial(
    file,
    "Ernie4_5ForCausalLM",
    "ernie4_5",
    (1024, 3072, 18, 16, 2, 103424),
    bos_token_id=1,
    eos_token_id=2,
    head_dim=128,
    max_position_embeddings=131072,
    pad_token_id=0,
    rms_norm_eps=1e-5,
    rope_scaling=None,
    rope_theta=500000.0,
    tie_word_embeddings=True,
    use_bias=False,
)
_cohere2 = functools.partial(
    file,
    "Cohere2ForCausalLM",
    "cohere2",
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=5,
    cache_implementation="hybrid",
    eos_token_id=255001,
    head_dim=128,
    layer_norm_eps=1e-5,
    layer_switch=4,
    logit_scale=0.25,
    order_of_interleaved_layers="local_attn_first",
    pad_token_id=0,
    position_embedding_type="rope_gptj",
    rope_scaling=None,
    rope_theta=50000,
    rotary_pct=1.0,
    sliding_window=4096,
    sliding_window_pattern=4,
    use_embedding_sharing=True,
    use_gated_activation=True,
    use_parallel_block=True,
    use_parallel_embedding=True,
)
_COMMAND_R7B, _COMMAND_A = (4096, 14336, 32, 32, 8, 256000), (12288, 36864, 64, 96, 8, 256000)
_llama4 = functools.partial(
    file,
    "Llama4ForCausalLM",
    "llama4_text",
    attention_bias=False,
    attention_chunk_size=8192,
    attention_dropout=0.0,
    bos_token_id=200000,
    eos_token_id=[200001, 200007, 200008],
    for_llm_compressor=False,
    head_dim=128,
    intermediate_size_mlp=16384,
    num_experts_per_tok=1,
    output_router_logits=False,
    pad_token_id=200018,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    router_aux_loss_coef=0.001,
    router_jitter_noise=0.0,
)
"""Text halves of published files, which are those of models around them."""
_SCOUT_ROPE = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 1.0}
_SCOUT_ROPE |= {"factor": 16.0, "original_max_position_embeddings": 8192}
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    # The file, the parameters of the model, its context.
    "qwen1.5-moe-a2.7b": (
        file(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            (2048, 5632, 24, 16, 16, 151936),
            decoder_sparse_step=1,
            max_position_embeddings=8192,
            max_window_layers=21,
            moe_intermediate_size=1408,
            norm_topk_prob=False,
            num_experts=60,
            num_experts_per_tok=4,
            rms_norm_eps=1e-6,
            rope_theta=1e6,
            shared_expert_intermediate_size=5632,
            sliding_window=32768,
            tie_word_embeddings=False,
            use_sliding_window=False,
        ),
        14_315_784_192,
        8192,
    ),
    "qwen3-30b-a3b": (
        _qwen3_moe(
            (2048, 6144, 48, 32, 4, 151936),
            max_position_embeddings=40960,
            max_window_layers=48,
            moe_intermediate_size=768,
            rope_theta=1e6,
        ),
        30_532_122_624,
        40960,
    ),
    "qwen3-coder-30b-a3b": (
        _qwen3_moe(
            (2048, 5472, 48, 32, 4, 151936),
            max_position_embeddings=262144,
            max_window_layers=28,
            moe_intermediate_size=768,
            qkv_bias=False,
            rope_theta=1e7,
            shared_expert_intermediate_size=0,
            use_qk_norm=True,
        ),
        30_532_122_624,
        262144,
    ),
    "qwen3-235b-a22b": (
        _qwen3_moe(
            (4096, 12288, 94, 64, 4, 151936),
            max_position_embeddings=40960,
            max_window_layers=94,
            moe_intermediate_size=1536,
            rope_theta=1e6,
        ),
        235_093_634_560,
        40960,
    ),
    "ministral-8b-2410": (
        file(
            "MinistralForCausalLM",
            "ministral",
            (4096, 12288, 36, 32, 8, 131072),
            head_dim=128,
            layer_types=["full_attention", *["sliding_attention"] * 3] * 9,
            max_position_embeddings=32768,
            rms_norm_eps=1e-5,
            rope_theta=1e8,
            sliding_window=32768,
            tie_word_embeddings=False,
        ),
        8_019_808_256,
        32768,
    ),
    "phi-3-mini-4k": (
        _phi3((3072, 8192, 32, 32, 32, 32064), max_position_embeddings=4096, rope_scaling=None, sliding_window=2047),
        3_821_079_552,
        4096,
    ),
    "phi-3.5-mini": (
        _phi3(
            (3072, 8192, 32, 32, 32, 32064),
            max_position_embeddings=131072,
            rope_scaling=_PHI_LONG,
            sliding_window=262144,
        ),
        3_821_079_552,
        131072,
    ),
    "phi-3-mini-128k, the first file": (
        _phi3(
            (3072, 8192, 32, 32, 32, 32064),
            max_position_embeddings=131072,
            rope_scaling=_PHI_LONG | {"type": "su"},
            sliding_window=262144,
        ),
        3_821_079_552,
        131072,
    ),
    "phi-4": (
        _phi3(
            (5120, 17920, 40, 40, 10, 100352),
            bos_token_id=100257,
            eos_token_id=100257,
            max_position_embeddings=16384,
            original_max_position_embeddings=16384,
            pad_token_id=100257,
            rope_scaling=None,
            rope_theta=250000,
            sliding_window=None,
        ),
        14_659_507_200,
        16384,
    ),
    "phi-4-mini": (
        _phi3(
            (3072, 8192, 32, 24, 8, 200064),
            bos_token_id=199999,
            eos_token_id=199999,
            full_attn_mod=1,
            interpolate_factor=1,
            lm_head_bias=False,
            max_position_embeddings=131072,
            mlp_bias=False,
            pad_token_id=199999,
            partial_rotary_factor=0.75,
            rope_scaling=_PHI_LONG,
            sliding_window=262144,
            tie_word_embeddings=True,
        ),
        3_836_021_760,
        131072,
    ),
    "glm-4-9b-0414": (_glm4((4096, 13696, 40, 32, 2, 151552), attention_bias=True), 9_400_279_040, 32768),
    "glm-4-32b-0414": (_glm4((6144, 23040, 61, 48, 2, 151552)), 32_566_081_536, 32768),
    "glm-z1-rumination-32b-0414": (
        _glm4((6144, 23040, 61, 48, 2, 151552), max_position_embeddings=131072),
        32_566_081_536,
        131072,
    ),
    "llama-4-scout": (
        _llama4(
            (5120, 8192, 48, 40, 8, 202048),
            interleave_moe_layer_step=1,
            max_position_embeddings=10485760,
            no_rope_layers=[1, 1, 1, 0] * 12,
            num_local_experts=16,
            rope_scaling=_SCOUT_ROPE,
            use_qk_norm=True,
        ),
        107_769_861_120,
        10485760,
    ),
    "llama-4-maverick": (
        _llama4(
            (5120, 8192, 48, 40, 8, 202048),
            interleave_moe_layer_step=2,
            max_position_embeddings=1048576,
            moe_layers=list(range(1, 48, 2)),
            no_rope_layers=[],
            num_local_experts=128,
            rope_scaling=None,
            use_qk_norm=False,
        ),
        400_711_848_960,
        1048576,
    ),
    "llama-guard-4-12b": (
        _llama4(
            (5120, 8192, 48, 40, 8, 202048),
            interleave_moe_layer_step=0,
            intermediate_size_mlp=8192,
            max_position_embeddings=10485760,
            moe_layers=[],
            num_experts_per_tok=0,
            no_rope_layers=[1, 1, 1, 0] * 12,
            num_local_experts=0,
            rope_scaling=_SCOUT_ROPE,
            use_qk_norm=True,
        ),
        11_129_164_800,
        10485760,
    ),
    "deepseek-v3": (
        _deepseek_v3(
            "deepseek_v3",
            (7168, 18432, 61, 128, 128, 129280),
            first_k_dense_replace=3,
            max_position_embeddings=163840,
            moe_intermediate_size=2048,
            n_group=8,
            n_routed_experts=256,
            n_shared_experts=1,
            num_experts_per_tok=8,
            num_nextn_predict_layers=1,
            q_lora_rank=1536,
            rms_norm_eps=1e-6,
            rope_scaling=_DEEPSEEK_YARN | {"beta_fast": 32, "beta_slow": 1, "factor": 40},
            rope_theta=10000,
            routed_scaling_factor=2.5,
            topk_group=4,
        ),
        671_026_419_200,
        163840,
    ),
    "kimi-k2": (
        _deepseek_v3(
            "kimi_k2",
            (7168, 18432, 61, 64, 64, 163840),
            first_k_dense_replace=1,
            max_position_embeddings=131072,
            moe_intermediate_size=2048,
            n_group=1,
            n_routed_experts=384,
            n_shared_experts=1,
            num_experts_per_tok=8,
            num_nextn_predict_layers=0,
            q_lora_rank=1536,
            rms_norm_eps=1e-6,
            rope_scaling=_DEEPSEEK_YARN | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
            rope_theta=50000.0,
            routed_scaling_factor=2.827,
            topk_group=1,
        ),
        1_026_408_232_448,
        131072,
    ),
    "moonlight-16b-a3b": (
        _deepseek_v3(
            "deepseek_v3",
            (2048, 11264, 27, 16, 16, 163840),
            first_k_dense_replace=1,
            max_position_embeddings=8192,
            moe_intermediate_size=1408,
            n_group=1,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            num_nextn_predict_layers=0,
            q_lora_rank=None,
            rms_norm_eps=1e-5,
            rope_theta=50000.0,
            routed_scaling_factor=2.446,
            topk_group=1,
        ),
        15_960_110_208,
        8192,
    ),
    "gpt-oss-20b": (
        _gpt_oss(
            (2880, 2880, 24, 64, 8, 201088),
            layer_types=["sliding_attention", "full_attention"] * 12,
            num_local_experts=32,
        ),
        20_914_757_184,
        131072,
    ),
    "gpt-oss-20b-bf16": (
        _gpt_oss(
            (2880, 2880, 24, 64, 8, 201088),
            num_local_experts=32,
            unsloth_fixed=True,
        ),
        20_914_757_184,
        131072,
    ),
    "gpt-oss-120b": (
        _gpt_oss(
            (2880, 2880, 36, 64, 8, 201088),
            layer_types=["sliding_attention", "full_attention"] * 18,
            num_local_experts=128,
        ),
        116_829_156_672,
        131072,
    ),
    # All dense ones have one shape. The second file is as transformers 5 writes it.
    "ernie-4.5-0.3b": (_ernie4_5(), 360_748_032, 131072),
    "ernie-4.5-0.3b, saved again": (
        _ernie4_5(rope_theta=None, rope_parameters={"rope_theta": 500000.0, "rope_type": "default"}),
        360_748_032,
        131072,
    ),
    "command-r7b": (_cohere2(_COMMAND_R7B, max_position_embeddings=132096), 8_028_033_024, 132096),
    "command-r7b-arabic": (
        _cohere2(_COMMAND_R7B, max_position_embeddings=16384, use_qk_norm=False),
        8_028_033_024,
        16384,
    ),
    "command-a": (_cohere2(_COMMAND_A, max_position_embeddings=131072), 111_057_580_032, 131072),
    "seed-oss-36b": (
        file(
            "SeedOssForCausalLM",
            "seed_oss",
            (5120, 27648, 64, 80, 8, 155136),
            attention_bias=True,
            attention_out_bias=False,
            head_dim=128,
            max_position_embeddings=524288,
            mlp_bias=False,
            residual_dropout=0.1,
            rms_norm_eps=1e-6,
            rope_scaling={"rope_type": "default"},
            rope_theta=1e7,
            tie_word_embeddings=False,
        ),
        36_151_104_512,
        524288,
    ),
    "olmo-2-7b": (
        file(
            "Olmo2ForCausalLM",
            "olmo2",
            (4096, 11008, 32, 32, 32, 100352),
            attention_bias=False,
            max_position_embeddings=4096,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=500000,
            tie_word_embeddings=False,
        ),
        7_298_617_344,
        4096,
    ),
    "smollm3-3b": (
        file(
            "SmolLM3ForCausalLM",
            "smollm3",
            (2048, 11008, 36, 16, 4, 128256),
            attention_bias=False,
            layer_types=["full_attention"] * 36,
            max_position_embeddings=65536,
            max_window_layers=28,
            mlp_bias=False,
            no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9,
            pretraining_tp=2,
            rms_norm_eps=1e-6,
            rope_scaling=None,
            rope_theta=5e6,
            sliding_window=None,
            use_sliding_window=False,
        ),
        3_075_098_624,
        65536,
    ),
    "granite-3.1-8b": (
        file(
            "GraniteForCausalLM",
            "granite",
            (4096, 12800, 40, 32, 8, 49155),
            attention_bias=False,
            attention_multiplier=0.0078125,
            embedding_multiplier=12.0,
            logits_scaling=16.0,
            max_position_embeddings=131072,
            mlp_bias=False,
            residual_multiplier=0.22,
            rms_norm_eps=1e-5,
            rope_scaling=None,
            rope_theta=1e7,
            tie_word_embeddings=True,
        ),
        8_170_848_256,
        131072,
    ),
    "olmo-3-7b": (
        _olmo3((4096, 11008, 32, 32, 32, 100278), layer_types=[*["sliding_attention"] * 3, "full_attention"] * 8),
        7_298_011_136,
        65536,
    ),
    "olmo-3-32b": (
        _olmo3((5120, 27648, 64, 40, 8, 100278), layer_types=[*["sliding_attention"] * 3, "full_attention"] * 16),
        32_233_522_176,
        65536,
    ),
    "exaone-4.0-1.2b": (
        _exaone4(
            (2048, 4096, 30, 32, 8, 102400),
            head_dim=64,
            layer_types=["full_attention"] * 30,
            max_position_embeddings=65536,
            sliding_window=None,
            sliding_window_pattern=None,
            tie_word_embeddings=True,
        ),
        1_279_391_488,
        65536,
    ),
    "exaone-4.0-32b": (
        _exaone4(
            (5120, 27392, 64, 40, 8, 102400),
            head_dim=128,
            layer_types=[*["sliding_attention"] * 3, "full_attention"] * 16,
            max_position_embeddings=131072,
            sliding_window=4096,
            sliding_window_pattern="LLLG",
        ),
        32_003_216_384,
        131072,
    ),
    "hunyuan-0.5b": (_hunyuan((1024, 3584, 24, 16, 8, 120818), eos_token_id=120020), 539_010_048, 262144),
    "hunyuan-7b": (
        _hunyuan((4096, 14336, 32, 32, 8, 128167), org_vocab_size=128167, use_rotary_pos_emb=True),
        7_504_568_320,
        262144,
    ),
    "gemma-2-2b": (_gemma2((2304, 9216, 26, 8, 4, 256000)), 2_614_341_888, 8192),
    "gemma-2-9b": (_gemma2((3584, 14336, 42, 16, 8, 256000), sliding_window_size=4096), 9_241_705_984, 8192),
    "gemma-2-27b": (
        _gemma2((4608, 36864, 46, 32, 16, 256000), head_dim=128, query_pre_attn_scalar=144, sliding_window_size=4096),
        27_227_128_320,
        8192,
    ),
    "gemma-3-1b-it": (_gemma3((1152, 6912, 26, 4, 1, 262144), sliding_window_pattern=6), 999_885_952, 32768),
    "gemma-3-270m": (
        _gemma3(
            (640, 2048, 18, 4, 1, 262144),
            _sliding_window_pattern=6,
            layer_types=[*["sliding_attention"] * 5, "full_attention"] * 3,
            use_bidirectional_attention=False,
        ),
        268_098_176,
        32768,
    ),
    "granite-3.0-1b-a400m": (
        _granitemoe(
            (1024, 512, 24, 16, 8, 49155), max_position_embeddings=4096, num_local_experts=32, rope_theta=10000
        ),
        1_334_628_352,
        4096,
    ),
    "granite-3.1-3b-a800m": (
        _granitemoe(
            (1536, 512, 32, 24, 8, 49155), max_position_embeddings=131072, num_local_experts=40, rope_theta=1500000
        ),
        3_298_793_472,
        131072,
    ),
    "powermoe-3b": (
        _granitemoe(
            (1536, 512, 32, 24, 8, 49152), max_position_embeddings=4096, num_local_experts=40, rope_theta=10000
        ),
        3_298_788_864,
        4096,
    ),
    "glm-4.5-air": (
        _glm4_moe(
            (4096, 10944, 46, 96, 8, 151552),
            first_k_dense_replace=1,
            max_position_embeddings=131072,
            moe_intermediate_size=1408,
            n_routed_experts=128,
            routed_scaling_factor=1.0,
            use_qk_norm=False,
        ),
        106_852_251_264,
        131072,
    ),
    "glm-4.5": (_glm_4_5(max_position_embeddings=131072), 352_797_829_024, 131072),
    "glm-4.6": (_glm_4_5(max_position_embeddings=202752), 352_797_829_024, 202752),
    "minimax-m2": (_minimax_m2(max_position_embeddings=196608), 228_689_764_864, 196608),
    "minimax-m2.1": (_minimax_m2(max_position_embeddings=196608, sliding_window=None), 228_689_764_864, 196608),
    "minimax-m2.5": (_minimax_m2(max_position_embeddings=196608, shared_moe_mode="sigmoid"), 228_689_764_864, 196608),
    "ernie-4.5-21b-a3b": (_ernie_21b(moe_layer_end_index=27), 21_825_437_888, 131072),
    "ernie-4.5-21b-a3b-thinking": (_ernie_21b(moe_layer_end_index=-1), 21_825_437_888, 131072),
    "ernie-4.5-300b-a47b": (
        _ernie_moe(
            (8192, 28672, 54, 64, 8, 103424),
            moe_intermediate_size=3584,
            moe_k=8,
            moe_layer_end_index=53,
            moe_layer_start_index=3,
            moe_num_shared_experts=0,
            tie_word_embeddings=False,
        ),
        299_484_163_264,
        131072,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read(tmp_path, name: str):
    config, count, context_len = PUBLISHED[name]
    spec = read(tmp_path, config)
    assert (spec.architecture, spec.num_layers) == (config["architectures"][0], config["num_hidden_layers"])
    assert (spec.max_position_embeddings, spec.notes) == (context_len, ())
    assert num_parameters(spec) == count


def test_experts_of_gpt_oss_in_mxfp4_are_refused_by_name(tmp_path):
    config = PUBLISHED["gpt-oss-20b"][0] | {"quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ModelError, match=r"quantised .*mxfp4"):
        read(tmp_path, config)


def test_windows_of_gpt_oss_are_those_of_every_other_layer(tmp_path):
    spec = read(tmp_path, PUBLISHED["gpt-oss-20b-bf16"][0])
    assert spec.layer_windows == (Window(128), None) * 12


def test_layers_of_llama_4_are_of_several_kinds(tmp_path):
    """Those with rope have windows and norms, and others growing queries; Maverick has experts in every other one."""
    scout, maverick = (read(tmp_path, PUBLISHED[f"llama-4-{name}"][0]) for name in ("scout", "maverick"))
    window = Window(8192, is_aligned=True)
    for spec, has_norms in ((scout, True), (maverick, False)):
        assert spec.layer_windows == (window, window, window, None) * 12
        kinds = [(x.rope is None, x.qk_norm is None, x.query_scale is None) for x in (y.attention for y in spec.layers)]
        assert kinds == ([(False, not has_norms, True)] * 3 + [(True, True, False)]) * 12
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in maverick.layers] == [False, True] * 24
    kinds = ["full_attention"] * 47 + ["chunked_attention"]
    named = read(tmp_path, PUBLISHED["llama-4-scout"][0] | {"layer_types": kinds, "attn_temperature_tuning": False})
    assert named.layer_windows == (None,) * 47 + (window,)
    assert {layer.attention.query_scale for layer in named.layers} == {None}
    with pytest.raises(ModelError, match="moe_layers must be a list of numbers of layers below 48"):
        read(tmp_path, PUBLISHED["llama-4-scout"][0] | {"moe_layers": [48]})
