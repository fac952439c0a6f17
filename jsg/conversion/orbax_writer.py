"""Writes an orbax checkpoint tensor by tensor, chunked for a number of devices. `orbax_checkpoint.py` reads it.

Orbax's own `PyTreeCheckpointHandler` writes the tree, so `StandardCheckpointer().restore` reads it anywhere. It expects
whole arrays. Here a tensor is a promise, which the type handler below reads chunk by chunk while it writes.
"""

import base64
import dataclasses
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import type_handlers

from jsg.malloc import PIECE_BYTES
from jsg.models.orbax_checkpoint import DTYPES, FOLDER, MANIFEST, codecs, files_of, manifest_text
from jsg.models.published.layout import Stored
from jsg.models.tensor_parallel import TENSOR_AXIS

FILE_BYTES = 64 * 2**20
"""The most bytes of a chunk, which is a file. A writer holds one chunk as it is read and as it is written."""
LEAST_OF_LIMIT = 1 / 4
"""A chunk that divides a device's part evenly is used, unless it is smaller than this part of the largest chunk."""
NUMPY = {stored: jnp.dtype(name) for name, stored in DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one tensor is written.

    Attributes:
        axis: The axis along which it is cut.
        parts: The number of even parts that devices have.
        unit: How many indices of the axis belong together, such as those of a head. They are separated only if no other
            cut is possible.
        is_turned: Whether the last axis comes first in a chunk, as in the model's parameter, so that loading transposes
            nothing.
        num_devices: Devices of the checkpoint. They are more than `parts` if several have the same part.
        outer: How many of the first axes, such as that of experts, are cut into single indices.
    """

    axis: int
    parts: int
    unit: int
    is_turned: bool
    num_devices: int
    outer: int = 0


@dataclasses.dataclass(frozen=True)
class Promise:
    """A tensor that is read while it is written. Promises are the leaves of the tree that orbax writes."""

    tensor: Stored
    layout: Layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype:
        """The tensor's type."""
        return NUMPY[self.tensor.dtype]

    @property
    def nbytes(self) -> int:
        """The bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize

    def grid(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of its chunks and of the smaller chunks in them; see `grid`."""
        return grid(self.shape, self.dtype.itemsize, self.layout)


def write(folder: Path, promises: Mapping[str, Promise], written: Callable[[int], None]) -> None:
    """Writes a checkpoint and its manifest into a model directory.

    Args:
        folder: The model directory.
        promises: The tensors by name.
        written: Called with the bytes of each chunk.

    Raises:
        ModelError: A tensor cannot be read.
        OSError: A file cannot be written.
    """
    registry = type_handlers.create_type_handler_registry((Promise, _PromiseHandler(written)))
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # orbax warns that a checkpoint without a `jax.Array` lacks something
    try:
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=True, use_compression=False, type_handler_registry=registry
        )
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save((folder / FOLDER).resolve(), args=ocp.args.PyTreeSave(dict(promises)))
    finally:
        logger.setLevel(level)
    _write_shardings(folder / FOLDER, promises)
    _write_manifest(folder)


def grid(shape: tuple[int, ...], item_bytes: int, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of a chunk, which is a file, and of the smaller chunks in it, each of which can be read by itself.

    Both are cut only along the layout's axis, and a file has a whole number of smaller chunks. A device's part is a
    whole number of files if it can be divided. If it cannot (a vocabulary may be a prime), the chunks are as equal as
    possible, and the last one is longer than the rest of the tensor.
    """
    outer, shape = shape[: layout.outer], shape[layout.outer :]
    axis = layout.axis - layout.outer
    length, unit = shape[axis], layout.unit
    part = length // layout.parts
    index_bytes = max(1, math.prod(shape) // max(1, length)) * item_bytes
    most, few = max(1, FILE_BYTES // index_bytes), max(1, PIECE_BYTES // index_bytes)
    large = _divisor(part, unit, most)
    small = _divisor(large or part, unit, few)
    if large is None or small is None:
        if small is None and few < unit:
            small = _divisor(unit, 1, few) or few
        small = small or _equal(-(-length // unit), few // unit) * unit
        large = _equal(-(-length // small), most // small) * small

    def cut(size: int) -> tuple[int, ...]:
        return (*(1 for _ in outer), *shape[:axis], size, *shape[axis + 1 :])

    return cut(large), cut(small)


def _divisor(length: int, unit: int, limit: int) -> int | None:
    """The largest divisor of a length that is at most `limit`, and a multiple or a divisor of `unit`.

    None if it is much smaller than the limit, as for a prime.
    """
    divisors = [d for d in range(1, math.isqrt(length) + 1) if length % d == 0]
    divisors += [length // d for d in divisors]
    best = max((d for d in divisors if d <= limit and (d % unit == 0 or unit % d == 0)), default=0)
    return best if best > 0 and best >= min(length, limit) * LEAST_OF_LIMIT else None


def _equal(length: int, limit: int) -> int:
    """The smallest chunk length that needs no more chunks for a length than `limit` does."""
    return -(-length // -(-length // limit))


@final
class _PromiseHandler(type_handlers.TypeHandler):
    """Writes promises in the form in which orbax stores a `jax.Array`."""

    def __init__(self, written: Callable[[int], None]):
        self._written = written

    def typestr(self) -> str:
        return "jax.Array"

    async def metadata(self, infos: Sequence[Any]) -> Sequence[Any]:
        raise NotImplementedError("a promise is only written")

    async def deserialize(self, infos: Sequence[Any], args: Sequence[Any] | None = None) -> Sequence[Any]:
        raise NotImplementedError("a promise is only written")

    async def serialize(
        self, values: Sequence[Promise], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """Writes one tensor after another, chunk by chunk. When it returns, all is written."""
        for promise, info in zip(values, infos, strict=True):
            await info.await_path_creation()
            large, small = promise.grid()
            spec = type_handlers.get_json_tspec_write(
                info, use_ocdbt=False, global_shape=promise.shape, local_shape=large, dtype=promise.dtype
            )
            spec["metadata"]["chunk_grid"]["configuration"]["chunk_shape"] = large
            spec["metadata"]["codecs"] = codecs(
                small, is_turned=promise.layout.is_turned, is_bytes=promise.dtype.itemsize == 1
            )
            store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
            cuts = [
                [slice(first, min(first + step, length)) for first in range(0, length, step)]
                for length, step in zip(promise.shape, large, strict=True)
            ]
            for slices in itertools.product(*cuts):
                numbers = promise.tensor.read(slices)
                await _put(store, slices, numbers)
                self._written(numbers.nbytes)
        return []


async def _put(store: Any, slices: tuple[slice, ...], numbers: np.ndarray) -> None:
    """Writes one chunk by tensorstore's threads, and waits for them."""
    await store[slices].write(numbers)


def _write_shardings(folder: Path, promises: Mapping[str, Promise]) -> None:
    """Writes how devices share each tensor out, in orbax's form. The devices are those that restore it."""
    shardings = {}
    for name, promise in promises.items():
        layout = promise.layout
        axis = layout.axis if layout.parts == layout.num_devices > 1 else None
        sharding = ocp.metadata.NamedShardingMetadata(
            shape=np.array([layout.num_devices]),
            axis_names=[TENSOR_AXIS],
            partition_spec=tuple(TENSOR_AXIS if each == axis else None for each in range(len(promise.shape))),
        )
        shardings[base64.urlsafe_b64encode(name.encode()).decode()] = sharding.to_serialized_string()
    (folder / "_sharding").write_text(json.dumps(shardings), encoding="utf-8")


def _write_manifest(directory: Path) -> None:
    files = files_of(directory / FOLDER)
    digests = {
        path: hashlib.sha256((directory / FOLDER / path).read_bytes()).hexdigest()
        for path in files
        if "/c/" not in path
    }
    (directory / MANIFEST).write_text(manifest_text(files, digests), encoding="utf-8")
