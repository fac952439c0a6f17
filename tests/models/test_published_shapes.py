"""The shapes of published models: at least three files of each family, from the fields that tell them apart.

The fields are remembered and not copied from the files, and so are the billions of parameters, which model cards state.
`test_published_text_configs.py` and `test_published_configs.py` have whole files.
"""

import collections
import itertools
from typing import Any, NamedTuple

from jsg.models.registry import FAMILIES, WRAPPERS
from tests.models import test_published_configs, test_published_text_configs
from tests.models.sizes import num_parameters
from tests.models.test_config import read
from tests.models.test_published_text_configs import file


class Row(NamedTuple):
    """A published file: width, inner width, layers, heads, key-value heads and vocabulary, and what must come of it."""

    name: str
    shape: tuple[int, int, int, int, int, int]
    fields: dict[str, Any]
    billions: float
    head_dim: int = 128
    window: int | None = None


def llama3(factor: float) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": factor}
    return {
        "max_position_embeddings": 131072,
        "rope_scaling": {**rope, "original_max_position_embeddings": 8192},
        "rope_theta": 500000.0,
    }


TIED = {"tie_word_embeddings": True}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6, "max_position_embeddings": 65536}
QWEN = {"max_position_embeddings": 32768, "max_window_layers": 28, "rope_theta": 1e6, "sliding_window": 32768}
QWEN3 = {"attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960, "rope_theta": 1e6}
QWEN2_57B = {
    **QWEN,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 2560,
    "norm_topk_prob": False,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "shared_expert_intermediate_size": 20480,
}
QWEN1_5_MOE = {
    **QWEN,
    "moe_intermediate_size": 1408,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 5632,
}
SEED = {"attention_bias": True, "head_dim": 128, "max_position_embeddings": 524288, "rope_theta": 1e7}
OLMO = {"max_position_embeddings": 4096, "rope_theta": 500000}
SMOL = {"max_position_embeddings": 65536, "no_rope_layer_interval": 4, "rope_theta": 5e6}
GRANITE = {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "max_position_embeddings": 131072, **TIED}
GRANITE_8B = GRANITE | {"attention_multiplier": 0.0078125, "logits_scaling": 16.0}
GRANITE_2B = GRANITE | {"attention_multiplier": 0.015625, "logits_scaling": 8.0}
YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16384,
}
MINISTRAL3 = {"head_dim": 128, "max_position_embeddings": 262144, "rope_parameters": YARN, "rms_norm_eps": 1e-5}

PUBLISHED: dict[str, list[Row]] = {
    "llama": [
        Row("llama-2-7b", (4096, 11008, 32, 32, 32, 32000), {"max_position_embeddings": 4096}, 6.738),
        Row("tinyllama-1.1b", (2048, 5632, 22, 32, 4, 32000), {}, 1.100, head_dim=64),
        Row("llama-3.1-8b", (4096, 14336, 32, 32, 8, 128256), llama3(8.0), 8.030),
        Row("llama-3.2-1b", (2048, 8192, 16, 32, 8, 128256), {**llama3(32.0), **TIED}, 1.236, head_dim=64),
        Row("llama-3.3-70b", (8192, 28672, 80, 64, 8, 128256), llama3(8.0), 70.554),
    ],
    "mistral": [
        Row("mistral-7b-v0.1", (4096, 14336, 32, 32, 8, 32000), {"sliding_window": 4096}, 7.242, window=4096),
        Row("mistral-7b-v0.3", (4096, 14336, 32, 32, 8, 32768), {"sliding_window": None, "rope_theta": 1e6}, 7.248),
        Row("mistral-nemo", (5120, 14336, 40, 32, 8, 131072), {"head_dim": 128, "sliding_window": None}, 12.248),
        Row("mistral-small-2501", (5120, 32768, 40, 32, 8, 131072), {"head_dim": 128, "sliding_window": None}, 23.572),
    ],
    "mixtral": [Row("8x22b-v0.1", (6144, 16384, 56, 48, 8, 32000), MIXTRAL, 140.62)],
    "qwen2": [
        Row("qwen2.5-0.5b", (896, 4864, 24, 14, 2, 151936), QWEN | TIED, 0.494, head_dim=64),
        Row("qwen2.5-1.5b", (1536, 8960, 28, 12, 2, 151936), QWEN | TIED, 1.544),
        Row("qwen2.5-7b", (3584, 18944, 28, 28, 4, 152064), QWEN, 7.616),
        Row("qwen2.5-72b", (8192, 29568, 80, 64, 8, 152064), QWEN | {"max_window_layers": 70}, 72.706),
    ],
    "qwen2_moe": [
        Row("qwen2-57b-a14b", (3584, 18944, 28, 28, 4, 151936), QWEN2_57B, 57.41),
        Row("qwen1.5-moe-a2.7b-chat", (2048, 5632, 24, 16, 16, 151936), QWEN1_5_MOE, 14.316),
    ],
    "qwen3": [
        Row("qwen3-0.6b", (1024, 3072, 28, 16, 8, 151936), QWEN3 | TIED, 0.596),
        Row("qwen3-8b", (4096, 12288, 36, 32, 8, 151936), QWEN3, 8.191),
        Row("qwen3-32b", (5120, 25600, 64, 64, 8, 151936), QWEN3, 32.762),
    ],
    "ministral3": [
        Row("ministral-3-3b", (3072, 9216, 26, 32, 8, 131072), MINISTRAL3 | TIED, 3.43),
        Row("ministral-3-8b", (4096, 14336, 34, 32, 8, 131072), MINISTRAL3, 8.49),
        Row("ministral-3-14b", (5120, 16384, 40, 32, 8, 131072), MINISTRAL3, 13.51),
    ],
    "seed_oss": [
        Row("seed-oss-36b-base", (5120, 27648, 64, 80, 8, 155136), SEED, 36.151),
        Row("seed-oss-36b-base-wosyn", (5120, 27648, 64, 80, 8, 155136), SEED, 36.151),
    ],
    "olmo2": [
        Row("olmo-2-1b", (2048, 8192, 16, 16, 16, 100352), OLMO, 1.485),
        Row("olmo-2-13b", (5120, 13824, 40, 40, 40, 100352), OLMO, 13.716),
        Row("olmo-2-32b", (5120, 27648, 64, 40, 8, 100352), OLMO, 32.234),
    ],
    "smollm3": [Row("smollm3-3b-base", (2048, 11008, 36, 16, 4, 128256), SMOL, 3.075)],
    "granite": [
        Row("granite-3.1-2b", (2048, 8192, 40, 32, 8, 49155), GRANITE_2B, 2.534, head_dim=64),
        Row("granite-3.3-8b", (4096, 12800, 40, 32, 8, 49159), GRANITE_8B, 8.171),
    ],
}
GEMMA3 = {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "sliding_window": 1024, **TIED}
GEMMA3 |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
GEMMA4 = {"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", **TIED}
GEMMA4_SMALL = GEMMA4 | {"hidden_size_per_layer_input": 256, "max_position_embeddings": 131072, "sliding_window": 512}
GEMMA4_E2B = GEMMA4_SMALL | {
    "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
}
GEMMA4_LARGE = GEMMA4 | {
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "num_global_key_value_heads": 4,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
GEMMA4_EXPERTS = GEMMA4_LARGE | {
    "enable_moe_block": True,
    "moe_intermediate_size": 704,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "top_k_experts": 8,
}
WIDE_HEADS = {"head_dim": 128, "query_pre_attn_scalar": 168}
AROUND: dict[str, dict[str, list[Row]]] = {
    "Mistral3ForConditionalGeneration": {"ministral3": PUBLISHED["ministral3"]},
    "Gemma3ForConditionalGeneration": {
        "gemma3_text": [
            Row("gemma-3-4b-it", (2560, 10240, 34, 8, 4, 262208), GEMMA3, 3.880),
            Row("gemma-3-12b-it", (3840, 15360, 48, 16, 8, 262208), GEMMA3, 11.766),
            Row("gemma-3-27b-it", (5376, 21504, 62, 32, 16, 262208), GEMMA3 | WIDE_HEADS, 27.009),
        ]
    },
    "Gemma4ForConditionalGeneration": {
        "gemma4_text": [
            Row("gemma-4-e2b-it", (1536, 6144, 35, 8, 1, 262144), GEMMA4_E2B, 4.63),
            Row("gemma-4-e4b-it", (2560, 10240, 42, 8, 2, 262144), GEMMA4_SMALL | {"num_kv_shared_layers": 18}, 7.46),
            Row("gemma-4-26b-a4b-it", (2816, 2112, 30, 16, 8, 262144), GEMMA4_EXPERTS, 25.2),
            Row("gemma-4-31b-it", (5376, 21504, 60, 32, 16, 262144), GEMMA4_LARGE, 30.7),
        ]
    },
}
"""Text halves of models that are published around one."""
FEWER = {
    "Ernie4_5ForCausalLM": 2,
    "Exaone4ForCausalLM": 2,
    "Gemma3ForCausalLM": 2,
    "Gemma4ForCausalLM": 0,
    "HunYuanDenseV1ForCausalLM": 2,
    "LlavaForConditionalGeneration": 2,
    "MinistralForCausalLM": 1,
    "Olmo3ForCausalLM": 2,
    "SmolLM3ForCausalLM": 2,
}
"""Families of which fewer than three models are remembered."""
ARCHITECTURES = {family.model_type: architecture for architecture, family in FAMILIES.items()}


def published(model_type: str, name: str) -> dict[str, Any]:
    """The fields of one of these files."""
    (row,) = (row for row in PUBLISHED[model_type] if row.name == name)
    return file(ARCHITECTURES[model_type], model_type, row.shape, **row.fields)


def test_the_telling_numbers_of_published_models(tmp_path):
    for model_type, rows in PUBLISHED.items():
        for row in rows:
            spec = read(tmp_path, published(model_type, row.name))
            width, _, layers, heads, kv_heads, vocab_size = row.shape
            assert (spec.hidden_size, spec.num_layers, spec.vocab_size) == (width, layers, vocab_size), row.name
            shapes = {(of.heads, of.kv_heads, of.head_dim, of.window) for of in (x.attention for x in spec.layers)}
            assert shapes == {(heads, kv_heads, row.head_dim, row.window)}, row.name
            assert abs(num_parameters(spec) / 1e9 - row.billions) < 0.002 * row.billions, row.name


def test_the_text_halves_of_published_models(tmp_path):
    for architecture, halves in AROUND.items():
        for (model_type, rows), is_tied in itertools.product(halves.items(), (False, True)):
            for row in rows:
                text = file("", model_type, row.shape, **row.fields) | {"tie_word_embeddings": is_tied}
                whole = {"architectures": [architecture], "text_config": text, "tie_word_embeddings": is_tied}
                spec = read(tmp_path, whole)
                assert (spec.architecture, spec.num_layers) == (ARCHITECTURES[model_type], row.shape[2]), row.name
                head = row.shape[0] * row.shape[-1] * (row.fields.get("tie_word_embeddings", False) - is_tied)
                assert abs((num_parameters(spec) - head) / 1e9 - row.billions) < 0.002 * row.billions, row.name


def test_of_every_family_three_published_files_are_read():
    counts = collections.Counter(ARCHITECTURES[model_type] for model_type, rows in PUBLISHED.items() for _ in rows)
    counts.update(config["architectures"][0] for config, *_ in test_published_text_configs.PUBLISHED.values())
    counts.update(MixtralForCausalLM=2)
    counts.update({architecture: len(rows) for architecture, halves in AROUND.items() for rows in halves.values()})
    counts.update(config["architectures"][0] for config, *_ in test_published_configs.VISION.values())
    needed = dict.fromkeys([*FAMILIES, *WRAPPERS], 3) | FEWER
    assert {name: counts[name] for name, count in needed.items() if counts[name] < count} == {}
