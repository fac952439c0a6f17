"""The file of a picture → its pixels. Everything that a file declares is checked before a pixel is decoded."""

import dataclasses
import io

import numpy as np
from PIL import Image as pillow

from jsg.processing.media.headers import Declared, damaged, read_header
from jsg.processing.media.limits import MediaBudget


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Image:
    """A picture, the way up that it is meant to be seen.

    Attributes:
        pixels: Uint8 [height, width, 3]: red, green, blue.
    """

    pixels: np.ndarray

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[0], self.pixels.shape[1]


def decode_image(data: bytes, budget: MediaBudget) -> Image:
    """Decodes a PNG, JPEG, WebP or the first frame of a GIF, in the calling thread.

    The result is what Hugging Face's `load_image` gives: turned as EXIF says, then Pillow's conversion to RGB, which
    drops transparency. But 16-bit grey keeps its shades; Pillow alone makes nearly all of them white.

    Args:
        data: A file. Its bytes decide its type.
        budget: Of the request; counts this picture.

    Raises:
        RequestError: It is of another type, cut off or damaged, or declares more than the budget holds.
    """
    budget.take_bytes(len(data))
    declared = read_header(data)
    budget.take_image(declared.height, declared.width)
    return decode_declared(declared)


def decode_declared(declared: Declared) -> Image:
    """As `decode_image`, of a file whose header was read, and what it declares counted."""
    return Image(np.ascontiguousarray(_turn(_decode(declared), declared.orientation)))


def _decode(declared: Declared) -> np.ndarray:
    """Uint8 [height, width, 3], not yet turned."""
    try:
        with pillow.open(io.BytesIO(declared.shown), formats=[declared.format]) as image:
            if image.size != (declared.width, declared.height):
                raise ValueError("two headers that differ")
            image.load()
            if image.mode.startswith("I"):  # 16-bit grey: the high byte, as Pillow takes of 16-bit colours
                image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return np.asarray(image.convert("RGB"))
    except Exception:  # on damaged bytes Pillow raises of nearly every kind
        raise damaged(declared.format) from None


def _turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels as an EXIF orientation, 1 to 8, wants them seen (CIPA DC-008, tag 274); others change nothing."""
    match orientation:
        case 2:
            return pixels[:, ::-1]
        case 3:
            return pixels[::-1, ::-1]
        case 4:
            return pixels[::-1]
        case 5:
            return pixels.swapaxes(0, 1)
        case 6:
            return pixels[::-1].swapaxes(0, 1)
        case 7:
            return pixels[::-1, ::-1].swapaxes(0, 1)
        case 8:
            return pixels[:, ::-1].swapaxes(0, 1)
        case _:
            return pixels
