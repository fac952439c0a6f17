"""Gemma 4: what its layers keep, read and share, by the published shapes and by files that say it otherwise."""

import collections
import json
from typing import Any

import numpy as np
import pytest

from jsg.cache.pool import make_pool
from jsg.errors import ModelError
from jsg.models.block_spec import AttentionSpec, RopeSpec
from jsg.models.loading import load_model
from jsg.models.spec import ModelSpec
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint
from tests.models.published import PUBLISHED
from tests.models.test_config import read

ARCHITECTURE = "Gemma4ForConditionalGeneration"
SMALL, EXPERTS = VARIANTS["gemma4"], VARIANTS["gemma4_experts"]


def published(tmp_path, name: str, **fields: Any) -> ModelSpec:
    return read(tmp_path, {"architectures": [ARCHITECTURE], "text_config": PUBLISHED[name].file | fields})


def attention_of(spec: ModelSpec) -> list[AttentionSpec]:
    return [layer.attention for layer in spec.layers if isinstance(layer.attention, AttentionSpec)]


@pytest.mark.parametrize(
    ("name", "layers", "kv_bytes"),
    [
        # Of sliding layers and of full ones: how many, query heads, key-value heads, width, tensors, window.
        ("gemma-4-e2b-it",
         {(12, 8, 1, 256, 3, 512), (16, 8, 1, 256, 1, 512), (3, 8, 1, 512, 3), (4, 8, 1, 512, 1)}, 18432),
        ("gemma-4-e4b-it",
         {(20, 8, 2, 256, 3, 512), (15, 8, 2, 256, 1, 512), (4, 8, 2, 512, 3), (3, 8, 2, 512, 1)}, 57344),
        ("gemma-4-26b-a4b-it", {(25, 16, 8, 256, 3, 1024), (5, 16, 2, 512, 2)}, 225280),
        ("gemma-4-31b-it", {(50, 32, 16, 256, 3, 1024), (10, 32, 4, 512, 2)}, 901120),
    ],
)  # fmt: skip
def test_what_the_layers_of_published_models_keep(tmp_path, name: str, layers: set[Any], kv_bytes: int):
    """The fields are remembered. A token of E2B would take 43 008 bytes if all layers kept theirs."""
    spec = published(tmp_path, name)
    of = attention_of(spec)
    found = collections.Counter(
        (x.heads, x.kv_heads, x.head_dim, len(x.projections), x.window and x.window.length) for x in of
    )
    assert {(count, *shape[: 5 if shape[4] else 4]) for shape, count in found.items()} == layers
    assert {x.rope for x in of if x.window is None} == {RopeSpec(type="proportional", theta=1e6, rotated=128)}
    assert {x.rope for x in of if x.window} == {RopeSpec(theta=1e4)} and {x.scale for x in of} == {1.0}
    assert spec.kv_bytes_per_token(2) == kv_bytes == sum(spec.group_bytes_per_token(2).values())
    own = [i for i, layer in enumerate(spec.layers) if layer.kv_source is None]
    assert [shape.numbers > 0 for shape in spec.kv_shapes] == [i in own for i in range(spec.num_layers)]
    for layer in spec.layers:
        source = spec.layers[own[-1] if layer.kv_source is None else layer.kv_source].attention
        assert layer.kv_source is None or (source.window, source.kv_shape) == (
            layer.attention.window,
            layer.attention.kv_shape,
        )


def test_e2b_reads_two_layers_with_blocks_twice_as_wide(tmp_path):
    spec = published(tmp_path, "gemma-4-e2b-it")
    assert {layer.kv_source for layer in spec.layers[15:]} == {13, 14}
    assert [layer.mlp.inner for layer in spec.layers] == [6144] * 15 + [12288] * 20
    assert spec.layer_inputs is not None and spec.layer_inputs.count == 35


def test_several_devices_repeat_the_heads_of_the_layers_that_have_too_few(tmp_path):
    spec = published(tmp_path, "gemma-4-31b-it").over_devices(8)
    assert {(x.kv_heads, x.kv_repeats) for x in attention_of(spec)} == {(16, 1), (8, 2)}
    assert spec.kv_bytes_per_token(2) == 901120 + 81920


def test_the_pool_has_arrays_of_each_layers_shape_and_none_for_what_another_layer_keeps(tmp_path):
    pool = make_pool(read(tmp_path, SMALL).kv_shapes, 3, 4, np.float32)
    sliding, full = ((3, 4, 2, 16),) * 2, ((3, 4, 2, 32),) * 2
    assert [tuple(array.shape for array in layer) for layer in pool.layers] == [sliding, full, sliding, (), (), ()]


def test_a_file_that_transformers_saved_says_the_shapes_layer_by_layer(tmp_path):
    own = {"head_dim": 32, "num_key_value_heads": 1}
    saved = {name: value for name, value in EXPERTS.items() if "global" not in name}
    assert read(tmp_path, saved | {"per_layer_config": {"1": own, "2": own}}) == read(tmp_path, EXPERTS)
    long = saved | {"num_hidden_layers": 12, "layer_types": None}
    padded = {"05": own, "11": own}  # as transformers writes them
    assert read(tmp_path, long | {"per_layer_config": padded}) == read(tmp_path, EXPERTS | long)
    assert {x.head_dim for x in attention_of(read(tmp_path, saved | {"per_layer_config": {}}))} == {16}
    without = {"attention_k_eq_v": False}  # else full layers have as many key-value heads as the others
    assert {x.kv_heads for x in attention_of(read(tmp_path, EXPERTS | without))} == {2}


def test_the_last_layer_has_no_window_whatever_the_file_says(tmp_path):
    spec = read(tmp_path, EXPERTS | {"layer_types": ["full_attention", "full_attention", "sliding_attention"]})
    assert spec.layer_windows == (None,) * 3
    assert any("the last layer" in note for note in spec.notes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be null or 'vision'.* is 'all'"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers must leave a layer of each kind before those, but is 5"),
        ({"num_kv_shared_layers": 6}, r"num_kv_shared_layers must be an integer in \[0, 5\], but is 6"),
        ({"vocab_size_per_layer_input": 500}, "vocab_size_per_layer_input must be at least vocab_size = 512, but"),
        ({"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
        ({"rope_parameters": {"full_attention": {}}}, "rope_parameters must have an object for each of"),
        ({"rope_parameters": SMALL["rope_parameters"] | {"full_attention": {"rope_type": "default"}}},
         "rope_theta must be in .* is absent or null"),
        ({"per_layer_config": {"x": {"head_dim": 32}}}, "per_layer_config must have numbers of layers up to 5"),
        ({"per_layer_config": {"1": {}, "01": {}}}, "per_layer_config must have numbers of layers up to 5"),
        ({"per_layer_config": {"9": {"head_dim": 32}}}, "per_layer_config must have numbers of layers up to 5"),
        ({"per_layer_config": {"1": {"sliding_window": 3}}}, "each with an object of head_dim and num_key_value_heads"),
        ({"per_layer_config": {"5": {"head_dim": 64}}}, "per_layer_config must give layer 5 the shape of layer 1"),
        ({"per_layer_config": None}, "per_layer_config must have numbers of layers.* is absent or null"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling must be absent"),
        ({"attn_logit_softcapping": 50.0}, "has no field 'attn_logit_softcapping'"),
        ({"enable_moe_block": True}, "num_experts must be an integer"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name_and_value(tmp_path, fields: dict[str, Any], message: str):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, SMALL | fields)


def test_keys_and_values_that_a_layer_does_without_may_be_in_the_file(tmp_path):
    """Published files have them, also inside the model with towers."""
    tensors = random_tensors("gemma4", 1)
    name = "model.layers.4.self_attn."
    tensors |= {name + "k_proj.weight": np.ones((32, 48), np.float32), name + "k_norm.weight": np.ones(16, np.float32)}
    write_checkpoint(tmp_path / "text", "gemma4", tensors)
    assert load_model(tmp_path / "text", read(tmp_path / "text", SMALL))
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    renamed["lm_head.weight"] = renamed.pop("lm_head.weight")
    renamed["model.embed_audio.x"] = np.ones(3, np.float32)
    write_checkpoint(tmp_path / "whole", "gemma4", renamed)
    whole = {
        "architectures": [ARCHITECTURE],
        "text_config": SMALL | {"architectures": None},
        "tie_word_embeddings": False,
    }
    (tmp_path / "whole" / "config.json").write_text(json.dumps(whole))
    assert load_model(tmp_path / "whole", read(tmp_path / "whole", whole))
    tensors["model.layers.2.self_attn.extra"] = np.ones(3, np.float32)
    write_checkpoint(tmp_path / "odd", "gemma4", tensors)
    with pytest.raises(ModelError, match="extra"):
        load_model(tmp_path / "odd", read(tmp_path / "odd", SMALL))
