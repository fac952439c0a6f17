"""The files of pictures and videos that clients sent lately: clients can name these instead of sending them again.

A program sends its prompt with each call, and sends the SHA-256 of a file that it has sent before. The file is kept,
not what was made of it: a prompt that names a file is read like one that brings it.
"""

import collections
import hashlib
import threading
from typing import final

KEPT_BYTES = 64 * 2**20
ENTRY_BYTES = 512  # what an entry takes beside its file, or empty files would be kept without a bound


@final
class KeptFiles:
    """The files that were sent or named last, up to `KEPT_BYTES` in all. Any number of threads may use it.

    Each namespace of the prefix cache has its own files: no namespace finds, or learns of, the files of another.

    Invariant: `_num_bytes` is what all of `_kept` take, and at most `KEPT_BYTES`.
    """

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[tuple[str, bytes], bytes] = collections.OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, namespace: str, file: bytes) -> None:
        """Keeps a file, unless it is too large alone, and drops the least recently used ones."""
        key = namespace, hashlib.sha256(file).digest()
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            elif len(file) + ENTRY_BYTES <= KEPT_BYTES:
                self._kept[key] = file
                self._num_bytes += len(file) + ENTRY_BYTES
            while self._num_bytes > KEPT_BYTES:
                self._num_bytes -= len(self._kept.popitem(last=False)[1]) + ENTRY_BYTES

    def get(self, namespace: str, sha256: bytes) -> bytes | None:
        """The file with that digest, which becomes the most recently used one; None where it is not kept."""
        key = namespace, sha256
        with self._lock:
            file = self._kept.get(key)
            if file is not None:
                self._kept.move_to_end(key)
            return file
