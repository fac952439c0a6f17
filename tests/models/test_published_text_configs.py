"""Fields of published `config.json` files, by family: they are read, and the model has the parameters of its card."""

import functools
from typing import Any

import pytest

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
}
LARGE = ("qwen3-30b-a3b", "qwen3-coder-30b-a3b", "qwen3-235b-a22b")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LARGE else ()) for name in PUBLISHED]
)
def test_a_published_file_is_read(tmp_path, name: str):
    config, count, context_len = PUBLISHED[name]
    spec = read(tmp_path, config)
    assert (spec.architecture, spec.num_layers) == (config["architectures"][0], config["num_hidden_layers"])
    assert (spec.max_position_embeddings, spec.notes) == (context_len, ())
    assert num_parameters(spec) == count
