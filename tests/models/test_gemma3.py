"""Gemma 3 with a tower, of which the text half is served: see `test_wrapper.py` too."""

from typing import Any

import pytest

from jsg.errors import ModelError
from jsg.models.wrapper import TEXT_ONLY
from tests.golden.variants import VARIANTS
from tests.models.sizes import num_parameters
from tests.models.test_config import read


def whole(text: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A file around a text half."""
    around = {name: value for name, value in VARIANTS["gemma3_around"].items() if name != "tie_word_embeddings"}
    return {**around, "text_config": text, **fields}


def test_what_the_whole_file_may_not_say(tmp_path):
    text = {name: value for name, value in VARIANTS["gemma3"].items() if name != "architectures"}
    with pytest.raises(ModelError, match="has no field 'audio_config'"):
        read(tmp_path, whole(text, audio_config={"x": 1}))
    with pytest.raises(ModelError, match="use_bidirectional_attention must be false"):
        read(tmp_path, whole(text | {"use_bidirectional_attention": True}))
    with pytest.raises(ModelError, match="has no field 'attn_logit_softcapping'"):
        read(tmp_path, whole(text | {"attn_logit_softcapping": 50.0}))
    flat = {"rope_type": "default", "rope_theta": 1e6}
    with pytest.raises(ModelError, match="rope_parameters must have an object for each kind of layer"):
        read(tmp_path, whole(text | {"rope_parameters": flat}))


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
    assert sliding.rope and full.rope
    assert (sliding.window, sliding.rope.type, sliding.rope.theta) == (1024, "default", 1e4)
    assert (full.window, full.rope.type, full.rope.theta, full.rope.factor) == (None, "linear", 1e6, 8.0)
    assert full.scale == pytest.approx(text.get("query_pre_attn_scalar", 256) ** -0.5)
    assert (spec.tie_word_embeddings, spec.notes) == (True, (TEXT_ONLY,))
    assert num_parameters(spec) == count
