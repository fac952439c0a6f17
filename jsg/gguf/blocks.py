"""The types of tensors in GGUF: how many numbers a block has, in how many bytes, and the formula that restores them.

The order of each product is that of llama.cpp's own `dequantize_row_*`, so restored numbers are the same bits. Blocks
are [N, bytes], and what is restored is float32 [N, numbers].
"""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import ml_dtypes
import numpy as np


class Block(NamedTuple):
    """A type of tensors.

    Attributes:
        name: As llama.cpp calls it.
        length: The numbers of a block.
        nbytes: The bytes of a block.
        restore: Blocks → their numbers. It makes a new array, or gives the bytes under another type.
        dtype: The type of the numbers that are read, as safetensors calls it.
        split: Blocks → whole numbers int8 [N, numbers] and their scales [N, groups], where these are all of them.
        form: What a kernel can be kept as: kind of numbers, length of a group, type of scales.
    """

    name: str
    length: int
    nbytes: int
    restore: Callable[[np.ndarray], np.ndarray]
    dtype: str = "F32"
    split: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    form: tuple[Literal["int8", "int4"], int, str] | None = None


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 number of each block at a byte, as float32 [N, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _bits(packed: np.ndarray, shifts: tuple[int, ...], width: int, mask: int) -> np.ndarray:
    """Parts of bytes: of each `width` bytes those at the first shift, then those at the next. [N, bytes · shifts]."""
    num_blocks, nbytes = packed.shape
    parts = packed.reshape(num_blocks, nbytes // width, 1, width) >> np.array(shifts, np.uint8)[:, None]
    return (parts & mask).reshape(num_blocks, nbytes * len(shifts))


def _split_q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return blocks[:, 2:].view(np.int8), blocks[:, :2].copy().view(np.float16)


def _split_q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return _bits(blocks[:, 2:], (0, 4), 16, 15).astype(np.int8) - np.int8(8), blocks[:, :2].copy().view(np.float16)


def _split_q6_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    low, high = _bits(blocks[:, :128], (0, 4), 64, 15), _bits(blocks[:, 128:192], (0, 2, 4, 6), 32, 3)
    return (low | high << 4).astype(np.int8) - np.int8(32), _half(blocks, 208) * blocks[:, 192:208].view(np.int8)


def _product(split: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]], blocks: np.ndarray) -> np.ndarray:
    """Whole numbers times their scales."""
    numbers, scale = split(blocks)
    of_groups = numbers.reshape(*scale.shape, numbers.shape[1] // scale.shape[1])
    return (scale.astype(np.float32)[..., None] * of_groups).reshape(numbers.shape)


def _scaled(blocks: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Numbers of eight groups, each with a scale and a minimum of six bits."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    scales, minima = _half(blocks, 0) * scales, _half(blocks, 2) * minima
    restored = scales[..., None] * numbers.reshape(len(blocks), 8, 32) - minima[..., None]
    return restored.reshape(len(blocks), 256)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _scaled(blocks, _bits(blocks[:, 16:], (0, 4), 32, 15))


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    fifth = _bits(blocks[:, 16:48], tuple(range(8)), 32, 1)
    return _scaled(blocks, _bits(blocks[:, 48:], (0, 4), 32, 15) | fifth << 4)


BLOCKS = {
    0: Block("F32", 1, 4, lambda blocks: blocks.view(np.float32)),
    1: Block("F16", 1, 2, lambda blocks: blocks.view(np.float16), "F16"),
    2: Block("Q4_0", 32, 18, partial(_product, _split_q4_0), "F32", _split_q4_0, ("int4", 32, "float16")),
    8: Block("Q8_0", 32, 34, partial(_product, _split_q8_0), "F32", _split_q8_0, ("int8", 32, "float16")),
    12: Block("Q4_K", 256, 144, _q4_k),
    13: Block("Q5_K", 256, 176, _q5_k),
    14: Block("Q6_K", 256, 210, partial(_product, _split_q6_k), "F32", _split_q6_k, ("int8", 16, "float32")),
    30: Block("BF16", 1, 2, lambda blocks: blocks.view(ml_dtypes.bfloat16), "BF16"),
}
"""The types that jsg reads, by their numbers in a file."""
OTHER_TYPES = dict(
    zip(
        (3, 6, 7, 9, 10, 11, 15, *range(16, 30), 34, 35, 39),
        "Q4_1 Q5_0 Q5_1 Q8_1 Q2_K Q3_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 "
        "IQ1_M TQ1_0 TQ2_0 MXFP4".split(),
        strict=True,
    )
)
"""The names of types that jsg does not read."""
