import copy
import json
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from jsg.errors import ModelError
from jsg.models.config import read_spec
from jsg.models.spec import ModelSpec
from jsg.models.vision_config import VisionConfig
from tests.golden.vision_variants import VISION_VARIANTS
from tests.models.test_config import JSON_VALUES

LLAVA_1_5: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
"""As published with the 7B model: nearly everything of the text half goes without saying."""

VIDEO = VISION_VARIANTS["llava_next_video"]


def read(directory: Path, config: dict[str, Any]) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config))
    return read_spec(directory)


def vision(directory: Path, config: dict[str, Any]) -> VisionConfig:
    found = read(directory, config).vision
    assert found is not None
    return found


def changed(config: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The config with `change`; "a.b" is the field b inside a."""
    config = copy.deepcopy(config)
    for name, value in change.items():
        section, _, field = name.rpartition(".")
        (config[section] if section else config)[field] = value
    return config


def test_the_text_half_of_a_published_file_has_the_defaults_of_its_family(tmp_path):
    config = read(tmp_path, LLAVA_1_5)
    shape = (
        config.hidden_size,
        config.layers[0].mlp.inner,
        config.num_layers,
        config.layers[0].attention.heads,
        config.layers[0].attention.kv_heads,
    )
    assert shape == (4096, 11008, 32, 32, 32)
    assert (config.architecture, config.vocab_size, config.layers[0].attention.head_dim) == (
        "LlamaForCausalLM",
        32064,
        128,
    )
    assert (config.max_position_embeddings, config.final_norm.eps, config.layers[0].attention.rope.theta) == (
        4096,
        1e-5,
        1e4,
    )
    assert (config.bos_token_id, config.eos_token_ids, config.tie_word_embeddings) == (1, (2,), False)


def test_the_tower_of_a_published_file(tmp_path):
    tower = vision(tmp_path, LLAVA_1_5)
    assert tower == VisionConfig(
        kind="llava",
        image_size=336,
        patch_size=14,
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=24,
        num_heads=16,
        feature_layers=(23,),
        image_token_id=32000,
    )
    assert (tower.patches_per_tile, tower.patches_per_frame, tower.has_newline) == (576, 0, False)


def test_a_file_without_a_tower_means_vit_l(tmp_path):
    config = {name: value for name, value in LLAVA_1_5.items() if name != "vision_config"}
    assert vision(tmp_path, config) == vision(tmp_path, LLAVA_1_5)


def test_a_mistral_half(tmp_path):
    text = {"model_type": "mistral", "vocab_size": 32064, "rope_theta": 1e6, "sliding_window": None}
    config = read(tmp_path, {**LLAVA_1_5, "text_config": text})
    assert (config.architecture, config.layers[0].attention.kv_heads, config.layers[0].mlp.inner) == (
        "MistralForCausalLM",
        8,
        14336,
    )
    assert (config.max_position_embeddings, any(config.layer_windows)) == (131072, False)  # a null is not silence
    assert read(tmp_path, {**LLAVA_1_5, "text_config": {"model_type": "mistral", "vocab_size": 32064}}).layer_windows[0]


def test_tokens_of_the_whole_come_before_those_of_the_text_half(tmp_path):
    half = changed(LLAVA_1_5, {"text_config.eos_token_id": 7, "text_config.bos_token_id": 8})
    config = read(tmp_path, half)
    assert (config.bos_token_id, config.eos_token_ids) == (8, (7,))
    config = read(tmp_path, {**half, "eos_token_id": [5, 6], "bos_token_id": 0})
    assert (config.bos_token_id, config.eos_token_ids) == (0, (5, 6))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [6, 9]}')
    assert read(tmp_path, {**half, "eos_token_id": [5, 6]}).eos_token_ids == (5, 6, 9)


@pytest.mark.parametrize(("whole", "half", "is_tied"), [(1, 0, True), (0, 1, True), (1, None, True), (0, 0, False)])
def test_either_half_may_tie_the_head(tmp_path, whole, half, is_tied):
    """As in transformers. What the checkpoint holds counts more: see `with_own_head`."""
    text = LLAVA_1_5["text_config"] | ({} if half is None else {"tie_word_embeddings": bool(half)})
    file = {**LLAVA_1_5, "tie_word_embeddings": bool(whole), "text_config": text}
    assert read(tmp_path, file).tie_word_embeddings == is_tied


def test_llava_next_and_video(tmp_path):
    tower = vision(tmp_path, VIDEO)
    assert (tower.kind, tower.has_newline, tower.pool_stride) == ("llava_next_video", True, 2)
    assert (tower.image_token_id, tower.video_token_id) == (500, 501)
    assert (tower.patches_per_side, tower.patches_per_tile, tower.patches_per_frame) == (5, 25, 4)
    silent = {name: VIDEO[name] for name in ("architectures", "text_config", "image_token_index", "video_token_index")}
    tower = vision(tmp_path, silent)
    assert tower.grid_pinpoints == ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
    assert tower.patches_per_frame == 144


def test_feature_layers_and_the_class_token(tmp_path):
    tower = vision(tmp_path, VISION_VARIANTS["llava_class_token"])
    assert (tower.feature_layers, tower.drops_class_token, tower.patches_per_tile) == ((1, 3), False, 17)
    assert not tower.projector_bias


def test_a_text_model_has_no_tower(tmp_path):
    assert read(tmp_path, LLAVA_1_5["text_config"] | {"architectures": ["LlamaForCausalLM"]}).vision is None


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text_config": None, "image_token_index": 32000}, "image_token_index"),
        ({"text_config": []}, "text_config must be an object"),
        ({"text_config.model_type": "gemma"}, "gemma"),
        ({"text_config.hidden_act": "gelu"}, "text_config: hidden_act"),
        ({"text_config.quantization_config": {"bits": 4}}, "quantization_config"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"eos_token_id": "</s>"}, "config.json: eos_token_id"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"vision_config": 3}, "vision_config must be an object"),
        ({"vision_config.model_type": "siglip_vision_model"}, "siglip_vision_model"),
        ({"vision_config.num_channels": 1}, "num_channels"),
        ({"vision_config.rope_theta": 1e4}, "vision_config: a tower of CLIP has no field 'rope_theta'"),
        ({"text_config.residual_multiplier": 0.2}, "text_config: LlamaForCausalLM has no field"),
        ({"spatial_merge_size": 2}, "ForConditionalGeneration has no field 'spatial_merge_size'"),
        ({"is_causal": False}, "is_causal must be true"),
        ({"vision_config.image_size": 10**6}, "image_size"),
        ({"vision_config.image_size": [28, 28]}, "image_size"),
        ({"vision_config.patch_size": 0}, "patch_size"),
        ({"vision_config.patch_size": 29}, "patch_size"),
        ({"vision_config.image_size": 4096, "vision_config.patch_size": 1}, "patch_size must make at most 64"),
        ({"vision_config.num_attention_heads": 3}, "num_attention_heads must divide"),
        ({"vision_config.hidden_act": "relu"}, "relu"),
        ({"vision_config.layer_norm_eps": float("nan")}, "layer_norm_eps"),
        ({"projector_hidden_act": "silu"}, "projector_hidden_act"),
        ({"multimodal_projector_bias": 1}, "multimodal_projector_bias"),
        ({"vision_feature_layer": 4}, "vision_feature_layer"),
        ({"vision_feature_layer": -5}, "vision_feature_layer"),
        ({"vision_feature_layer": []}, "vision_feature_layer"),
        ({"vision_feature_layer": True}, "vision_feature_layer"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy must be default"),
        ({"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy"),
        ({"image_token_index": 512}, "image_token_index"),
        ({"image_token_id": -1}, "image_token_id"),
        ({"image_token_index": 501}, "video_token_id must not be image_token_id"),
        ({"image_grid_pinpoints": []}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[28]]}, "image_grid_pinpoints"),
        ({"image_grid_pinpoints": [[28, 30]]}, "multiples of 28"),
        ({"image_grid_pinpoints": [[28 * 9, 28 * 8]]}, "at most 64 tiles"),
        ({"image_grid_pinpoints": [[28, 28]] * 200}, "at most 128 pairs"),
        ({"spatial_pool_mode": "conv"}, "spatial_pool_mode"),
        ({"spatial_pool_stride": 6}, "spatial_pool_stride"),
    ],
)
def test_what_is_wrong_or_unsupported_is_refused_by_name(tmp_path, change, named):
    with pytest.raises(ModelError, match=named) as error:
        read(tmp_path, changed(VIDEO, change))
    assert str(tmp_path) not in str(error.value)
    assert len(str(error.value)) < 400


FIELDS = sorted({name for config in VISION_VARIANTS.values() for name in config})
TOWER_FIELDS = sorted(f"vision_config.{name}" for name in VIDEO["vision_config"])


@hypothesis.settings(max_examples=100, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    variant=st.sampled_from(sorted(VISION_VARIANTS)), name=st.sampled_from(FIELDS + TOWER_FIELDS), value=JSON_VALUES
)
def test_any_value_of_any_field_is_read_or_refused(tmp_path, variant, name, value):
    config = changed(VISION_VARIANTS[variant], {name: value})
    try:
        tower = vision(tmp_path, config)
    except ModelError:
        return
    assert tower.patches_per_tile > 0 and 0 <= max(tower.feature_layers) <= tower.num_layers
