"""The files of pictures and videos that clients sent lately: clients can name these instead of sending them again.

A program sends its prompt with each call, and sends the SHA-256 of a file that it has sent before. The file is kept,
not what was made of it: a prompt that names a file is read like one that brings it.
"""

import hashlib
import threading
from typing import final

from jsg.byte_cache import ByteCache

KEPT_BYTES = 64 * 2**20
ENTRY_BYTES = 512  # what an entry takes beside its file, or empty files would be kept without a bound


@final
class KeptFiles:
    """The files that were sent or named last, up to `KEPT_BYTES` in all. Any number of threads may use it.

    Each namespace of the prefix cache has its own files: no namespace finds, or learns of, the files of another.
    """

    def __init__(self) -> None:
        self._kept = ByteCache[tuple[str, bytes], bytes](KEPT_BYTES, lambda file: len(file) + ENTRY_BYTES)
        self._lock = threading.Lock()

    def put(self, namespace: str, file: bytes) -> None:
        """Keeps a file, unless it is too large alone, and drops the least recently used ones."""
        digest = hashlib.sha256(file).digest()
        if len(file) + ENTRY_BYTES <= KEPT_BYTES:
            with self._lock:
                self._kept.put((namespace, digest), file)

    def get(self, namespace: str, sha256: bytes) -> bytes | None:
        """The file with that digest, which becomes the most recently used one; None where it is not kept."""
        with self._lock:
            return self._kept.get((namespace, sha256))
