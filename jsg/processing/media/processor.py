"""Pictures and frames → the normalised tiles that a vision tower reads, as Hugging Face's Pillow processors make them.

CLIP (arXiv:2103.00020) resizes the shorter side and cuts out the middle. LLaVA-1.5 (arXiv:2310.03744) does the same, or
first pads to a square. LLaVA-NeXT (arXiv:2407.07895) shows the whole picture in one tile, and then again, at a
resolution that suits its shape, in a grid of tiles. Each frame of a video has one tile.
"""

import dataclasses
import math
from typing import Literal, final

import numpy as np
from PIL import Image as pillow

from jsg.errors import RequestError
from jsg.processing.media.key import image_key
from jsg.processing.media.limits import MAX_IMAGE_PIXELS
from jsg.processing.media.pixel_config import PixelConfig
from jsg.processing.tiles import best_resolution


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PixelTiles:
    """One picture or video as a vision tower reads it.

    Attributes:
        pixels: Float32 [tiles, 3, side, side]. Of a picture the base tile comes first, then those of the grid row by
            row; of a video the frames in order.
        size: Height and width of the original, in pixels.
        mode: Whether it is a picture or a video.
        grid: Rows and columns of tiles beside the base tile.
    """

    pixels: np.ndarray
    size: tuple[int, int]
    mode: Literal["image", "video"]
    grid: tuple[int, int] = (0, 0)

    def key(self) -> bytes:
        """The `image_key`, which is equal exactly where the model is shown the same."""
        return image_key(self.pixels, mode=self.mode, size=self.size, tiling=[self.grid])


@final
class PixelProcessor:
    """Makes tiles as one `PixelConfig` says. Methods change no state, so any number of threads may use it."""

    def __init__(self, config: PixelConfig):
        self.config = config
        self._values = _normalised_values(config)

    def image(self, image: np.ndarray) -> PixelTiles:
        """The tiles of a picture, uint8 [height, width, 3]: one, or the base tile and a grid.

        Raises RequestError if the picture is far too long.
        """
        grid, size = self.config.grid, (image.shape[0], image.shape[1])
        if grid is None:
            return PixelTiles(self._tiles([image]), size, "image")
        resolution = best_resolution(size, grid.pinpoints)
        fitted = self._fit(image, resolution)
        side, rows, columns = grid.tile_size, resolution[0] // grid.tile_size, resolution[1] // grid.tile_size
        cut = fitted.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        base = self._resize(image, grid.base_size)
        return PixelTiles(self._tiles([base, *cut]), size, "image", (rows, columns))

    def video(self, frames: np.ndarray) -> PixelTiles:
        """One tile for each of the frames, uint8 [frames, height, width, 3], by a config that was read for videos.

        Raises RequestError if the frames are far too long.
        """
        return PixelTiles(self._tiles(list(frames)), (frames.shape[1], frames.shape[2]), "video")

    def _tiles(self, images: list[np.ndarray]) -> np.ndarray:
        """Uint8 [h, w, 3] of any sizes → float32 [tiles, 3, side, side]."""
        side = self.config.tile_size
        tiles = np.empty((len(images), 3, side, side), np.float32)
        for tile, image in zip(tiles, images, strict=True):
            square = self._square(image)
            for channel, values in enumerate(self._values):
                np.take(values, square[:, :, channel], out=tile[channel], mode="clip")  # "raise" would copy
        return tiles

    def _square(self, image: np.ndarray) -> np.ndarray:
        """Padding, resizing and cropping: uint8 [side, side, 3]."""
        config = self.config
        if config.pad_colour is not None:
            longer = max(image.shape[:2])
            image = _pad(image, (longer, longer), config.pad_colour)
        match config.resize:
            case int(shorter):
                height, width = image.shape[:2]
                longer = int(shorter * max(height, width) / min(height, width))
                image = self._resize(image, (longer, shorter) if width <= height else (shorter, longer))
            case (height, width):
                image = self._resize(image, (height, width))
            case None:
                pass
        return image if config.crop_size is None else _crop(image, config.crop_size)

    def _fit(self, image: np.ndarray, target: tuple[int, int]) -> np.ndarray:
        """The image resized until one side fits the target, with black padding on both ends of the other side."""
        height, width = image.shape[:2]
        by_height, by_width = target[0] / height, target[1] / width
        if by_width < by_height:
            size = min(math.ceil(height * by_width), target[0]), target[1]
        else:
            size = target[0], min(math.ceil(width * by_height), target[1])
        return _pad(self._resize(image, size), target, (0, 0, 0))

    def _resize(self, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        if image.shape[:2] == size:
            return image
        _require_room(size)
        resized = pillow.fromarray(image).resize((size[1], size[0]), pillow.Resampling(self.config.resample))
        return np.asarray(resized)


def _normalised_values(config: PixelConfig) -> np.ndarray:
    """Float32 [3, 256]: what each value of each channel becomes."""
    scale = 1.0 if config.rescale_factor is None else config.rescale_factor
    values = np.tile((np.arange(256) * scale).astype(np.float32), (3, 1))
    if config.mean is None or config.std is None:
        return values
    mean, std = (np.array(each, np.float32)[:, None] for each in (config.mean, config.std))
    return (values - mean) / std


def _require_room(size: tuple[int, int]) -> None:
    """Raises RequestError where a step would make a small picture huge, such as a line that is padded to a square."""
    if size[0] * size[1] > MAX_IMAGE_PIXELS:
        raise RequestError(
            f"a picture must not take more than {MAX_IMAGE_PIXELS} pixels while it is made to fit the model, but this "
            f"one would take {size[1]} × {size[0]}; cut it to a shape nearer to a square"
        )


def _pad(image: np.ndarray, size: tuple[int, int], colour: tuple[int, ...]) -> np.ndarray:
    """The image in the middle of a larger one. If the padding is odd, the last side gets one line more."""
    _require_room(size)
    height, width = image.shape[:2]
    top, left = (size[0] - height) // 2, (size[1] - width) // 2
    padded = np.empty((*size, 3), np.uint8)
    padded[:] = colour
    padded[top : top + height, left : left + width] = image
    return padded


def _crop(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The middle of an image, with black padding where it is too small. If that is odd, the first side gets more."""
    cropped = np.zeros((*size, 3), np.uint8)
    source, target = [], []
    for have, want in zip(image.shape[:2], size, strict=True):
        skipped, padded = max(have - want, 0) // 2, -(-max(want - have, 0) // 2)
        source.append(slice(skipped, skipped + want))
        target.append(slice(padded, padded + have))
    cropped[tuple(target)] = image[tuple(source)]
    return cropped
