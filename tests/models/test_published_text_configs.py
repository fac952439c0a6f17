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
