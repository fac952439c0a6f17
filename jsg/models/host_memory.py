"""Makes glibc's `malloc` free large blocks at once while a model is loaded."""

import contextlib
import ctypes
from collections.abc import Iterator

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGE = 2**20
KEPT = 8 * 2**20
"""Bytes that a thread's heap keeps for its next pieces, because memory from the system must be zeroed again."""
LARGEST = 32 * 2**20
"""Bytes of a block that is never put on the heap: the highest value that glibc chooses by itself."""


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Inside, a block of `LARGE` bytes goes back to the system when it is freed. Without glibc nothing changes.

    Otherwise glibc raises its threshold with each large block that is freed. Tensors that are converted would then lie
    on the heap between those that stay, and nobody could use the memory that they leave, half of the model's size.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        yield
        return
    library.mallopt(M_MMAP_THRESHOLD, LARGE)
    library.mallopt(M_TRIM_THRESHOLD, KEPT)
    try:
        yield
    finally:
        # The values that glibc would have reached by itself. Once they are set, it does not change them any more.
        library.mallopt(M_MMAP_THRESHOLD, LARGEST)
        library.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST)
