"""Config files of LLaVAs that people publish, with the fields that they have: each is read as its authors mean it.

Nothing is allocated. That a shape is read whole shows in the number of parameters, which model cards state. The table
of `published.py` has the models that read text alone.
"""

import dataclasses
from typing import Any

import pytest

from jsg.models.block_spec import RopeSpec
from tests.models.sizes import num_parameters
from tests.models.test_config import read
from tests.models.test_vision_config import LLAVA_1_5, vision

PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
VICUNA_7B: dict[str, Any] = {
    "_name_or_path": "lmsys/vicuna-7b-v1.5",
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 32064,
}
VICUNA_13B = VICUNA_7B | {
    "_name_or_path": "lmsys/vicuna-13b-v1.5",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_attention_heads": 40,
    "num_hidden_layers": 40,
    "num_key_value_heads": 40,
}
HERMES_YI_34B = VICUNA_7B | {
    "_name_or_path": "NousResearch/Nous-Hermes-2-Yi-34B",
    "eos_token_id": 7,
    "hidden_size": 7168,
    "intermediate_size": 20480,
    "num_attention_heads": 56,
    "num_hidden_layers": 60,
    "num_key_value_heads": 8,
    "rope_theta": 5000000.0,
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "vocab_size": 64064,
}
MISTRAL_7B = {
    "_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
    "architectures": ["MistralForCausalLM"],
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "vocab_size": 32064,
}


def llava_next(text: dict[str, Any], image_token_index: int) -> dict[str, Any]:
    return LLAVA_1_5 | {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "image_grid_pinpoints": PINPOINTS,
        "image_token_index": image_token_index,
        "model_type": "llava_next",
        "text_config": text,
        "use_image_newline_parameter": True,
    }


def llava_next_video(text: dict[str, Any], video_token_index: int) -> dict[str, Any]:
    return llava_next(text, video_token_index + 1) | {
        "architectures": ["LlavaNextVideoForConditionalGeneration"],
        "image_seq_length": 576,
        "model_type": "llava_next_video",
        "spatial_pool_mode": "average",
        "spatial_pool_out_channels": 1024,
        "spatial_pool_stride": 2,
        "video_seq_length": 288,
        "video_token_index": video_token_index,
    }


SCALED_NOWHERE = VICUNA_7B | {"factor": 2.0, "type": "linear"}
"""As published with LLaVA-NeXT-Video 7B: a scaling of positions where neither Hugging Face nor jsg reads one."""

VISION = {
    # The file, parameters of the text half, (width, heads, KV heads), base of the rope, (image, video token).
    "llava-1.5-7b": (LLAVA_1_5, 6_738_939_904, (4096, 32, 32), 1e4, (32000, None)),
    "llava-1.5-13b": (LLAVA_1_5 | {"text_config": VICUNA_13B}, 13_016_519_680, (5120, 40, 40), 1e4, (32000, None)),
    "llava-v1.6-mistral-7b": (llava_next(MISTRAL_7B, 32000), 7_242_256_384, (4096, 32, 8), 1e6, (32000, None)),
    "llava-v1.6-vicuna-7b": (llava_next(VICUNA_7B, 32000), 6_738_939_904, (4096, 32, 32), 1e4, (32000, None)),
    "llava-v1.6-vicuna-13b": (llava_next(VICUNA_13B, 32000), 13_016_519_680, (5120, 40, 40), 1e4, (32000, None)),
    "llava-v1.6-34b": (llava_next(HERMES_YI_34B, 64000), 34_389_834_752, (7168, 56, 8), 5e6, (64000, None)),
    "video-7b": (llava_next_video(SCALED_NOWHERE, 32000), 6_738_939_904, (4096, 32, 32), 1e4, (32001, 32000)),
    "video-7b-32k": (llava_next_video(MISTRAL_7B, 32000), 7_242_256_384, (4096, 32, 8), 1e6, (32001, 32000)),
    "video-34b": (llava_next_video(HERMES_YI_34B, 64000), 34_389_834_752, (7168, 56, 8), 5e6, (64001, 64000)),
}


@pytest.mark.parametrize("name", VISION)
def test_the_published_llavas(tmp_path, name: str):
    file, parameters, shape, theta, tokens = VISION[name]
    config, tower = read(tmp_path, file), vision(tmp_path, file)
    assert (config.hidden_size, config.layers[0].attention.heads, config.layers[0].attention.kv_heads) == shape
    assert (config.layers[0].attention.head_dim, config.layers[0].attention.rope, any(config.layer_windows)) == (
        128,
        RopeSpec(theta=theta),
        False,
    )
    assert config.max_position_embeddings == file["text_config"]["max_position_embeddings"]
    assert (config.bos_token_id, config.eos_token_ids) == (1, (file["text_config"].get("eos_token_id", 2),))
    assert num_parameters(dataclasses.replace(config, vision=None)) == parameters
    assert (tower.image_token_id, tower.video_token_id) == tokens
    assert (tower.patches_per_tile, tower.patches_per_frame) == (576, 0 if tokens[1] is None else 144)
    assert tower.grid_pinpoints == (() if name.startswith("llava-1.5") else tuple(map(tuple, PINPOINTS)))


def test_a_whole_llava_has_the_parameters_of_its_card_but_what_nobody_reads(tmp_path):
    """LLaVA-1.5 7B has 7 063 427 072; the tower's last layer and last norm are not run."""
    tower_layer = 4 * (1024 * 1024 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    assert num_parameters(read(tmp_path, LLAVA_1_5)) == 7_063_427_072 - tower_layer - 2 * 1024
