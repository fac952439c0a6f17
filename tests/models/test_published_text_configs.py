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


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read(tmp_path, name: str):
    config, count, context_len = PUBLISHED[name]
    spec = read(tmp_path, config)
    assert (spec.architecture, spec.num_layers) == (config["architectures"][0], config["num_hidden_layers"])
    assert (spec.max_position_embeddings, spec.notes) == (context_len, ())
    assert num_parameters(spec) == count
