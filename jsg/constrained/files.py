"""Arrays as bytes that another process, a file or a browser takes: grammars and vocabularies are written like this.

    kind, padded with zeros   16 bytes
    version                    8 bytes
    SHA-256 of what follows   32 bytes
    each array: rows, columns (1 for a vector), elements, padding to a multiple of 8

Numbers are little-endian, and each array begins at a multiple of 8, so that a reader can use it in place. Which arrays
there are, and of which types, is the kind's and its version's.
"""

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_HEADER = struct.Struct("<16sq32s")
_SHAPE = struct.Struct("<2q")
DIGEST = slice(24, _HEADER.size)
"""Where the digest is."""


class FileForm(NamedTuple):
    """What one kind of file has in it.

    Attributes:
        kind: The name of the kind, at most 16 bytes.
        version: Changes when the arrays, or what they mean, do.
        what: What its bytes are, in words.
        arrays: For each array its name, its type and the number of its axes, 1 or 2.
    """

    kind: bytes
    version: int
    what: str
    arrays: tuple[tuple[str, str, int], ...]

    def pack(self, values: Mapping[str, np.ndarray]) -> bytes:
        """The bytes of these arrays, by name."""
        parts: list[bytes] = []
        for name, dtype, _ in self.arrays:
            array = np.ascontiguousarray(values[name], dtype)
            parts += [_SHAPE.pack(*(*array.shape, 1)[:2]), array.tobytes(), bytes(-array.nbytes % 8)]
        body = b"".join(parts)
        return _HEADER.pack(self.kind, self.version, hashlib.sha256(body).digest()) + body

    def unpack(self, data: bytes) -> dict[str, np.ndarray]:
        """The arrays that `pack` wrote, each of its own memory (the kernels know no read-only arrays).

        Raises:
            ValueError: The bytes are of another kind or version, or damaged.
        """
        kind, version, digest = _HEADER.unpack_from(data.ljust(_HEADER.size, b"\0"))
        if kind.rstrip(b"\0") != self.kind:
            raise ValueError(
                f"the bytes must be {self.what}, which begins with {self.kind!r}, but these begin with {data[:16]!r}; "
                "give what was exported as one"
            )
        if version != self.version:
            raise ValueError(
                f"{self.what} must be of version {self.version}, but this is of version {version}; export it again "
                "with the jsg that reads it"
            )
        if hashlib.sha256(memoryview(data)[_HEADER.size :]).digest() != digest:
            raise self.damaged("they do not have the digest that they name")
        arrays: dict[str, np.ndarray] = {}
        offset = _HEADER.size
        try:
            for name, dtype, num_axes in self.arrays:
                shape = _SHAPE.unpack_from(data, offset)
                if min(shape) < 0 or (num_axes == 1 and shape[1] != 1):
                    raise ValueError("a length is wrong")
                count = math.prod(shape)
                array = np.frombuffer(data, dtype, count, offset + _SHAPE.size)
                arrays[name] = array.reshape(shape[:num_axes]).copy()
                offset += _SHAPE.size + array.nbytes + -array.nbytes % 8
            if offset != len(data):
                raise ValueError("they end elsewhere than their arrays")
        except (struct.error, OverflowError, ValueError) as error:
            raise self.damaged(error) from error
        return arrays

    def damaged(self, why: object) -> ValueError:
        """The error for bytes that have the right header and are wrong."""
        return ValueError(f"the bytes of {self.what} are damaged ({why}); compile it again")


def digest_of(data: bytes) -> str:
    """The digest that a file names, in hexadecimal."""
    return data[DIGEST].hex()
