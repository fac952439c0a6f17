"""What files mean, beside transformers' own configuration classes, which need no PyTorch."""

import json
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from jsg.errors import ModelError
from jsg.models.registry import FAMILIES
from jsg.models.spec import ModelSpec
from tests.golden.variants import LLAMA
from tests.models.test_config import read

GONE = "absent"
ROPES = [
    {},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "yarn", "type": "linear", "factor": 2, "attention_factor": None, "truncate": False},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, "rope_theta": 7e5},
    {"rope_type": "default", "rope_theta": 5e4},
    {"type": "linear", "factor": 2.0},
    {"factor": 2.0},
]
FIELDS: dict[str, list[Any]] = {
    "num_key_value_heads": [2, 4, None],
    "head_dim": [24, None],
    "max_position_embeddings": [300],
    "rms_norm_eps": [1e-4],
    "rope_theta": [333.0, 10**6],
    "original_max_position_embeddings": [64],
    "sliding_window": [None, 7],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 1, 9],
    "layer_types": [None, ["full_attention"] * 2, ["sliding_attention", "full_attention"]],
    "tie_word_embeddings": [True, False],
    "rope_scaling": [None, *ROPES],
    "rope_parameters": [None, *ROPES],
    "num_experts": [3],
    "num_local_experts": [4],
    "is_causal": [True, False],
}


OTHERWISE = {
    "Cohere2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Gemma4ForCausalLM",
    "Glm4MoeForCausalLM",
}
"""Families with other names of fields, no head_dim of the file, first layers unlike others, or a switch for experts.
Goldens compare them."""


@pytest.mark.slow
@hypothesis.settings(max_examples=300, suppress_health_check=list(hypothesis.HealthCheck), deadline=None)
@hypothesis.given(
    architecture=st.sampled_from(sorted(FAMILIES.keys() - OTHERWISE)),
    fields=st.fixed_dictionaries({name: st.sampled_from([GONE, GONE, *values]) for name, values in FIELDS.items()}),
)
def test_a_file_means_what_it_means_in_transformers_or_is_refused(
    tmp_path: Path, architecture: str, fields: dict[str, Any]
):
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    said = {name: value for name, value in fields.items() if value != GONE}
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    model_type = FAMILIES[architecture].model_type
    file = {name: LLAMA[name] for name in kept} | {"architectures": [architecture], "model_type": model_type} | said
    try:
        ours = read(tmp_path, file)
    except ModelError:
        return
    try:
        theirs = AutoConfig.for_model(**json.loads(json.dumps(file)))
        theirs.standardize_rope_params()
    except (KeyError, TypeError, ValueError, ZeroDivisionError, StrictDataclassError):  # nothing to compare with
        return
    if theirs.num_key_value_heads is None:  # of which transformers makes no model
        return
    rope = theirs.rope_parameters
    rope = rope[theirs.layer_types[0]] if "full_attention" in rope else rope
    assert (ours.layers[0].attention.rope.type, ours.layers[0].attention.rope.theta) == (
        rope["rope_type"],
        rope["rope_theta"],
    )
    if ours.layers[0].attention.rope.type != "default":
        assert ours.layers[0].attention.rope.factor == rope["factor"]
    if ours.layers[0].attention.rope.type in ("yarn", "llama3"):
        assert (
            ours.layers[0].attention.rope.original_max_position_embeddings == rope["original_max_position_embeddings"]
        )
        assert ours.layers[0].attention.rope.truncate == rope.get("truncate", True)
    assert ours.layers[0].attention.kv_heads == theirs.num_key_value_heads
    assert ours.layers[0].attention.head_dim == (
        getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    )
    assert (ours.final_norm.eps, ours.tie_word_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    experts = getattr(theirs, "num_local_experts", None) or getattr(theirs, "num_experts", 0)
    assert getattr(ours.layers[0].mlp, "count", 0) == experts
    assert ours.layer_windows == windows(theirs, ours)


def windows(theirs: Any, ours: ModelSpec) -> tuple[int | None, ...]:
    """Those of each layer, as the models of these families take them from a configuration."""
    match theirs.model_type:
        case "llama":
            return (None,) * ours.num_layers
        case "mistral" | "mixtral" | "qwen3_moe":
            return (theirs.sliding_window,) * ours.num_layers
    if getattr(theirs, "layer_types", None) is None:  # a family without windows
        return (None,) * ours.num_layers
    return tuple(theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types)
