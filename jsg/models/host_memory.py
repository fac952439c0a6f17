"""What glibc's `malloc` does with large blocks while a model is loaded."""

import contextlib
import ctypes
from collections.abc import Iterator

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
LARGE = 2**20
KEPT = 8 * 2**20
"""Bytes that a thread's heap keeps for its next pieces: what is given back is zeroed anew when it is asked for."""
LARGEST = 32 * 2**20
"""Bytes of a block that is never put on the heap: as high as glibc would raise it by itself."""


@contextlib.contextmanager
def freed_at_once() -> Iterator[None]:
    """Inside, a block of `LARGE` bytes goes back to the system when it is freed. Without glibc nothing changes.

    glibc raises its threshold with each large block that is freed. Then tensors that are converted lie on the heap
    between those that stay, and what they leave is free for nobody: half of the model once more.
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
        # What glibc would have come to by itself; once told, it leaves both as they are.
        library.mallopt(M_MMAP_THRESHOLD, LARGEST)
        library.mallopt(M_TRIM_THRESHOLD, 2 * LARGEST)
