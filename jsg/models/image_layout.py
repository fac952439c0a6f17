"""The encoded patch of each token of an image. No JAX, because the front process counts and lays out image tokens.

LLaVA-1.5 has one tile. LLaVA-NeXT has a base tile and then the grid of tiles at the chosen resolution, read row by row
across the tiles (arXiv:2407.07895). Padding is left out, and every row ends with the newline.
For tiles of 2 × 2 patches and a square image in a grid of 1 × 2 tiles, whose outer columns are padding:

    0 1    . 5 | 8 .   newline
    2 3    . 7 | 10 .  newline      tokens: 0 1 2 3 5 8 newline 7 10 newline

A video is its frames' pooled patches, one frame after another.
"""

import numpy as np

from jsg.models.vision_config import VisionConfig
from jsg.processing.tiles import best_resolution

NEWLINE = -1
"""Stands in a layout for the learned newline, in place of a patch."""


def tile_grid(config: VisionConfig, size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of tiles beside the base tile that an image of this height and width is cut into."""
    if not config.grid_pinpoints:
        return 0, 0
    height, width = best_resolution(size, config.grid_pinpoints)
    return height // config.image_size, width // config.image_size


def num_tiles(config: VisionConfig, size: tuple[int, int]) -> int:
    """Tiles that the tower encodes for an image of this height and width."""
    rows, columns = tile_grid(config, size)
    return 1 + rows * columns


def image_layout(config: VisionConfig, size: tuple[int, int]) -> np.ndarray:
    """For each token of an image, its row of the encoded tiles.

    Args:
        config: The tower's.
        size: Height and width of the original image, in pixels.

    Returns:
        Int32 [tokens]: indices into the `num_tiles * patches_per_tile` encoded rows, base tile first, or `NEWLINE`.
    """
    base = np.arange(config.patches_per_tile, dtype=np.int32)
    if not config.grid_pinpoints:
        return base
    rows, columns, side = *tile_grid(config, size), config.patches_per_side
    patches = base.size + np.arange(rows * columns * base.size, dtype=np.int32)
    grid = patches.reshape(rows, columns, side, side).swapaxes(1, 2).reshape(rows * side, columns * side)
    lines = np.pad(_without_padding(grid, size), ((0, 0), (0, 1)), constant_values=NEWLINE)
    return np.concatenate([base, lines.reshape(-1)])


def video_layout(config: VisionConfig, num_frames: int) -> np.ndarray:
    """For each token of a video, its row of the encoded frames: int32 [num_frames * patches_per_frame], in order."""
    return np.arange(num_frames * config.patches_per_frame, dtype=np.int32)


def _without_padding(grid: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The patches of a grid that show the image, which fits one side and is centred along the other."""
    (height, width), (rows, columns) = size, grid.shape
    if width / height > columns / rows:
        padding = (rows - int(round(height * (columns / width), 7))) // 2
        return grid[padding : rows - padding]
    padding = (columns - int(round(width * (rows / height), 7))) // 2
    return grid[:, padding : columns - padding]
