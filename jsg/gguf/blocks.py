"""The types of tensors in GGUF: how many numbers a block has, in how many bytes, and the formula that restores them.

The order of each product is that of llama.cpp's own `dequantize_row_*`, so restored numbers are the same bits. Blocks
are [N, bytes], and what is restored is float32 [N, numbers].
"""

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np


class Parts(NamedTuple):
    """What blocks of few bits hold. Each group of a block has as many numbers.

    Attributes:
        numbers: [N, numbers] Whole numbers of 8 bits.
        scale: [N, groups] What the numbers of a group are multiplied with.
        factor: float32 [N, 1], what its scales are multiplied with, or None.
        minimum: uint8 [N, groups], which is subtracted, or None.
        step: float32 [N, 1], what its minima are multiplied with, or None.
    """

    numbers: np.ndarray
    scale: np.ndarray
    factor: np.ndarray | None = None
    minimum: np.ndarray | None = None
    step: np.ndarray | None = None

    def restored(self) -> np.ndarray:
        """The numbers that blocks mean, [N, numbers]."""
        scale = self.scale.astype(np.float32)
        scale = scale if self.factor is None else self.factor * scale
        restored = scale[..., None] * self.numbers.reshape(*scale.shape, self.numbers.shape[1] // scale.shape[1])
        if self.minimum is not None:
            restored -= (self.step * self.minimum)[..., None]
        return restored.reshape(self.numbers.shape)


class Block(NamedTuple):
    """A type of tensors.

    Attributes:
        name: As llama.cpp calls it.
        length: The numbers of a block.
        nbytes: The bytes of a block.
        split: Blocks → what they hold; None if numbers are whole.
        dtype: The type of the numbers that are read, as safetensors calls it.
    """

    name: str
    length: int
    nbytes: int
    split: Callable[[np.ndarray], Parts] | None = None
    dtype: str = "F32"

    def restore(self, blocks: np.ndarray) -> np.ndarray:
        """The numbers of blocks: a new array, or the bytes under another type."""
        return blocks.view(_WHOLE[self.dtype]) if self.split is None else self.split(blocks).restored()


_WHOLE = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 number of each block at a byte, as float32 [N, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _bits(packed: np.ndarray, shifts: tuple[int, ...], width: int, mask: int) -> np.ndarray:
    """Parts of bytes: of each `width` bytes those at the first shift, then those at the next. [N, bytes · shifts]."""
    num_blocks, nbytes = packed.shape
    parts = packed.reshape(num_blocks, nbytes // width, 1, width) >> np.array(shifts, np.uint8)[:, None]
    return (parts & mask).reshape(num_blocks, nbytes * len(shifts))


def _q8_0(blocks: np.ndarray) -> Parts:
    return Parts(blocks[:, 2:].view(np.int8), blocks[:, :2].copy().view(np.float16))


def _q4_0(blocks: np.ndarray) -> Parts:
    numbers = _bits(blocks[:, 2:], (0, 4), 16, 15).astype(np.int8) - np.int8(8)
    return Parts(numbers, blocks[:, :2].copy().view(np.float16))


def _q6_k(blocks: np.ndarray) -> Parts:
    low, high = _bits(blocks[:, :128], (0, 4), 64, 15), _bits(blocks[:, 128:192], (0, 2, 4, 6), 32, 3)
    return Parts((low | high << 4).astype(np.int8) - np.int8(32), blocks[:, 192:208].view(np.int8), _half(blocks, 208))


def _with_minima(blocks: np.ndarray, numbers: np.ndarray) -> Parts:
    """Numbers of eight groups, each with a scale and a minimum of six bits."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minima = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return Parts(numbers, scales, _half(blocks, 0), minima, _half(blocks, 2))


def _q4_k(blocks: np.ndarray) -> Parts:
    return _with_minima(blocks, _bits(blocks[:, 16:], (0, 4), 32, 15))


def _q5_k(blocks: np.ndarray) -> Parts:
    fifth = _bits(blocks[:, 16:48], tuple(range(8)), 32, 1)
    return _with_minima(blocks, _bits(blocks[:, 48:], (0, 4), 32, 15) | fifth << 4)


BLOCKS = {
    0: Block("F32", 1, 4),
    1: Block("F16", 1, 2, dtype="F16"),
    2: Block("Q4_0", 32, 18, _q4_0),
    8: Block("Q8_0", 32, 34, _q8_0),
    12: Block("Q4_K", 256, 144, _q4_k),
    13: Block("Q5_K", 256, 176, _q5_k),
    14: Block("Q6_K", 256, 210, _q6_k),
    30: Block("BF16", 1, 2, dtype="BF16"),
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
