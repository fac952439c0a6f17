import json
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from jsg.errors import ModelError
from jsg.fields import MAX_JSON_BYTES
from jsg.models.config import ModelConfig, RopeConfig
from tests.golden.variants import LLAMA, VARIANTS


def read(directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_directory(directory)


def test_a_plain_llama(tmp_path):
    assert read(tmp_path, LLAMA) == ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        layer_windows=(None, None),
        eos_token_ids=(2,),
        bos_token_id=1,
    )


def test_both_generations_of_rope_fields_mean_the_same(tmp_path):
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
    base = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    old = {**base, "rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = {**base, "rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **scaling}}
    assert read(tmp_path, old) == read(tmp_path, new)
    assert read(tmp_path, new).rope == RopeConfig(type="llama3", theta=5e5, **scaling)


def test_fields_that_old_files_lack_have_the_defaults_of_llama_1(tmp_path):
    gone = ("num_key_value_heads", "rope_theta", "tie_word_embeddings", "rms_norm_eps", "hidden_act")
    config = read(tmp_path, {name: value for name, value in LLAMA.items() if name not in gone} | {"head_dim": None})
    assert (config.num_kv_heads, config.head_dim, config.rope.theta, config.rms_norm_eps) == (4, 16, 10_000.0, 1e-6)


@pytest.mark.parametrize(
    ("rope", "context_len"),
    [
        ({"type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 2048),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_context_length_counts_rope_scaling(tmp_path, rope, context_len):
    assert read(tmp_path, {**LLAMA, "rope_scaling": rope}).max_position_embeddings == context_len


def test_windows_of_mistral_and_qwen(tmp_path):
    assert read(tmp_path, {**LLAMA, "sliding_window": 32}).layer_windows == (32, 32)
    qwen = {**LLAMA, "sliding_window": 32, "max_window_layers": 1}
    assert read(tmp_path, qwen).layer_windows == (None, None)
    assert read(tmp_path, {**qwen, "use_sliding_window": False}).layer_windows == (None, None)
    switched = read(tmp_path, {**qwen, "use_sliding_window": True})
    assert (switched.layer_windows, switched.sliding_window) == ((None, 32), 32)
    named = {**qwen, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
    assert read(tmp_path, named).layer_windows == (32, None)


def test_end_tokens_of_both_files_count(tmp_path):
    config = read(tmp_path, {**LLAMA, "eos_token_id": 9}, {"eos_token_id": [7, 9, 8]})
    assert config.eos_token_ids == (9, 7, 8)


def test_kv_bytes(tmp_path):
    assert read(tmp_path, {**LLAMA, "num_key_value_heads": 2}).kv_bytes_per_token(2) == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": ["A", "B"]}, "architectures"),
        ({"hidden_size": None}, "hidden_size must be an integer"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": 0}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": "512"}, "vocab_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"intermediate_size": 10**400}, "intermediate_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide 4"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be at least 1"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"sliding_window": 8, "use_sliding_window": True}, "max_window_layers"),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, "layer_types"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [1] * 2000}, "eos_token_id"),
    ],
)
def test_what_is_wrong_or_unsupported_is_refused_by_name(tmp_path, change, named):
    with pytest.raises(ModelError, match=named) as error:
        read(tmp_path, {**LLAMA, **change})
    assert str(tmp_path) not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_a_damaged_config_is_refused(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_directory(tmp_path)


def test_a_missing_and_a_huge_config_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"must have config\.json"):
        ModelConfig.from_directory(tmp_path)
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ModelError, match="at most"):
        ModelConfig.from_directory(tmp_path)


JSON_VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)


@hypothesis.settings(max_examples=50, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    variant=st.sampled_from(sorted(VARIANTS)),
    name=st.sampled_from(sorted({name for config in VARIANTS.values() for name in config})),
    value=JSON_VALUES,
)
def test_any_value_of_any_field_is_read_or_refused(tmp_path, variant, name, value):
    try:
        config = read(tmp_path, {**VARIANTS[variant], name: value})
    except ModelError:
        return
    assert config.num_heads % config.num_kv_heads == 0
    assert config.kv_bytes_per_token(2) > 0
