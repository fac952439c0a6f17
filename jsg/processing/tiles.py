"""The resolution at which an image is cut into tiles (LLaVA-NeXT's any-resolution scheme). No JAX and no pixels.

The front process resizes images to it, and the layout of image tokens is computed from it. Both must agree to the
pixel.
"""

from collections.abc import Sequence

from jsg.sources import Fields

MAX_PINPOINTS = 128
MAX_TILES = 64

_DEFAULT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


def read_pinpoints(fields: Fields, side: int) -> tuple[tuple[int, int], ...]:
    """`image_grid_pinpoints` of a model's file, or the default if the file does not have it.

    Args:
        fields: The fields of `config.json`, or of the processor's file.
        side: Side of a tile, in pixels.

    Returns:
        Heights and widths, in pixels, at which an image may be cut; never empty.

    Raises:
        ModelError: There are too many, or one is not made of whole tiles, or has too many of them.
    """
    value = fields.get("image_grid_pinpoints", _DEFAULT_PINPOINTS)
    ok = isinstance(value, list) and 0 < len(value) <= MAX_PINPOINTS
    for pair in value if ok else ():
        ok = ok and isinstance(pair, list) and len(pair) == 2
        ok = ok and all(type(each) is int and each > 0 and each % side == 0 for each in pair)
        ok = ok and (pair[0] // side) * (pair[1] // side) <= MAX_TILES
    rule = f"be at most {MAX_PINPOINTS} pairs of multiples of {side}, each of at most {MAX_TILES} tiles"
    fields.require(ok, "image_grid_pinpoints", rule, value)
    return tuple((height, width) for height, width in value)


def best_resolution(size: tuple[int, int], resolutions: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The resolution that keeps most of an image's pixels. Of several such it is the one that wastes least.

    Args:
        size: Height and width of the image.
        resolutions: Heights and widths to choose from, not empty. Of equal ones the first is chosen.
    """
    height, width = size
    scores = []
    for target in resolutions:
        scale = min(target[1] / width, target[0] / height)  # the image keeps its aspect ratio
        kept = min(int(width * scale) * int(height * scale), width * height)
        scores.append((kept, kept - target[0] * target[1]))
    return resolutions[max(range(len(scores)), key=scores.__getitem__)]
