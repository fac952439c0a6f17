"""The file of a picture → its pixels. All that the file declares is checked before a pixel is decoded."""

import io

import numpy as np
from PIL import Image as pillow

from jsg.processing.media.headers import Declared, damaged, read_header
from jsg.processing.media.limits import MediaBudget

_TURNS = {
    2: (1, -1, False),
    3: (-1, -1, False),
    4: (-1, 1, False),
    5: (1, 1, True),
    6: (-1, 1, True),
    7: (-1, -1, True),
    8: (1, -1, True),
}
"""EXIF orientation (CIPA DC-008, tag 274) → steps through rows and columns, and whether both then change places."""


def decode_image(data: bytes, budget: MediaBudget) -> np.ndarray:
    """Decodes a PNG, JPEG or WebP, or the first frame of a GIF, in the calling thread.

    The result is what Hugging Face's processors make of a file: turned as EXIF says, and laid on white where it is
    transparent. Unlike Pillow, which makes nearly all shades of 16-bit grey white, this keeps them.

    Args:
        data: A file. Its bytes decide its type.
        budget: The request's, which counts this picture.

    Returns:
        Uint8 [height, width, 3]: red, green, blue, turned the way the picture is meant to be seen.

    Raises:
        RequestError: The file is of another type, cut off or damaged, or declares more than the budget holds.
    """
    budget.take_bytes(len(data))
    declared = read_header(data)
    budget.take_image(declared.height, declared.width)
    return decode_declared(declared)


def decode_declared(declared: Declared) -> np.ndarray:
    """As `decode_image`, for a file whose header was read and counted by the budget."""
    rows, columns, is_swapped = _TURNS.get(declared.orientation, (1, 1, False))
    turned = _decode(declared)[::rows, ::columns]
    return np.ascontiguousarray(turned.swapaxes(0, 1) if is_swapped else turned)


def _decode(declared: Declared) -> np.ndarray:
    """Uint8 [height, width, 3], not turned yet."""
    try:
        with pillow.open(io.BytesIO(declared.shown), formats=[declared.format]) as image:
            if image.size != (declared.width, declared.height):
                raise ValueError("two headers that differ")
            image.load()
            if image.mode.startswith("I"):
                return _of_grey(np.asarray(image), image.info.get("transparency"))
            return np.asarray(_on_white(image).convert("RGB"))
    except Exception:  # on damaged bytes Pillow raises of nearly every kind
        raise damaged(declared.format) from None


def _on_white(image: pillow.Image) -> pillow.Image:
    """The picture as it looks on a white page. Else the colour of what is transparent would show, often black."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image
    return pillow.alpha_composite(pillow.new("RGBA", image.size, (255, 255, 255, 255)), image.convert("RGBA"))


def _of_grey(shades: np.ndarray, transparent: object) -> np.ndarray:
    """Uint8 [height, width, 3] of 16-bit grey: the high byte, as Pillow takes of 16-bit colours."""
    grey = (shades >> 8).astype(np.uint8)
    if isinstance(transparent, int):
        grey[shades == transparent] = 255
    return grey[..., None].repeat(3, axis=-1)
