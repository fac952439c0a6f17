"""`jsg convert`: a model directory → one with an orbax checkpoint that is chunked for devices, or with few bits."""

import dataclasses
import errno
import fnmatch
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jsg.conversion import orbax_writer, rounding, safetensors_writer
from jsg.conversion.late_signals import signals_later
from jsg.conversion.orbax_writer import Layout, Promise
from jsg.conversion.safetensors_writer import Bundle
from jsg.errors import ConfigError, ModelError
from jsg.models import orbax_checkpoint
from jsg.models.checkpoint import Checkpoint, open_checkpoint
from jsg.models.config import read_spec
from jsg.models.forms import INDEX_FILE
from jsg.models.loading import (
    abstract_model,
    checkpoint_shapes,
    is_in_few_bits,
    is_unread,
    origins,
    with_own_head,
)
from jsg.models.origin import Origin, Source
from jsg.models.published.kernel import Kernel
from jsg.models.published.layout import Reshaped, Stored
from jsg.models.slices import outer_axis, sides_of, source_slices, view_of
from jsg.models.spec import ModelSpec

COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "LICENSE*")
"""Files of a model directory beside its weights."""
NOT_COPIED = (INDEX_FILE, orbax_checkpoint.MANIFEST)
EXISTS = "DST must not exist yet, but there is {!r}; remove it or take another name"
ROOM = 1.01
"""Room that the checkpoint needs per byte of its tensors, because of checksums, indices and block sizes."""

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all) after each chunk."""
Write = Callable[[Path, Callable[[int], None]], None]
"""Writes weights into a model directory that has the other files, and calls with the bytes of each chunk."""


def use_host() -> None:
    """Keeps JAX off accelerators in this process, which only writes files. Call it before JAX starts."""
    jax.config.update("jax_platforms", "cpu")


def convert(
    source: Path,
    destination: Path,
    *,
    quantization: str = "none",
    tp_size: int = 1,
    load_format: str = "auto",
    progress: Progress | None = None,
) -> int:
    """Writes the model of one directory into another, whole or not at all. Gives the bytes of its tensors.

    Tensors keep their names and types, those of kernels in few bits too. Each other one is cut where `tp_size` devices
    share it out, so each device reads its own chunks. Any other number of devices can load the checkpoint too. Memory
    holds a few chunks at a time. In the main thread, a signal that would end the process does so after the chunk under
    way is written and all is removed.

    Args:
        source: A model directory with safetensors or an orbax checkpoint.
        destination: The directory to make. It gets its name when all of it is written.
        quantization: `int4`, `int8` and `fp8` round kernels, and write safetensors in the form of compressed-tensors.
        tp_size: The number of devices that the chunks are made for.
        load_format: Which checkpoint of the source is read, `safetensors` or `orbax`; `auto` for the one that exists.
        progress: Called after each chunk.

    Raises:
        ConfigError: The destination exists or cannot be made there, or `tp_size` is not positive, or not 1 for what is
            rounded.
        ModelError: The source is damaged or not supported, it cannot be shared out or rounded so, or the destination
            has no room.
    """
    if tp_size < 1:
        raise ConfigError(f"--tp-size must be at least 1, but got {tp_size}")
    check_destination(destination)
    spec = read_spec(source)
    if quantization != "none":
        _check_rounding(source, spec, tp_size)
    config = with_own_head(source, spec, load_format).over_devices(tp_size)
    model = abstract_model(config, jnp.float32)
    with open_checkpoint(source, config.names, load_format) as checkpoint:
        checkpoint.require(checkpoint_shapes(model), lambda name: is_unread(config, name))
        if quantization == "none":
            promises = _promises(checkpoint, _layouts(model, tp_size))
            total, write = _chunked(promises)
        else:
            bundles = rounding.rounded(checkpoint, config, spec, quantization)
            total, write = _in_safetensors(bundles, quantization)
        with signals_later() as end_if_signalled:

            def told(done: int, total: int) -> None:
                end_if_signalled()
                if progress is not None:
                    progress(done, total)

            _write(source, destination, write, total, told)
    return total


def _check_rounding(source: Path, spec: ModelSpec, tp_size: int) -> None:
    """Raises ConfigError or ModelError if a model cannot be written in few bits."""
    if tp_size > 1:
        raise ConfigError(
            f"--quantization writes safetensors, which are not cut for devices, but got --tp-size {tp_size}; leave it "
            "out, and use jsg convert once more on what was written"
        )
    if is_in_few_bits(source, spec):
        raise ModelError(
            "--quantization needs a checkpoint whose kernels are not in few bits, but those of SRC are; convert the "
            "one that it was made of, or serve SRC with --quantization"
        )


def _chunked(promises: dict[str, Promise]) -> tuple[int, Write]:
    """The bytes of an orbax checkpoint, and what writes it."""

    def write(folder: Path, written: Callable[[int], None]) -> None:
        orbax_writer.write(folder, promises, written)
        orbax_checkpoint.open_tensors(folder)

    return sum(promise.nbytes for promise in promises.values()), write


def _in_safetensors(bundles: list[Bundle], quantization: str) -> tuple[int, Write]:
    """The bytes of a checkpoint of compressed-tensors, and what writes it."""

    def write(folder: Path, written: Callable[[int], None]) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["quantization_config"] = rounding.section(bundles, quantization)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        safetensors_writer.write(folder, bundles, written)

    return sum(bundle.num_bytes for bundle in bundles), write


def check_destination(destination: Path) -> None:
    """Raises ConfigError if the directory exists or cannot be made."""
    parent = destination.absolute().parent
    try:
        is_there, has_parent = destination.exists() or destination.is_symlink(), parent.is_dir()
        is_inside = destination.name == orbax_checkpoint.FOLDER and (parent / "config.json").is_file()
    except OSError as error:
        raise ConfigError(
            f"DST must be a path that can be made, but this one cannot ({_kind(error)}); check its name and permissions"
        ) from None
    if is_there:
        raise ConfigError(EXISTS.format(destination.name))
    if not has_parent:
        raise ConfigError(f"the directory that DST is made in must exist, but that of {destination.name!r} does not")
    if is_inside:
        raise ConfigError(
            f"DST must not be {destination.name!r} inside a model directory, whose weights that would be; "
            "take another name"
        )


def _kind(error: BaseException) -> str:
    """The kind of an error, without the paths in its text. The text of tensorstore begins with the kind."""
    word = re.match(r"([A-Z_]{2,}):", str(error))
    if word:
        return "RESOURCE_EXHAUSTED: no space" if word[1] == "RESOURCE_EXHAUSTED" else word[1]
    return errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)


def _promises(checkpoint: Checkpoint, layouts: dict[str, Layout]) -> dict[str, Promise]:
    """The tensors of the model by their stored names. Raises ModelError for one that could not be read again."""
    promises: dict[str, Promise] = {}
    for name, stored, tensor in checkpoint.stored():
        if name not in layouts:
            continue
        if isinstance(tensor, Kernel):
            promises |= {each: _whole(part, layouts[name].num_devices) for each, part in tensor.parts.items()}
        else:
            promises[stored] = Promise(tensor, layouts[name])
    for name, promise in promises.items():
        _, piece = promise.grid()
        if (piece_bytes := math.prod(piece) * promise.dtype.itemsize) > orbax_checkpoint.MAX_CHUNK_BYTES:
            raise ModelError(
                f"{name} must be cut into chunks of at most {orbax_checkpoint.MAX_CHUNK_BYTES >> 20} MiB, but the "
                f"smallest would have {piece_bytes >> 20}; its rows are too long for jsg convert"
            )
    return promises


def _whole(tensor: Stored, num_devices: int) -> Promise:
    """A part of a kernel in few bits, which is cut by size alone: devices do not share out words and scales alike."""
    if not tensor.shape:
        tensor = Reshaped(tensor, (1,))
    outer = max(0, len(tensor.shape) - 2)
    return Promise(tensor, Layout(outer, 1, 1, False, num_devices, outer))


def _layouts(model: nnx.Module, tp_size: int) -> dict[str, Layout]:
    """How the tensors are cut that a model's parameters are made of."""
    layouts: dict[str, Layout] = {}
    for origin, shape in origins(model):
        for tensor in origin.sources:
            layout = _in_file(tensor, _layout(tensor, origin, shape, tp_size))
            unit = math.gcd(layout.unit, layouts.get(tensor.name, layout).unit)  # that suits all parts of a tensor
            layouts[tensor.name] = dataclasses.replace(layout, unit=unit)
    return layouts


def _layout(source: Source, origin: Origin, shape: tuple[int, ...], tp_size: int) -> Layout:
    """How a source is cut into the slices that devices read, which lie side by side along one of its axes."""
    axis, parts, unit = 0, 1, 1
    if origin.split_axis is not None:
        width = shape[origin.split_axis] // tp_size
        spans = [(first, first + width) for first in range(0, tp_size * width, width)]
        slices = {tuple(source_slices(source, origin, shape, span)) for span in spans}
        cut = [index for index, each in enumerate(next(iter(slices))) if each != slice(None)]
        axis = cut[0] if cut else 0
        parts = len(slices) if cut and source.shape[axis] % len(slices) == 0 else 1
    view, sides = view_of(source, origin, shape), sides_of(source, origin)
    outer = outer_axis(view, sides, len(sides) - 1 - axis if origin.transposed else axis)
    if outer is not None:
        unit = source.shape[axis] // view[outer]
    return Layout(axis, parts, unit, origin.transposed and len(sides) == 2, tp_size)


def _in_file(source: Source, layout: Layout) -> Layout:
    """The layout of a tensor that the source is a part of. Devices share out each part, not the tensor as a whole."""
    if (part := source.part) is None:
        return layout
    outer, axis, last = int(part.expert is not None), layout.axis, len(source.shape) - 1
    axis_in_file = outer + (last - axis if part.is_transposed else axis)
    is_whole = part.stored[axis_in_file] == source.shape[axis]
    heads = part.rows_of_head[1] if axis == 0 else 1
    return Layout(
        axis_in_file,
        layout.parts if is_whole else 1,
        math.lcm(layout.unit, heads),
        layout.is_turned and not part.is_transposed,
        layout.num_devices,
        outer,
    )


def _write(source: Path, destination: Path, write: Write, total: int, progress: Progress) -> None:
    """Writes into a directory beside the destination, and renames it when it is complete."""
    parent = destination.parent.resolve()  # mkdtemp cuts `link/..` out of a path
    free = shutil.disk_usage(parent).free
    if free < total * ROOM:
        raise ModelError(
            f"the file system of DST must have {total * ROOM / 1e9:.1f} GB free, but has {free / 1e9:.1f}; "
            "make room or take another place"
        )
    done = 0

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    partial = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=parent))
        made = partial / "made"  # only its owner can read a temporary directory; this one has the modes of the umask
        made.mkdir()
        _copy_files(source, made)
        write(made, written)
        written(0)  # a signal may have come since the last chunk
        made.rename(destination)
    except (OSError, ValueError) as error:  # tensorstore raises ValueError; the texts of both have paths
        if getattr(error, "errno", None) in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):  # another process made it
            raise ConfigError(EXISTS.format(destination.name)) from None
        raise ModelError(
            f"DST must be writable, but writing it failed ({_kind(error)}); check its name, space and permissions"
        ) from None
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)


def _copy_files(source: Path, made: Path) -> None:
    """Copies the files beside the weights. Raises ModelError if a source cannot be read, OSError if a copy fails."""
    for path in sorted(source.iterdir()):
        is_wanted = any(fnmatch.fnmatch(path.name, each) for each in COPIED) and path.name not in NOT_COPIED
        if not is_wanted or not path.is_file():
            continue
        try:
            file = path.open("rb")
        except OSError as error:
            raise ModelError(f"SRC: {path.name} must be readable ({_kind(error)}); check its permissions") from None
        with file, (made / path.name).open("wb") as copy:
            shutil.copyfileobj(file, copy)
