"""Files of pictures and videos that clients sent lately, so that they can name them and need not send them again.

A program sends its prompt with each call. Of a file that it has sent before it sends the SHA-256. What is kept is the
file, not what was made of it: a prompt that names a file is read as one that brings it.
"""

import collections
import copy
import hashlib
import threading
from typing import final

KEPT_BYTES = 64 * 2**20
ENTRY_BYTES = 512  # what an entry takes beside its file, or empty files would be kept without a bound


@final
class KeptFiles:
    """What was sent or named last, up to `KEPT_BYTES`. Any number of threads may use it.

    Each namespace of the prefix cache has files of its own: none finds, or learns of, what another has sent.
    """

    def __init__(self) -> None:
        self._files = _Files()
        self._namespace = ""

    def within(self, namespace: str) -> "KeptFiles":
        """The files of one namespace; the bound is for all of them together."""
        view = copy.copy(self)
        view._namespace = namespace
        return view

    def put(self, file: bytes) -> None:
        """Keeps a file, if it is not too large alone, and drops what was not used for longest."""
        self._files.put((self._namespace, hashlib.sha256(file).digest()), file)

    def get(self, sha256: bytes) -> bytes | None:
        """The file with that digest, which then was used last."""
        return self._files.get((self._namespace, sha256))


@final
class _Files:
    """The files of all namespaces.

    Invariant: `_num_bytes` is what all of `_kept` take, and at most `KEPT_BYTES`.
    """

    def __init__(self) -> None:
        self._kept: collections.OrderedDict[tuple[str, bytes], bytes] = collections.OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def put(self, key: tuple[str, bytes], file: bytes) -> None:
        """As `KeptFiles.put`."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            elif len(file) + ENTRY_BYTES <= KEPT_BYTES:
                self._kept[key] = file
                self._num_bytes += len(file) + ENTRY_BYTES
            while self._num_bytes > KEPT_BYTES:
                self._num_bytes -= len(self._kept.popitem(last=False)[1]) + ENTRY_BYTES

    def get(self, key: tuple[str, bytes]) -> bytes | None:
        """As `KeptFiles.get`."""
        with self._lock:
            file = self._kept.get(key)
            if file is not None:
                self._kept.move_to_end(key)
            return file
