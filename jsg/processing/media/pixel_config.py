"""The steps that make a model's tiles of a picture, as `preprocessor_config.json` and its companions say.

They are data from outside: every number is bounded, and a field that would change the pixels and is not supported is
refused by name.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from jsg.errors import ModelError
from jsg.processing.tiles import read_pinpoints
from jsg.sources import Fields, read_json

Kind = Literal["image", "video"]

MAX_SIDE = 4096

_PROCESSORS = {
    "CLIPFeatureExtractor": "clip",
    "CLIPImageProcessor": "clip",
    "LlavaImageProcessor": "llava",
    "LlavaNextImageProcessor": "llava_next",
    "LlavaNextVideoImageProcessor": "llava_next",
    "LlavaNextVideoVideoProcessor": "video",
}
"""Name in the file, without Fast or Pil at its end → the steps. Equal steps give equal pixels."""

MAX_RESAMPLING = 5
"""Pillow's numbers are those of nearest, Lanczos, bilinear, bicubic, box and Hamming."""
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)

_READ = frozenset(
    "size crop_size resample rescale_factor image_mean image_std image_grid_pinpoints default_to_square do_resize "
    "do_center_crop do_rescale do_normalize do_convert_rgb do_pad".split()
)
# They name classes and how tensors are passed on, and which frames of a video are shown, which the request says.
_WITHOUT_EFFECT = frozenset(
    "image_processor_type feature_extractor_type video_processor_type processor_class _valid_processor_keys "
    "aspect_ratio_setting data_format input_data_format return_tensors device disable_grouping "
    "do_sample_frames num_frames fps return_metadata video_metadata".split()
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """How a picture is cut into tiles, each of which then goes through the steps of its `PixelConfig`.

    Attributes:
        pinpoints: Heights and widths, in pixels, at which a picture may be cut; never empty.
        tile_size: Side of the tiles, which divides all pinpoints.
        base_size: Height and width to which the whole picture is resized for the first tile.
    """

    pinpoints: tuple[tuple[int, int], ...]
    tile_size: int
    base_size: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PixelConfig:
    """The steps from a picture to the tiles that a vision tower reads, in order. None leaves a step out.

    Attributes:
        grid: How the picture is cut into tiles; None for one tile.
        pad_colour: Red, green and blue of the padding that makes a tile square.
        resize: The new length of a tile's shorter side, or its new height and width.
        resample: Pillow's number of the filter that resizes.
        crop_size: Height and width that are cut out of the middle, with black padding.
        rescale_factor: The factor of the values, which are 0 to 255.
        mean: What is then subtracted, for each channel.
        std: What the difference is divided by, for each channel; None if `mean` is.
    """

    grid: Grid | None = None
    pad_colour: tuple[int, ...] | None = None
    resize: int | tuple[int, int] | None
    resample: int
    crop_size: tuple[int, int] | None
    rescale_factor: float | None
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None

    @property
    def tile_size(self) -> int:
        """Height and width of the tiles that come out."""
        size = self.crop_size or self.resize
        assert isinstance(size, tuple)  # `read_pixel_config` refuses others
        return size[0]


def read_pixel_config(directory: Path, kind: Kind = "image") -> PixelConfig:
    """The steps for the pictures of a model, or for the frames of its videos.

    The first of these that exists is read: the section of `processor_config.json` (transformers 5),
    `video_preprocessor_config.json` for videos, `preprocessor_config.json`.

    Raises:
        ModelError: A file is missing or damaged, or a field is out of bounds or not supported.
    """
    fields = _find(directory, kind)
    steps = _processor(fields)
    if kind == "video" and steps == "llava_next":
        steps = "video"  # one file names the steps of pictures for both, but a frame is not cut into tiles
    _refuse_unknown(fields)
    resizes, crops = fields.flag("do_resize", True), fields.flag("do_center_crop", True)
    size = _size(fields, "size", 224, as_square=fields.flag("default_to_square", False))
    crop = _size(fields, "crop_size", 224, as_square=True)
    assert isinstance(crop, tuple)
    final = crop if crops else size if resizes else None
    is_square = isinstance(final, tuple) and final[0] == final[1]
    fields.require(is_square, "crop_size" if crops else "size", "end in squares of one size", final)
    mean = _channels(fields, "image_mean", _CLIP_MEAN, low=-1e3)
    normalises = fields.flag("do_normalize", True)
    pads = fields.flag("do_pad", False)  # only `llava` pads to a square; others pad to the largest of equal tiles
    return PixelConfig(
        grid=_grid(fields, size, crop[0]) if steps == "llava_next" else None,
        pad_colour=_colour(fields, mean) if pads and steps == "llava" else None,
        resize=size if resizes else None,
        resample=fields.integer("resample", default=3, low=0, high=MAX_RESAMPLING),
        crop_size=crop if crops else None,
        rescale_factor=fields.number("rescale_factor", 1 / 255, high=1e3) if fields.flag("do_rescale", True) else None,
        mean=mean if normalises else None,
        std=_channels(fields, "image_std", _CLIP_STD, low=1e-6) if normalises else None,
    )


def _find(directory: Path, kind: Kind) -> Fields:
    """The fields that describe pictures or videos."""
    places = [("processor_config.json", f"{kind}_processor"), ("preprocessor_config.json", None)]
    if kind == "video":
        places.insert(1, ("video_preprocessor_config.json", None))
    for name, section in places:
        if (directory / name).is_file():
            whole = Fields(name, read_json(directory / name))
            found = whole if section is None else whole.section(section)
            if found is not None and found.names():
                return found
    raise ModelError(
        "a model that sees must have preprocessor_config.json, but this directory has none; fetch the model again"
    )


def _processor(fields: Fields) -> str:
    """The name of the steps, a value of `_PROCESSORS`."""
    names = ("video_processor_type", "image_processor_type", "feature_extractor_type")
    given = next((name for name in names if fields.get(name) is not None), "image_processor_type")
    value = fields.get(given)
    name = value.removesuffix("Fast").removesuffix("Pil") if isinstance(value, str) else ""
    fields.require(name in _PROCESSORS, given, f"be one of {', '.join(_PROCESSORS)}", value)
    return _PROCESSORS[name]


def _refuse_unknown(fields: Fields) -> None:
    """Raises ModelError for a field that may change the pixels in a way that is not implemented."""
    for name in sorted(fields.names() - _READ - _WITHOUT_EFFECT):
        raise ModelError(f"{fields.file}: {name} is not supported; supported are {', '.join(sorted(_READ))}")
    fields.require(
        fields.flag("do_convert_rgb", True), "do_convert_rgb", "be true, for tiles have three colours", False
    )


def _channels(fields: Fields, name: str, default: tuple[float, ...], low: float) -> tuple[float, ...]:
    value = fields.get(name, list(default))
    ok = isinstance(value, list) and len(value) == 3
    ok = ok and all(type(each) in (int, float) and low <= each <= 1e3 for each in value)
    fields.require(ok, name, f"be three numbers in [{low:g}, 1000]", value)
    return tuple(float(each) for each in value)


def _size(fields: Fields, name: str, default: int, *, as_square: bool) -> int | tuple[int, int]:
    """A shorter side, or height and width. A bare number is a shorter side unless `as_square`."""
    value = fields.get(name, default)
    rule = f"be a side or {{shortest_edge}} or {{height, width}}, in [1, {MAX_SIDE}]"
    if isinstance(value, dict):
        given = {key: side for key, side in value.items() if side is not None}
        fields.require(given.keys() in ({"shortest_edge"}, {"height", "width"}), name, rule, value)
        as_square, sides = "height" in given, [given[key] for key in sorted(given)]
    else:
        sides = [value] * (1 + as_square)
    fields.require(all(type(side) is int and 1 <= side <= MAX_SIDE for side in sides), name, rule, value)
    fields.require(not (name == "crop_size" and len(sides) == 1), name, "have height and width", value)
    return (sides[0], sides[1]) if as_square else sides[0]


def _colour(fields: Fields, mean: tuple[float, ...]) -> tuple[int, ...]:
    """The mean as a colour of 8 bits."""
    fields.require(all(0 <= each <= 1 for each in mean), "image_mean", "be in [0, 1] to pad with it", mean)
    return tuple(int(each * 255) for each in mean)


def _grid(fields: Fields, size: int | tuple[int, int], side: int) -> Grid:
    base_size = size if isinstance(size, tuple) else (size, size)
    return Grid(pinpoints=read_pinpoints(fields, side), tile_size=side, base_size=base_size)
