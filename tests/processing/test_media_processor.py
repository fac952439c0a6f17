"""Tiles against Hugging Face's own Pillow processors, which are run here: they need no PyTorch."""

import importlib
import json

import numpy as np
import pytest
from PIL import Image as pillow

from jsg.errors import ModelError, RequestError
from jsg.processing.media.pixel_config import read_pixel_config
from jsg.processing.media.processor import PixelProcessor

SIZES = [(1, 1), (1, 2), (1, 200), (200, 1), (3, 90), (57, 33), (32, 32), (31, 64), (64, 64), (96, 97), (211, 337)]
SMALL = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
PINPOINTS = [[32, 64], [64, 32], [64, 64], [96, 32], [32, 96]]
CASES = {
    "clip": ("clip", {"image_processor_type": "CLIPImageProcessor", **SMALL}),
    "clip of old": (
        "clip",
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "crop_size": 32},
    ),
    "clip by lines": (
        "clip",
        {"image_processor_type": "CLIPImageProcessorFast", "size": 31, "crop_size": 37, "resample": 2, "do_pad": True},
    ),
    "without resizing": (
        "clip",
        {"image_processor_type": "CLIPImageProcessor", **SMALL, "do_resize": False},
    ),
    "without cropping": (
        "clip",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"height": 24, "width": 24},
            "do_center_crop": False,
            "do_normalize": False,
        },
    ),
    "other numbers": (
        "clip",
        {
            "image_processor_type": "CLIPImageProcessorPil",
            **SMALL,
            "rescale_factor": 0.01,
            "image_mean": [0.1, 0.2, 0.3],
            "image_std": [1, 0.5, 0.25],
        },
    ),
    "llava": ("llava", {"image_processor_type": "LlavaImageProcessor", **SMALL}),
    "llava, padded": ("llava", {"image_processor_type": "LlavaImageProcessor", **SMALL, "do_pad": True}),
    "llava-next": (
        "llava_next",
        {"image_processor_type": "LlavaNextImageProcessor", **SMALL, "image_grid_pinpoints": PINPOINTS},
    ),
    "llava-next, other base": (
        "llava_next",
        {
            "image_processor_type": "LlavaNextImageProcessorFast",
            "size": {"height": 40, "width": 36},
            "crop_size": 32,
            "image_grid_pinpoints": PINPOINTS,
        },
    ),
}


def _image(size: tuple[int, int], seed: int = 0) -> np.ndarray:
    """A picture with smooth parts and noise."""
    height, width = size
    noise = np.random.default_rng(seed).integers(0, 80, (height, width, 3))
    slope = np.linspace(0, 175, height)[:, None, None] * np.linspace(0, 1, width)[None, :, None]
    return (noise + slope).astype(np.uint8)


def _processor(directory, fields: dict, name: str = "preprocessor_config.json", kind="image") -> PixelProcessor:
    (directory / name).write_text(json.dumps(fields))
    return PixelProcessor(read_pixel_config(directory, kind))


def _theirs(family: str, fields: dict, image: np.ndarray) -> np.ndarray:
    """The tiles of Hugging Face's processor: [tiles, 3, side, side]. Its import takes a second, so it is made here."""
    module = importlib.import_module(f"transformers.models.{family}.image_processing_pil_{family}")
    cls = getattr(module, {"clip": "CLIP", "llava": "Llava", "llava_next": "LlavaNext"}[family] + "ImageProcessorPil")
    arguments = {name: value for name, value in fields.items() if not name.endswith("_type")}
    pixels = cls(**arguments)(pillow.fromarray(image), return_tensors="np")["pixel_values"]
    return pixels[0] if pixels.ndim == 5 else pixels


@pytest.mark.parametrize("case", CASES)
def test_tiles_are_those_of_hugging_face(case, tmp_path):
    family, fields = CASES[case]
    processor = _processor(tmp_path, fields)
    for size in SIZES:
        image = _image(size)
        ours, theirs = processor.image(image), _theirs(family, fields, image)
        assert ours.pixels.dtype == np.float32 and ours.size == size
        assert len(ours.pixels) == 1 + ours.grid[0] * ours.grid[1]
        np.testing.assert_allclose(ours.pixels, theirs, rtol=0, atol=1e-6, err_msg=str(size))


@pytest.mark.parametrize(("family", "name"), [("clip", "CLIP"), ("llava_next", "LlavaNext")])
def test_tiles_of_real_sizes_are_those_of_hugging_face(family, name, tmp_path):
    sides = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    fields = {"image_processor_type": f"{name}ImageProcessor", **sides}
    image = _image((480, 641))
    ours = _processor(tmp_path, fields).image(image)
    assert ours.grid == ((2, 2) if name == "LlavaNext" else (0, 0))
    np.testing.assert_allclose(ours.pixels, _theirs(family, fields, image), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"image_processor_type": "LlavaImageProcessor", "do_pad": True, **SMALL}, (60, 9000)),
        ({"image_processor_type": "CLIPImageProcessor", "size": 1000, "crop_size": 1000}, (200, 1)),
    ],
)
def test_a_line_is_refused_before_a_step_makes_it_huge(fields, size, tmp_path):
    processor = _processor(tmp_path, fields)
    with pytest.raises(RequestError, match=r"would take (9000 × 9000|1000 × 200000)"):
        processor.image(_image(size))


def test_a_video_is_processed_frame_by_frame(tmp_path):
    fields = {"video_processor_type": "LlavaNextVideoVideoProcessor", **SMALL, "do_sample_frames": False}
    processor = _processor(tmp_path, {"video_processor": fields}, "processor_config.json", "video")
    frames = [_image((45, 70), seed) for seed in range(3)]
    ours = processor.video(np.stack(frames))
    theirs = np.concatenate([_theirs("clip", SMALL, frame) for frame in frames])
    assert ours.mode == "video" and ours.size == (45, 70)
    np.testing.assert_allclose(ours.pixels, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["LlavaNextImageProcessor", "LlavaNextVideoImageProcessor"])
def test_a_model_of_pictures_and_videos_may_have_one_file(name, tmp_path):
    fields = {"image_processor_type": name, **SMALL, "image_grid_pinpoints": PINPOINTS}
    assert _processor(tmp_path, fields).config.grid is not None
    config = read_pixel_config(tmp_path, "video")
    assert config.grid is None and config.crop_size == (32, 32)
    own = {"video_processor_type": "LlavaNextVideoVideoProcessor", "size": 16, "crop_size": 16}
    assert _processor(tmp_path, own, "video_preprocessor_config.json", "video").config.tile_size == 16


def test_the_section_of_new_files_comes_first(tmp_path):
    section = {"image_processor": {"image_processor_type": "CLIPImageProcessor", **SMALL}, "processor_class": "Llava"}
    _processor(tmp_path, {"image_processor_type": "CLIPImageProcessor"})
    assert _processor(tmp_path, section, "processor_config.json").config.tile_size == 32


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"image_processor_type": "SiglipImageProcessor"}, "image_processor_type"),
        ({"image_processor_type": None}, "image_processor_type"),
        ({"size": {"longest_edge": 32}}, "size"),
        ({"size": {"shortest_edge": 0}}, "size"),
        ({"size": {"height": 32, "width": "32"}}, "size"),
        ({"size": 10**9}, "size"),
        ({"size": True}, "size"),
        ({"crop_size": {"shortest_edge": 32}}, "crop_size"),
        ({"crop_size": {"height": 32, "width": 31}}, "crop_size"),
        ({"do_center_crop": False}, "size"),
        ({"do_center_crop": False, "do_resize": False}, "size"),
        ({"do_resize": "yes"}, "do_resize"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
        ({"resample": 6}, "resample"),
        ({"resample": True}, "resample"),
        ({"rescale_factor": float("nan")}, "rescale_factor"),
        ({"rescale_factor": 0}, "rescale_factor"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_mean": [0.5, 0.5, float("inf")]}, "image_mean"),
        ({"image_mean": [0.5, 0.5, 2.0], "do_pad": True}, "image_mean"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std"),
        (
            {"image_grid_pinpoints": [[32, 33]], "image_processor_type": "LlavaNextImageProcessor"},
            "image_grid_pinpoints",
        ),
        ({"image_grid_pinpoints": [], "image_processor_type": "LlavaNextImageProcessor"}, "image_grid_pinpoints"),
        (
            {"image_grid_pinpoints": [[3200, 3200]], "image_processor_type": "LlavaNextImageProcessor"},
            "image_grid_pinpoints",
        ),
        ({"pad_size": {"height": 3, "width": 3}}, "pad_size"),
        ({"do_sharpen": True}, "do_sharpen"),
    ],
)
def test_a_field_that_cannot_work_is_refused_by_name(change, named, tmp_path):
    with pytest.raises(ModelError, match=f"preprocessor_config.json: {named} "):
        _processor(tmp_path, {"image_processor_type": "LlavaImageProcessor", **SMALL, **change})


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, " " * 2**21])
def test_a_damaged_file_is_refused(text, tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"preprocessor_config\.json must"):
        read_pixel_config(tmp_path)


def test_a_model_without_a_file_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"must have preprocessor_config\.json"):
        read_pixel_config(tmp_path)
