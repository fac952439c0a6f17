"""Models of which jsg serves the text half, by the name of the whole."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from jsg.conversion.convert import convert
from jsg.errors import ModelError
from jsg.models.config import read_spec
from jsg.models.loading import load_model
from jsg.window import Window
from tests.golden.variants import VARIANTS, random_tensors, write_checkpoint
from tests.models.sizes import num_parameters
from tests.models.test_config import read

ARCHITECTURE = "Gemma3ForConditionalGeneration"
STYLES = {
    "transformers 4": ("language_model.model.", "language_model.lm_head.", "vision_tower.vision_model.", ""),
    "transformers 5": ("model.language_model.", "lm_head.", "model.vision_tower.", "model."),
}
PICTURES = {"mm_tokens_per_image": 256, "boi_token_index": 500, "eoi_token_index": 501, "image_token_index": 510}


def whole(text: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A file around a text half, whose `architectures` it takes."""
    text = {name: value for name, value in text.items() if name != "architectures"}
    pictures = {**PICTURES, "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 16}}
    return {"architectures": [ARCHITECTURE], "model_type": "gemma3", "text_config": text, **pictures, **fields}


def write(directory: Path, variant: str, style: str) -> dict[str, np.ndarray]:
    """The checkpoint of a variant inside one with a tower. Gives the tensors of the variant."""
    layers, head, tower, projector = STYLES[style]
    tensors = random_tensors(variant, 1)
    named = {name.replace("model.", layers, 1).replace("lm_head.", head, 1): value for name, value in tensors.items()}
    named[f"{tower}encoder.layers.0.mlp.fc1.weight"] = np.ones((3, 2), np.float32)
    named[f"{projector}multi_modal_projector.mm_input_projection_weight"] = np.ones((3, 2), np.float32)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(whole(VARIANTS[variant])))
    save_file(named, directory / "model.safetensors")
    return tensors


def leaves(model: nnx.Module) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("variant", ["gemma3", "gemma3_nested"])
def test_it_is_the_text_model_by_both_styles_of_names(tmp_path, variant: str, style: str):
    """A tied head and one of its own. What is converted has the text half and is read by the same file."""
    tensors = write(tmp_path / "whole", variant, style)
    write_checkpoint(tmp_path / "text", variant, tensors)
    spec = read_spec(tmp_path / "whole")
    assert ["takes text only" in note for note in spec.notes] == [True]
    convert(tmp_path / "whole", tmp_path / "converted")
    expected = leaves(load_model(tmp_path / "text", read_spec(tmp_path / "text")))
    for name in ("whole", "converted"):
        for ours, theirs in zip(leaves(load_model(tmp_path / name, spec)), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_tensors_of_a_tower_are_for_it_alone_and_others_are_refused(tmp_path):
    tensors = random_tensors("gemma3", 1) | {"vision_tower.x": np.ones(3, np.float32)}
    write_checkpoint(tmp_path / "text", "gemma3", tensors)
    with pytest.raises(ModelError, match=r"holds 'vision_tower\.x', which this architecture does not have"):
        load_model(tmp_path / "text", read_spec(tmp_path / "text"))
    (tmp_path / "text" / "config.json").write_text(json.dumps(whole(VARIANTS["gemma3"])))
    load_model(tmp_path / "text", read_spec(tmp_path / "text"))
    write_checkpoint(tmp_path / "odd", "gemma3", tensors | {"audio_tower.x": np.ones(3, np.float32)})
    (tmp_path / "odd" / "config.json").write_text(json.dumps(whole(VARIANTS["gemma3"])))
    with pytest.raises(ModelError, match=r"holds 'audio_tower\.x'"):
        load_model(tmp_path / "odd", read_spec(tmp_path / "odd"))


def test_what_the_whole_file_may_not_say(tmp_path):
    text = VARIANTS["gemma3"]
    with pytest.raises(ModelError, match="has no field 'audio_config'"):
        read(tmp_path, whole(text, audio_config={"x": 1}))
    with pytest.raises(ModelError, match="use_bidirectional_attention must be False"):
        read(tmp_path, whole(text | {"use_bidirectional_attention": True}))
    with pytest.raises(ModelError, match="has no field 'attn_logit_softcapping'"):
        read(tmp_path, whole(text | {"attn_logit_softcapping": 50.0}))
    with pytest.raises(ModelError, match="rope_parameters must have an object for each kind of layer"):
        read(tmp_path, whole(text | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}))


ROPE = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024, "model_type": "gemma3_text"}
PUBLISHED = {
    # The text half as its file has it, and its parameters: those of the card without tower and projector.
    "gemma-3-4b-it": (ROPE | {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}, 3_880_263_168),
    "gemma-3-12b-it": (
        ROPE
        | {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
        | {"num_attention_heads": 16, "num_key_value_heads": 8},
        11_766_034_176,
    ),
    "gemma-3-27b-it": (
        ROPE
        | {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "head_dim": 128}
        | {"num_attention_heads": 32, "num_key_value_heads": 16, "query_pre_attn_scalar": 168},
        27_009_346_304,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_leaves_out_what_is_a_default(tmp_path, name: str):
    """Its context is that with scaled rope, which is for full layers only."""
    text, count = PUBLISHED[name]
    spec = read(tmp_path, whole(text, eos_token_id=[1, 106], image_token_index=262144, mm_tokens_per_image=256))
    assert (spec.vocab_size, spec.max_position_embeddings, spec.eos_token_ids) == (262208, 131072, (1, 106))
    sliding, full = spec.layers[0].attention, spec.layers[5].attention
    assert (sliding.window, sliding.rope.type, sliding.rope.theta) == (Window(1024), "default", 1e4)
    assert (full.window, full.rope.type, full.rope.theta, full.rope.factor) == (None, "linear", 1e6, 8.0)
    assert full.scale == pytest.approx(text.get("query_pre_attn_scalar", 256) ** -0.5)
    assert spec.tie_word_embeddings
    assert num_parameters(spec) == count
