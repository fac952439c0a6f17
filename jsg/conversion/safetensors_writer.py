"""Writes tensors into safetensors files, in shards if they are many, a few rows at a time."""

import concurrent.futures
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jsg.models.checkpoint import StoredTensor
from jsg.models.forms import INDEX_FILE, SINGLE_FILE
from jsg.models.published.kernel import ITEM_BYTES

SHARD_BYTES = 5 * 10**9
"""About as many bytes of tensors are in a file, as transformers writes them."""
PIECE_NUMBERS = 2**20
"""About as many numbers are made at once."""
MAX_THREADS = 8


class Entry(NamedTuple):
    """A tensor of the file: its type, as safetensors calls it, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """Tensors that are made together, a few rows at a time. A row is an index of the first axis.

    Attributes:
        tensors: The tensors by name. All have as many rows.
        columns: About how many numbers are made for a row.
        make: Gives some rows of each tensor, in order. Several threads may call it at the same time.
    """

    tensors: Mapping[str, Entry]
    columns: int
    make: Callable[[slice], Sequence[np.ndarray]]

    @property
    def num_bytes(self) -> int:
        """The bytes of all numbers."""
        return sum(entry.num_bytes for entry in self.tensors.values())

    def pieces(self) -> Iterator[slice]:
        """The rows that are made at once."""
        shape = next(iter(self.tensors.values())).shape
        num_rows = shape[0] if shape else 1
        step = max(1, PIECE_NUMBERS // max(1, self.columns))
        return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def as_stored(name: str, tensor: StoredTensor) -> Bundle:
    """A tensor as it is."""
    rest = (slice(None),) * (len(tensor.shape) - 1)
    return Bundle(
        {name: Entry(tensor.dtype, tensor.shape)},
        math.prod(tensor.shape[1:]),
        lambda rows: [tensor.read((rows, *rest) if tensor.shape else ())],
    )


def write(folder: Path, bundles: Sequence[Bundle], written: Callable[[int], None]) -> None:
    """Writes files that transformers calls a checkpoint in safetensors, with an index if there are several.

    Args:
        folder: The model directory.
        bundles: The tensors.
        written: Called with the bytes of each piece.

    Raises:
        ModelError: A tensor cannot be read, or cannot be made.
        OSError: A file cannot be written.
    """
    shards = _shards(bundles)
    files = [f"model-{index:05}-of-{len(shards):05}.safetensors" for index in range(1, len(shards) + 1)]
    files = files if len(shards) > 1 else [SINGLE_FILE]
    for file, shard in zip(files, shards, strict=True):
        _write_file(folder / file, shard, written)
    if len(shards) > 1:
        weight_map = {
            name: file for file, shard in zip(files, shards, strict=True) for b in shard for name in b.tensors
        }
        total = sum(bundle.num_bytes for bundle in bundles)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(bundles: Sequence[Bundle]) -> list[list[Bundle]]:
    """The bundles of each file."""
    ends = itertools.accumulate(bundle.num_bytes for bundle in bundles)
    numbered = zip(((end - 1) // SHARD_BYTES for end in ends), bundles, strict=True)
    return [[bundle for _, bundle in shard] for _, shard in itertools.groupby(numbered, lambda pair: pair[0])]


def _write_file(path: Path, bundles: Sequence[Bundle], written: Callable[[int], None]) -> None:
    entries = {name: entry for bundle in bundles for name, entry in bundle.tensors.items()}
    header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]):  # each is aligned then
        begin, end = end, end + entry.num_bytes
        places[name] = begin
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file, concurrent.futures.ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        file.flush()

        def put(job: tuple[Bundle, slice]) -> int:
            bundle, rows = job
            num_bytes = 0
            for (name, entry), part in zip(bundle.tensors.items(), bundle.make(rows), strict=True):
                row_bytes = entry.num_bytes // max(1, *entry.shape[:1])
                data = np.ascontiguousarray(part).reshape(-1).view(np.uint8).data
                _write_at(file.fileno(), data, 8 + len(text) + places[name] + rows.start * row_bytes)
                num_bytes += len(data)
            return num_bytes

        jobs = [(bundle, rows) for bundle in bundles if bundle.num_bytes for rows in bundle.pieces()]
        try:
            for num_bytes in pool.map(put, jobs):
                written(num_bytes)
        finally:
            pool.shutdown(cancel_futures=True)  # after an error, what has not begun is left out


def _write_at(file: int, data: memoryview, place: int) -> None:
    """Writes all bytes at a place of a file."""
    while data:
        done = os.pwrite(file, data, place)
        data, place = data[done:], place + done
