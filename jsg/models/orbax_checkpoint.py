"""Reads the orbax checkpoints that `jsg convert` writes: tensors by name. It uses orbax's layout, but no JAX or orbax.

    orbax.json                  the length of every file below, and the SHA-256 of those that are not chunks
    orbax/_METADATA …           orbax's own files: the tree, the shardings
    orbax/NAME/zarr.json        a tensor's shape, type, grid of chunks and codecs (zarr 3)
    orbax/NAME/c/0/1            one chunk of smaller chunks with a CRC-32C each: a device's part of the tensor, or an
                                even part of that; if nothing divides it, the last chunk may be longer than the rest

The file driver of tensorstore reads the chunks, and neither it nor this file unpickles. A chunk is checked when it is
read, and all that a model needs is read before it is served, so a changed byte is found before the first answer.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from jsg.errors import ModelError
from jsg.models.forms import ORBAX_FOLDER as FOLDER
from jsg.models.forms import ORBAX_MANIFEST as MANIFEST
from jsg.sources import Fields, read_json

FORMAT = "jsg-orbax-1"
MAX_METADATA_BYTES = 16 * 2**20
MAX_CHUNK_BYTES = 64 * 2**20
"""The most bytes of the smallest chunk that can be read. `orbax_writer` makes these of about 1 MiB."""
DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
}
DTYPES |= {"int32": "I32", "int64": "I64", "int8": "I8", "uint8": "U8"}  # the parts of kernels in few bits
AGAIN = "run jsg convert again, or copy the directory again"


class OrbaxTensor:
    """One tensor of an orbax checkpoint.

    Attributes:
        shape: Its shape.
        dtype: Its type, as safetensors calls it.
    """

    def __init__(self, name: str, store: Any, is_turned: bool):
        """Takes the open tensorstore array, and whether its last axis comes first in a chunk, instead of its first."""
        self._name, self._store, self._order = name, store, "F" if is_turned else "C"
        self.shape = tuple(store.shape)
        self.dtype: str = DTYPES.get(store.dtype.name) or str(store.dtype.name)
        self._chunk: tuple[int, ...] = tuple(store.chunk_layout.read_chunk.shape)

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """A slice in the memory order of its chunks. Raises ModelError if a chunk is damaged or missing."""
        try:
            return self._store[slices].read(order=self._order).result()
        except (ValueError, OSError) as error:  # its text carries the path
            if "PERMISSION_DENIED" in str(error):
                raise ModelError(f"{self._name} must be readable, but a chunk is not; check its permissions") from None
            kind = "missing" if "NOT_FOUND" in str(error) else "damaged"
            raise ModelError(
                f"{self._name} must be as jsg convert wrote it, but a chunk of it is {kind}; {AGAIN}"
            ) from None

    def piece(self, outer: int = 0) -> tuple[int, int]:
        """The axis along which chunks are cut, and the length of one."""
        cut = [axis for axis in range(outer, len(self.shape)) if self._chunk[axis] < self.shape[axis]]
        axis = cut[0] if cut else outer
        return axis, self._chunk[axis]


def open_tensors(directory: Path) -> dict[str, OrbaxTensor]:
    """The tensors of a model directory by their stored names.

    Raises:
        ModelError: A file is missing, superfluous, changed or of another length. The message names it.
    """
    fields = Fields(MANIFEST, _manifest(directory))
    metadata = _check_files(directory / FOLDER, fields)
    import tensorstore as ts  # not at the top, because safetensors are read without it

    # No cache, because each chunk is read once.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    opening = {
        path.removesuffix("/zarr.json"): ts.open(_spec(directory / FOLDER / path), context=context)
        for path in metadata
        if path.endswith("/zarr.json")
    }
    return {name: _tensor(name, store, metadata[f"{name}/zarr.json"]) for name, store in opening.items()}


def manifest_text(files: Mapping[str, int], digests: Mapping[str, str]) -> str:
    """The text of a manifest. It has a SHA-256 of the rest of itself, so that each of its bytes is checked too."""
    manifest = {"format": FORMAT, "files": files, "digests": digests}
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    return json.dumps(manifest | {"digest": digest}, indent=1, sort_keys=True)


def files_of(folder: Path) -> dict[str, int]:
    """Path in a folder → length, for every file below it. Raises ModelError if a length cannot be read."""
    found = {}
    for root, _, files in os.walk(folder):
        for file in files:
            path = Path(root, file)
            name = path.relative_to(folder).as_posix()
            try:
                found[name] = path.stat().st_size
            except OSError as error:  # a link that leads nowhere
                raise _unreadable(name, error) from None
    return found


def codecs(chunk: tuple[int, ...], *, is_turned: bool, is_bytes: bool) -> list[dict[str, Any]]:
    """How a chunk is written: smaller chunks of this shape and then their index, each with its checksum.

    Args:
        chunk: The shape.
        is_turned: Whether the last axis comes first.
        is_bytes: Whether each number is a byte.
    """
    plain = {"name": "bytes", "configuration": {"endian": "little"}}
    numbers = {"name": "bytes"} if is_bytes else plain
    turned = [{"name": "transpose", "configuration": {"order": list(range(len(chunk)))[::-1]}}] if is_turned else []
    return [
        {
            "name": "sharding_indexed",
            "configuration": {
                "chunk_shape": list(chunk),
                "codecs": [*turned, numbers, {"name": "crc32c"}],
                "index_codecs": [plain, {"name": "crc32c"}],
            },
        }
    ]


def _manifest(directory: Path) -> dict[str, Any]:
    if not (directory / MANIFEST).is_file():
        raise ModelError(
            f"an orbax checkpoint must have {MANIFEST} beside it, which jsg convert writes, but this one has none; "
            "convert the safetensors checkpoint that it was made of"
        )
    manifest = read_json(directory / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise ModelError(f"{MANIFEST} must be of the format {FORMAT}, but is of another; run jsg convert again")
    text = manifest_text(manifest.get("files", {}), manifest.get("digests", {}))
    if (directory / MANIFEST).read_bytes() != text.encode():
        raise ModelError(f"{MANIFEST} must be as jsg convert wrote it, but was changed; {AGAIN}")
    return manifest


def _check_files(folder: Path, fields: Fields) -> dict[str, bytes]:
    """Compares the files with the manifest. Gives the contents of those that are not chunks."""
    lengths, digests = fields.get("files", {}), fields.get("digests", {})
    fields.require(isinstance(lengths, dict), "files", "be an object", lengths)
    fields.require(isinstance(digests, dict) and digests.keys() <= lengths.keys(), "digests", "name files", digests)
    found = files_of(folder)
    for path in lengths:
        if path not in found:
            raise ModelError(f"the checkpoint must have the file {FOLDER}/{path}, but it is missing; {AGAIN}")
    for path, length in found.items():
        if path not in lengths:
            raise ModelError(f"the checkpoint holds {FOLDER}/{path}, which jsg convert did not write; remove it")
        if length != lengths[path]:
            raise ModelError(
                f"{FOLDER}/{path} must have {lengths[path]} bytes, but has {length}; was it cut off? {AGAIN}"
            )
    metadata = {}
    for path, digest in digests.items():
        if found[path] > MAX_METADATA_BYTES:
            raise ModelError(f"{FOLDER}/{path} must have at most {MAX_METADATA_BYTES} bytes, but has {found[path]}")
        try:
            metadata[path] = (folder / path).read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from None
        if hashlib.sha256(metadata[path]).hexdigest() != digest:
            raise ModelError(f"{FOLDER}/{path} must be as jsg convert wrote it, but was changed; {AGAIN}")
    return metadata


def _unreadable(name: str, error: OSError) -> ModelError:
    """The error for an unreadable file, without the text of `error`, which has the path."""
    return ModelError(
        f"{FOLDER}/{name} must be a readable file ({type(error).__name__}); check links and permissions, or copy the "
        "directory again"
    )


def _spec(path: Path) -> dict[str, Any]:
    """The specification of an array for tensorstore, by which missing chunks are an error and not zeros."""
    kvstore = {"driver": "file", "path": f"{path.parent.resolve()}/"}
    return {"driver": "zarr3", "kvstore": kvstore, "open": True, "fill_missing_data_reads": False}


def _tensor(name: str, opening: Any, metadata: bytes) -> OrbaxTensor:
    """The tensor, if it has the form that `orbax_writer` makes, in which every byte has a checksum."""
    try:
        store = opening.result()
        found = json.loads(metadata)["codecs"]
        chunk = tuple(store.chunk_layout.read_chunk.shape)
        item_bytes = cast(int, store.dtype.numpy_dtype.itemsize)
        is_turned = found != codecs(chunk, is_turned=False, is_bytes=item_bytes == 1)
        is_ours = not is_turned or found == codecs(chunk, is_turned=True, is_bytes=item_bytes == 1)
        chunk_bytes = int(np.prod(chunk)) * item_bytes
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ModelError(f"{name} must be an array of zarr 3 ({type(error).__name__}); run jsg convert again") from None
    if not is_ours or chunk_bytes > MAX_CHUNK_BYTES:
        raise ModelError(f"{name} must have the chunks and checksums that jsg convert writes; run it again")
    return OrbaxTensor(name, store, is_turned)
