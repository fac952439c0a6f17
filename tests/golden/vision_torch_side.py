"""The half of the recorder of vision models that imports torch: one file per variant. Started by `record.py`."""

import json
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForImageTextToText, LlavaNextConfig, LlavaNextModel
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from tests.golden.torch_side import COLUMNS, FIRST_SEED, MIN_MARGIN
from tests.golden.variants import weights_sha256
from tests.golden.vision_variants import (
    IMAGE_SIZES,
    IMAGE_TOKEN,
    ITEMS,
    SIZE,
    TEXT_TOKENS,
    VISION_VARIANTS,
    vision_pixels,
    vision_prompt,
    vision_tensors,
    write_vision_checkpoint,
)

GREEDY_LEN = 16
MIN_DISTINCT_TOKENS = 8
NUM_WHOLE = 6
PATCHES_PER_TILE = (336 // 14) ** 2


def main(directory: Path, variants: list[str]) -> None:
    torch.set_num_threads(1)
    for variant in variants:
        seed = FIRST_SEED
        while (arrays := record(variant, seed)) is None:
            seed += 1
        target = directory / f"{variant}.npz"
        np.savez_compressed(target, **arrays)
        print(f"{variant}: {target.stat().st_size} bytes")
    np.savez_compressed(directory / "image_layouts.npz", sizes=IMAGE_SIZES, crc32=layout_checksums())


def layout_checksums() -> np.ndarray:
    """Per size of `IMAGE_SIZES`, the checksum of which patch each token takes, where a patch is its own index."""
    model = LlavaNextModel.__new__(LlavaNextModel)  # the method reads its config only
    torch.nn.Module.__init__(model)
    model.config = LlavaNextConfig()
    checksums = []
    for size in IMAGE_SIZES.tolist():
        pinpoints, tower = model.config.image_grid_pinpoints, model.config.vision_config
        num_rows = image_size_to_num_patches(size, pinpoints, tower.image_size) * PATCHES_PER_TILE
        rows = torch.arange(num_rows, dtype=torch.float64).reshape(-1, PATCHES_PER_TILE, 1)
        newline = torch.full((1,), -1.0, dtype=torch.float64)
        packed, _ = model.pack_image_features([rows], [size], "default", newline)
        checksums.append(zlib.crc32(packed[0].numpy().astype("<i4").tobytes()))
    return np.array(checksums, np.uint32)


@torch.no_grad()
def record(variant: str, seed: int) -> dict[str, Any] | None:
    """What the file holds; None if the greedy continuation of this seed is too near to a tie, or repeats itself."""
    tensors = vision_tensors(variant, seed)
    model = load(variant, tensors)
    tile_counts = tuple(count_tiles(variant, item) for item in ITEMS[variant])
    media = inputs_of(variant, vision_pixels(variant, seed, tile_counts))
    features = features_of(model, variant, media)
    tokens = vision_prompt(variant, seed, tuple(map(len, features)))
    made = [*tokens]
    margins = []
    for _ in range(GREEDY_LEN + 1):
        logits = model(torch.tensor([made]), **media).logits[0].numpy()
        best = np.sort(logits[-1])[-2:]
        margins.append(float(best[1] - best[0]))
        made.append(int(logits[-1].argmax()))
        if made[-1] >= TEXT_TOKENS:  # a placeholder that nothing stands for
            return None
    logits, greedy = logits[: len(tokens)], made[len(tokens) : -1]
    print(f"{variant}: seed {seed}, std {logits.std():.3f}, margin {min(margins):.5f}, {len(set(greedy))} distinct")
    if min(margins[:-1]) < MIN_MARGIN or len(set(greedy)) < MIN_DISTINCT_TOKENS:
        return None
    note = {
        "config": VISION_VARIANTS[variant],
        "seed": seed,
        "weights_sha256": weights_sha256(tensors),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "logits_std": float(logits.std()),
        "smallest_greedy_margin": min(margins[:-1]),
    }
    whole = np.linspace(0, len(tokens) - 1, NUM_WHOLE).astype(int)
    return {
        "note": np.array(json.dumps(note)),
        "tokens": np.array(tokens, np.int32),
        "features": np.concatenate(features),
        "columns": COLUMNS,
        "column_logits": logits[:, COLUMNS],
        "whole_positions": whole,
        "whole_logits": logits[whole],
        "greedy": np.array(greedy, np.int32),
    }


def count_tiles(variant: str, item: tuple[int, int] | int) -> int:
    """Tiles of an image by the Hugging Face implementation, or frames of a video."""
    pinpoints = VISION_VARIANTS[variant].get("image_grid_pinpoints")
    if isinstance(item, int) or pinpoints is None:
        return item if isinstance(item, int) else 1
    return image_size_to_num_patches(item, pinpoints, SIZE)


def inputs_of(variant: str, pixels: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """The inputs of a forward pass beside the tokens."""
    items = list(zip(ITEMS[variant], map(torch.from_numpy, pixels), strict=True))
    images = [(size, tiles) for size, tiles in items if not isinstance(size, int)]
    media = {"pixel_values": torch.cat([tiles for _, tiles in images])}
    if "image_grid_pinpoints" in VISION_VARIANTS[variant]:
        most = max(len(tiles) for _, tiles in images)
        padded = [torch.cat([tiles, torch.zeros(most - len(tiles), *tiles.shape[1:])]) for _, tiles in images]
        media = {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor([size for size, _ in images])}
    videos = [frames for size, frames in items if isinstance(size, int)]
    return media | ({"pixel_values_videos": torch.stack(videos)} if videos else {})


def features_of(model: Any, variant: str, media: dict[str, torch.Tensor]) -> list[np.ndarray]:
    """The rows that stand in for each item's tokens, in the order of the items; all images have the same kind."""
    image_inputs = {name: value for name, value in media.items() if name != "pixel_values_videos"}
    images = iter(model.model.get_image_features(**image_inputs).pooler_output)
    videos = iter(())
    if "pixel_values_videos" in media:
        videos = iter(model.model.get_video_features(media["pixel_values_videos"]).pooler_output)
    items = [next(videos if isinstance(item, int) else images).numpy() for item in ITEMS[variant]]
    return [rows.reshape(-1, rows.shape[-1]) for rows in items]


def load(variant: str, tensors: dict[str, np.ndarray]) -> torch.nn.Module:
    """The Hugging Face model; stops if one tensor does not fit it."""
    with tempfile.TemporaryDirectory() as directory:
        write_vision_checkpoint(Path(directory), variant, tensors)
        model, report = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {name: found for name, found in report.items() if found}
    if problems:
        sys.exit(f"{variant}: the checkpoint does not fit the implementation: {problems}")
    assert model.config.image_token_id == IMAGE_TOKEN
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
