"""Models around a text model of which the text half is served."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jsg.errors import ModelError
from jsg.models.config import read_spec
from jsg.models.families import mistral3
from jsg.models.loading import load_model, with_own_head
from jsg.models.spec import TensorNames
from jsg.models.wrapper import TEXT_PREFIXES
from tests.golden.variants import random_tensors, write_checkpoint
from tests.models.sizes import num_parameters
from tests.models.test_config import read

SMALL_3_2: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral", "patch_size": 14, "unknown": 7},
    "vision_feature_layer": -1,
}
VARIANT = "mistral3_tied"


def checkpoint(directory: Path, **more: np.ndarray) -> dict[str, np.ndarray]:
    tensors = random_tensors(VARIANT, 1) | more
    write_checkpoint(directory, VARIANT, tensors)
    return tensors


def test_the_text_half_of_mistral_small(tmp_path):
    spec = read(tmp_path, SMALL_3_2)
    assert (spec.architecture, spec.num_layers) == ("MistralForCausalLM", 40)
    assert (spec.vision, spec.notes) == (None, (mistral3.WRAPPER.note,))
    assert (spec.layers[0].attention.rope.theta, spec.max_position_embeddings) == (1e9, 131072)
    assert spec.tie_word_embeddings  # the default of the whole; the file has a head, which counts more
    assert num_parameters(spec) + spec.vocab_size * spec.hidden_size == 23_572_403_200
    # A file without a text half means this one. The class of a half that is there has other defaults.
    assert read(tmp_path, {name: value for name, value in SMALL_3_2.items() if name != "text_config"}) == spec
    assert read(tmp_path, changed_half({})).hidden_size == 4096


def changed_half(half: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**SMALL_3_2, "text_config": half, **fields}


@pytest.mark.parametrize(
    ("file", "named"),
    [
        (changed_half({"model_type": "gemma"}), "text_config: model_type must be one of llama"),
        (changed_half({"attn_logit_softcapping": 3.0}), "text_config: MistralForCausalLM has no field"),
        (changed_half({}, is_causal=False), "is_causal must be true"),
        (changed_half({}, logit_factor=3.0), "Mistral3ForConditionalGeneration has no field 'logit_factor'"),
        (changed_half({"quantization_config": {"quant_method": "hqq"}}), "text_config: quantization_config"),
    ],
)
def test_what_may_change_answers_is_refused(tmp_path, file, named):
    with pytest.raises(ModelError, match=named):
        read(tmp_path, file)


def test_names_of_transformers_4_and_5_are_the_same_model(tmp_path):
    old = checkpoint(tmp_path)
    new = {name.replace("language_model.model.", "model.language_model."): tensor for name, tensor in old.items()}
    new = {name if "language" in name else f"model.{name}": tensor for name, tensor in new.items()}
    here = TensorNames(prefixes=TEXT_PREFIXES).here
    assert [here(name) for name in old if "language" in name] == [here(name) for name in new if "language" in name]
    first = load_model(tmp_path, read_spec(tmp_path))
    write_checkpoint(tmp_path, VARIANT, new)
    second = load_model(tmp_path, read_spec(tmp_path))
    for one, other in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_array_equal(one, other)


def leaves(model: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]


def test_an_own_head_of_a_tied_file_is_used(tmp_path):
    head = np.ones((512, 64), np.float32)
    checkpoint(tmp_path, **{"language_model.lm_head.weight": head})
    spec = read_spec(tmp_path)
    assert spec.tie_word_embeddings
    assert not with_own_head(tmp_path, spec).tie_word_embeddings
    assert load_model(tmp_path, spec).logits(jnp.eye(64)).std() == 0


def test_only_tensors_of_the_tower_may_be_left_over(tmp_path):
    checkpoint(tmp_path, **{"vision_tower.more.weight": np.zeros(3, np.float32)})
    load_model(tmp_path, read_spec(tmp_path))
    checkpoint(tmp_path, **{"audio_tower.weight": np.zeros(3, np.float32)})
    with pytest.raises(ModelError, match="holds 'audio_tower"):
        load_model(tmp_path, read_spec(tmp_path))
