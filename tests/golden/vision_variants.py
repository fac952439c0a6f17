"""Small random LLaVA checkpoints with their prompts, the same to the last bit wherever they are made.

As `variants.py`: the recorder runs this beside PyTorch, the tests run it beside JAX.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.golden.variants import LLAMA, random_numbers, random_tensor, random_tokens, tensor_shapes

SIZE = 28
IMAGE_TOKEN, VIDEO_TOKEN = 500, 501
TEXT_TOKENS = 500  # words of a prompt are below this
TEXT_LENS = (9, 6, 11)  # before, between and after the two items of a prompt

_TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIZE,
    "patch_size": 7,
}
_TEXT = {name: value for name, value in LLAMA.items() if name != "architectures"}
_MISTRAL = {**_TEXT, "model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None, "rope_theta": 1e6}
_PINPOINTS = [[SIZE, 2 * SIZE], [2 * SIZE, SIZE]]

VISION_VARIANTS: dict[str, dict[str, Any]] = {
    "llava": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE_TOKEN,
        "text_config": _TEXT,
        "vision_config": _TOWER,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    },
    "llava_class_token": {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_id": IMAGE_TOKEN,
        "multimodal_projector_bias": False,
        "text_config": _TEXT,
        "vision_config": {**_TOWER, "hidden_act": "gelu", "layer_norm_eps": 1e-3},
        "vision_feature_layer": [1, -1],
        "vision_feature_select_strategy": "full",
    },
    "llava_next": {
        "architectures": ["LlavaNextForConditionalGeneration"],
        "model_type": "llava_next",
        "image_grid_pinpoints": _PINPOINTS,
        "image_token_index": IMAGE_TOKEN,
        "text_config": _MISTRAL,
        "vision_config": _TOWER,
    },
    "llava_next_video": {
        "architectures": ["LlavaNextVideoForConditionalGeneration"],
        "model_type": "llava_next_video",
        "image_grid_pinpoints": _PINPOINTS,
        "image_token_index": IMAGE_TOKEN,
        "video_token_index": VIDEO_TOKEN,
        "text_config": _TEXT,
        "vision_config": {**_TOWER, "patch_size": 5},  # 5 patches along a side, 3 pixels and 1 patch too many
    },
}

ITEMS: dict[str, tuple[tuple[int, int] | int, tuple[int, int] | int]] = {
    "llava": ((SIZE, SIZE), (SIZE, SIZE)),
    "llava_class_token": ((SIZE, SIZE), (SIZE, SIZE)),
    "llava_next": ((30, 41), (61, 19)),
    "llava_next_video": (3, (23, 40)),
}
"""What the two items of a variant's prompt are: an image of this height and width, or so many frames of a video."""

_SIDES = [1, 2, 13, 100, 224, 335, 336, 337, 480, 500, 640, 671, 672, 673, 1000, 1008, 1333, 4000]
IMAGE_SIZES = np.array([(height, width) for height in _SIDES for width in _SIDES])
"""Heights and widths whose layouts by the resolutions of the published LLaVA-NeXT models are recorded."""

_MIXED = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
_OLD = {**_MIXED, "vision_tower.": "vision_tower.vision_model."}
_NEW = {
    "model.": "model.language_model.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "image_newline": "model.image_newline",
}
LAYOUTS = {"llava": _OLD, "llava_class_token": _NEW, "llava_next": _NEW, "llava_next_video": _MIXED}
"""Prefixes of tensor names in the checkpoint: of transformers 4, of 5 in memory, and of 5 when it saves."""


def vision_tensors(variant: str, seed: int) -> dict[str, np.ndarray]:
    """All weights of a checkpoint, under the names that the modules of `jsg.models` know them by."""
    shapes = tensor_shapes(VISION_VARIANTS[variant]["text_config"]) | _vision_shapes(VISION_VARIANTS[variant])
    return {name: random_tensor(f"{seed} {variant} {name}", name, shape) for name, shape in shapes.items()}


def _vision_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    tower, text_width = config["vision_config"], config["text_config"]["hidden_size"]
    width, inner, patch = tower["hidden_size"], tower["intermediate_size"], tower["patch_size"]
    layers = config.get("vision_feature_layer", -2)
    features = width * (len(layers) if isinstance(layers, list) else 1)
    bias = config.get("multimodal_projector_bias", True)
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.embeddings.class_embedding": (width,),
        "vision_tower.embeddings.patch_embedding.weight": (width, 3, patch, patch),
        "vision_tower.embeddings.position_embedding.weight": ((SIZE // patch) ** 2 + 1, width),
        "multi_modal_projector.linear_1.weight": (text_width, features),
        "multi_modal_projector.linear_2.weight": (text_width, text_width),
    }
    if config["model_type"] != "llava":
        shapes["image_newline"] = (text_width,)
    if bias:
        shapes |= {f"multi_modal_projector.linear_{i}.bias": (text_width,) for i in (1, 2)}
    norms = ["pre_layrnorm", "post_layernorm"]
    for layer in range(tower["num_hidden_layers"]):
        prefix = f"encoder.layers.{layer}"
        norms += [f"{prefix}.layer_norm1", f"{prefix}.layer_norm2"]
        projections = {f"self_attn.{name}_proj": (width, width) for name in ("q", "k", "v", "out")}
        for name, shape in (projections | {"mlp.fc1": (inner, width), "mlp.fc2": (width, inner)}).items():
            shapes[f"vision_tower.{prefix}.{name}.weight"] = shape
            shapes[f"vision_tower.{prefix}.{name}.bias"] = shape[:1]
    for name in norms:
        shapes |= {f"vision_tower.{name}.weight": (width,), f"vision_tower.{name}.bias": (width,)}
    return shapes


def vision_pixels(variant: str, seed: int, counts: tuple[int, int]) -> list[np.ndarray]:
    """Processed pixels float32 [tiles, 3, SIZE, SIZE] of the prompt's two items, which have so many tiles or frames."""
    return [
        random_numbers(f"{seed} {variant} pixels {i}", (count, 3, SIZE, SIZE)).astype(np.float32)
        for i, count in enumerate(counts)
    ]


def vision_prompt(variant: str, seed: int, token_counts: tuple[int, int]) -> list[int]:
    """Words, the first item's placeholders, words, the second's, words."""
    words = iter(random_tokens(variant, seed, sum(TEXT_LENS)))
    tokens = [next(words) % TEXT_TOKENS for _ in range(TEXT_LENS[0])]
    for item, count, text_len in zip(ITEMS[variant], token_counts, TEXT_LENS[1:], strict=True):
        tokens += [VIDEO_TOKEN if isinstance(item, int) else IMAGE_TOKEN] * count
        tokens += [next(words) % TEXT_TOKENS for _ in range(text_len)]
    return tokens


def write_vision_checkpoint(directory: Path, variant: str, tensors: dict[str, np.ndarray]) -> None:
    """A model directory as Hugging Face lays it out, in the one of its layouts that the variant stands for."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(VISION_VARIANTS[variant], indent=1))
    layout = LAYOUTS[variant]
    stored = {}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in layout if name.startswith(prefix)), "")
        stored[layout.get(prefix, "") + name.removeprefix(prefix)] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
