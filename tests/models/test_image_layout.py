import zlib

import numpy as np

from jsg.models.image_layout import NEWLINE, image_layout, num_tiles, tile_grid, video_layout
from jsg.models.vision_config import VisionConfig, read_vision
from jsg.sources import Fields
from tests.golden.record import DATA


def published(architecture: str) -> VisionConfig:
    """The tower that a silent config.json means: ViT-L at 336 pixels."""
    return read_vision(Fields("config.json", {}), architecture, 32064)


def small(**changes) -> VisionConfig:
    shape = {
        "kind": "llava_next",
        "image_size": 4,
        "patch_size": 2,
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_layers": 1,
        "num_heads": 1,
        "feature_layers": (1,),
        "image_token_id": 0,
        "grid_pinpoints": ((4, 8), (8, 4)),
    }
    return VisionConfig(**{**shape, **changes})


def test_layouts_of_any_size_are_those_of_hugging_face():
    config = published("LlavaNextForConditionalGeneration")
    with np.load(DATA / "image_layouts.npz", allow_pickle=False) as file:
        sizes, recorded = file["sizes"].tolist(), file["crc32"].tolist()
    layouts = [image_layout(config, (height, width)) for height, width in sizes]
    assert [zlib.crc32(layout.astype("<i4").tobytes()) for layout in layouts] == recorded
    for size, layout in zip(sizes, layouts, strict=True):
        assert layout.dtype == np.int32
        patches = layout[layout != NEWLINE]
        assert len(set(patches.tolist())) == len(patches)  # no patch twice
        assert patches.max() < num_tiles(config, tuple(size)) * config.patches_per_tile


def test_rows_run_across_tiles_and_end_in_a_newline():
    layout = image_layout(small(), (4, 8))
    assert layout.tolist() == [0, 1, 2, 3, 4, 5, 8, 9, NEWLINE, 6, 7, 10, 11, NEWLINE]


def test_padding_is_left_out():
    assert image_layout(small(), (4, 4)).tolist() == [0, 1, 2, 3, 5, 8, NEWLINE, 7, 10, NEWLINE]
    assert image_layout(small(), (200, 1000)).tolist() == [0, 1, 2, 3]  # thinner than a patch
    assert image_layout(small(), (1000, 200)).tolist() == [0, 1, 2, 3] + [NEWLINE] * 4


def test_a_tall_image_takes_the_tall_grid():
    assert tile_grid(small(), (9, 4)) == (2, 1) and tile_grid(small(), (4, 9)) == (1, 2)


def test_llava_1_5_shows_every_patch_of_one_tile_whatever_the_size():
    config = published("LlavaForConditionalGeneration")
    assert num_tiles(config, (5, 4000)) == 1
    assert image_layout(config, (5, 4000)).tolist() == list(range(576))


def test_frames_follow_one_another():
    config = published("LlavaNextVideoForConditionalGeneration")
    assert video_layout(config, 3).tolist() == list(range(3 * 144))
