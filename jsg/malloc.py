"""The settings of glibc's `malloc`, which are those of a whole process. With another C library nothing changes."""

import contextlib
import ctypes
import math
from collections.abc import Iterator

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGE = 2**20
KEPT = 8 * 2**20
"""Bytes that a thread's heap keeps for its next pieces, because memory from the system must be zeroed again."""
LARGEST = 32 * 2**20
"""Bytes of a block that is never put on the heap: the highest value that glibc chooses by itself."""

PIECE_BYTES = LARGE - 2**14
"""The bytes of a tensor that are read at once. Below `LARGE` `freed_at_once` lets malloc reuse them."""


def rows_at_once(shape: tuple[int, ...], itemsize: int, outer: int = 0) -> int:
    """How many indices of an axis are about `PIECE_BYTES`, at least one; `outer` is the number of the axis."""
    return max(1, PIECE_BYTES // max(1, math.prod(shape[outer + 1 :]) * itemsize))


def set_thresholds(mmap_bytes: int, trim_bytes: int | None = None) -> None:
    """Says how many bytes make a block large, so that it is never on the heap, and how many free ones a heap keeps."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(M_MMAP_THRESHOLD, mmap_bytes)
        if trim_bytes is not None:
            library.mallopt(M_TRIM_THRESHOLD, trim_bytes)


def trim() -> None:
    """Gives back the free pages of all heaps."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Inside, a block of `LARGE` bytes goes back to the system when it is freed.

    Otherwise glibc raises its threshold with each large block that is freed. Tensors that are converted would then lie
    on the heap between those that stay, and nobody could use the memory that they leave, half of the model's size.
    """
    set_thresholds(LARGE, KEPT)
    try:
        yield
    finally:
        # The values that glibc would have reached by itself. Once they are set, it does not change them any more.
        set_thresholds(LARGEST, 2 * LARGEST)
