"""Reads the container of GGUF: metadata, and where each tensor is. Nothing in it is trusted.

    "GGUF", version, number of tensors, number of entries, entries, tensors, padding, data

The package `gguf` of the registry, which reads it too, took 6.8 s and 588 MB for the vocabulary of Qwen2 (gguf 0.19.0),
and does not end if a file says that a list has 2^40 numbers.
"""

import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jsg.errors import ModelError
from jsg.gguf.blocks import BLOCKS, OTHER_TYPES, Block

MAX_TENSORS = 2**16
MAX_DEPTH = 2
_SCALARS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))
_SCALARS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_FLOAT, _STRING, _LIST = 6, 8, 9
_AGAIN = "download it again"


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a file.

    Attributes:
        shape: Its shape, the numbers that are side by side last.
        block: How its numbers are written.
        start: The byte of the file at which it begins.
    """

    shape: tuple[int, ...]
    block: Block
    start: int

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return math.prod(self.shape) // self.block.length * self.block.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """What the head of a file says.

    Attributes:
        metadata: Its entries. Lists of numbers are arrays.
        tensors: Where each tensor is.
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Place]


def read_container(path: Path) -> Container:
    """The head of a file.

    Raises:
        ModelError: It is no GGUF that jsg reads, or it is cut or damaged. The message says where.
    """
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:  # and so cannot be mapped
                raise ModelError(f"{path.name} must be a GGUF file, but is empty; {_AGAIN}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Reader(path.name, data).container()
    except OSError as error:
        raise ModelError(f"{path.name} must be readable ({type(error).__name__}); check its permissions") from None


class _Reader:
    """One file, from its beginning on."""

    def __init__(self, name: str, data: mmap.mmap):
        self._name, self._data, self._at = name, data, 0

    def container(self) -> Container:
        if self._take(4) != b"GGUF":
            raise self._fault("begin with GGUF, but does not", "is it another kind of file?")
        (version,) = self._numbers("<u4", 1)
        if version.byteswap() in (1, 2, 3):
            raise self._fault("be little-endian, but is big-endian", "take one for x86 and ARM, or gguf-convert-endian")
        if version not in (2, 3):
            raise self._fault(f"be of version 2 or 3, but is of {version}", "convert the model with a newer llama.cpp")
        num_tensors, num_entries = map(int, self._numbers("<u8", 2))
        if num_tensors > MAX_TENSORS:
            raise self._fault(f"have at most {MAX_TENSORS} tensors, but says {num_tensors}", _AGAIN)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):  # each takes bytes, so a false number ends with the file
            key = self._string()
            if key in metadata:
                raise self._fault(f"have each key once, but has {key!r} again", _AGAIN)
            metadata[key] = self._value(int(self._numbers("<u4", 1)[0]))
        heads = [self._tensor_head() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._fault(f"have a power of two as general.alignment, but has {alignment!r}", _AGAIN)
        start = -(-self._at // alignment) * alignment
        tensors = {name: self._place(name, shape, kind, start + offset) for name, shape, kind, offset in heads}
        if len(tensors) < len(heads):
            raise self._fault("have each tensor once, but has one again", _AGAIN)
        return Container(metadata, tensors)

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._fault(f"have {count} bytes from byte {self._at} on, but ends before", _AGAIN)
        self._at += count
        return self._data[self._at - count : self._at]

    def _numbers(self, dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(self._take(count * np.dtype(dtype).itemsize), dtype)

    def _string(self) -> str:
        (length,) = struct.unpack("<Q", self._take(8))
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._fault(f"have UTF-8 before byte {self._at}, but has other bytes", _AGAIN) from None

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            number = self._numbers(_SCALARS[kind], 1)[0]
            return float(str(number)) if kind == _FLOAT else number.item()  # 1e-05, as the model was published
        if kind == _STRING:
            return self._string()
        if kind != _LIST or depth == MAX_DEPTH:
            raise self._fault(f"have values of known types, but byte {self._at} says {kind}", _AGAIN)
        (kind,) = map(int, self._numbers("<u4", 1))
        (count,) = map(int, self._numbers("<u8", 1))
        if kind in _SCALARS:
            return self._numbers(_SCALARS[kind], count)
        return [self._value(kind, depth + 1) for _ in range(count)]

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        (num_axes,) = map(int, self._numbers("<u4", 1))
        if num_axes > 4:
            raise self._fault(f"have tensors of at most 4 axes, but {name!r} has {num_axes}", _AGAIN)
        shape = tuple(map(int, reversed(self._numbers("<u8", num_axes))))
        (kind,) = map(int, self._numbers("<u4", 1))
        (offset,) = map(int, self._numbers("<u8", 1))
        return name, shape, kind, offset

    def _place(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> Place:
        block = BLOCKS.get(kind)
        if block is None:
            known = ", ".join(sorted(block.name for block in BLOCKS.values()))
            raise self._fault(
                f"have tensors of {known}, but {name} is of {OTHER_TYPES.get(kind, f'type {kind}')}",
                "take a file of another quantisation, such as Q4_K_M or Q8_0",
            )
        place = Place(shape, block, start)
        if not shape or 0 in shape or shape[-1] % block.length:
            raise self._fault(f"have whole blocks of {block.length} in {name}, but its shape is {list(shape)}", _AGAIN)
        if start + place.nbytes > len(self._data):
            raise self._fault(f"have {name} up to byte {start + place.nbytes}, but has {len(self._data)}", _AGAIN)
        return place

    def _fault(self, rule: str, remedy: str) -> ModelError:
        return ModelError(f"{self._name} must {rule}; {remedy}")


def mapped(path: Path) -> np.ndarray:
    """The bytes of a file, which stay there until they are read."""
    return np.memmap(path, np.uint8, "r").view(np.ndarray)


def bytes_of(file: np.ndarray, place: Place) -> np.ndarray:
    """The bytes of a tensor [rows…, bytes of a row]."""
    return file[place.start : place.start + place.nbytes].reshape(*place.shape[:-1], -1)
