"""The checkpoint of a model directory, safetensors or orbax, as one collection of named tensors. No JAX.

All is validated before the first tensor is read. The safetensors library checks each header (its length, the offsets,
that the data fills the file), `orbax_checkpoint.py` checks an orbax checkpoint, and `require` checks that names, shapes
and types are those that the model needs.
"""

import contextlib
import itertools
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import ml_dtypes  # teaches numpy bfloat16, which safetensors asks it for
import numpy as np

from jsg.errors import ModelError
from jsg.kernels_pallas.form import Form
from jsg.malloc import rows_at_once
from jsg.models import orbax_checkpoint
from jsg.models.forms import GGUF_LINK, INDEX_FILE, SINGLE_FILE, has_weights, weights_form
from jsg.models.gguf_tensors import open_tensors
from jsg.models.published.kernel import Kept, restored
from jsg.models.published.record import KeptForm
from jsg.models.spec import AS_STORED, TensorNames
from jsg.sources import read_json

MAX_FILES = 1000
DTYPES = ("F32", "F16", "BF16")
EIGHT_BITS = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)
"""Ends of names of tensors that old checkpoints hold and no model needs, because they are computed."""


NO_HEAD = "a model that was saved without its head can embed (--task embed), but generates no text"


class Piece(NamedTuple):
    """A part of a tensor that is cheap to read at once: `length` indices of `axis`, from a multiple of `length` on."""

    axis: int
    length: int


@runtime_checkable  # the test run checks arguments
class StoredTensor(Protocol):
    """One tensor in a file. Several threads may read at the same time.

    Attributes:
        shape: Its shape.
        dtype: Its type, as safetensors calls it.
    """

    shape: tuple[int, ...]
    dtype: str

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """A slice along any axes, in any order in memory. Changes nothing. Raises ModelError if it is damaged."""
        ...

    def piece(self, outer: int = 0) -> tuple[int, int]:
        """An axis, and how many indices of it the file holds side by side. Changes nothing.

        Args:
            outer: How many of the first axes the caller cuts into single indices.
        """
        ...


@runtime_checkable
class FewBits(StoredTensor, Protocol):
    """A tensor that is restored from few bits as it is read, if it is not whole in the file.

    Attributes:
        num_bytes: Its bytes in the file; 0 if it is whole.
    """

    num_bytes: int

    @property
    def kept_form(self) -> KeptForm | None:
        """Its form, with what else kernels must have in common to be kept as one; None if it must be restored."""
        ...

    def kept(self, slices: tuple[slice, ...], form: Form) -> Kept:
        """A slice of [..., out, in] in a form that its own can be. Raises ModelError if it is damaged."""
        ...


class Listed(NamedTuple):
    """What is known of a tensor without its numbers: shape and type, or neither; and whether it may be left out."""

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    is_spare: bool = False


def faults(
    held: Mapping[str, Listed], shapes: Mapping[str, tuple[int, ...]], is_unread: Callable[[str], bool]
) -> Iterator[str]:
    """What makes a checkpoint no one of a model, a sentence each.

    Args:
        held: The tensors that it holds, by the names of the modules.
        shapes: Shape of every tensor that the model needs.
        is_unread: Whether a tensor of this name may exist, which is not read.
    """
    for name in shapes:
        if name not in held:
            hint = NO_HEAD if name == "lm_head.weight" else "is it the one of this config.json?"
            yield f"the checkpoint must hold {name}, but does not; {hint}"
    for name, listed in held.items():
        if name not in shapes and not name.endswith(IGNORED_SUFFIXES) and not is_unread(name) and not listed.is_spare:
            yield (
                f"the checkpoint holds {name!r}, which this architecture does not have; "
                "is it the one of this config.json?"
            )
    for name, needed in shapes.items():
        shape, dtype, _ = held.get(name, Listed())
        if shape is not None and shape != needed:
            yield f"{name} must have the shape {list(needed)} by config.json, but has {list(shape)}"
        if dtype is not None and dtype not in DTYPES:
            yield (
                f"{name} must be one of {', '.join(DTYPES)}, but is {dtype}, and nothing in the checkpoint or in "
                "config.json says how it is quantised"
            )


class Checkpoint:
    """Tensors by name, read slice by slice. Made by `open_checkpoint`.

    Attributes:
        num_bytes_read: Bytes of all slices that were read, as the file has them.
    """

    def __init__(self, tensors: Mapping[str, StoredTensor], names: TensorNames = AS_STORED):
        """Takes the tensors by their stored names, and how these are named here."""
        self.num_bytes_read = 0
        self._lock = threading.Lock()
        self._stored = {names.here(name): (name, tensor) for name, tensor in tensors.items()}
        self._may_add_biases = names.published is not None and names.published.adds_biases
        if len(self._stored) != len(tensors):
            raise ModelError("the checkpoint names a tensor twice, in the old way and in the new one; save it again")

    def require(self, shapes: Mapping[str, tuple[int, ...]], is_unread: Callable[[str], bool]) -> None:
        """Checks that the checkpoint holds exactly these tensors.

        Args:
            shapes: Shape of every tensor that the model needs.
            is_unread: Whether a tensor of this name may exist, which is not read.

        Raises:
            ModelError: A tensor is missing, superfluous, of another shape, or of a type that is not supported.
        """
        for fault in faults(self.listed(), shapes, is_unread):
            raise ModelError(fault)

    def listed(self) -> dict[str, Listed]:
        """What is known of each tensor. Biases of zeros may be left out if the program that wrote them adds such."""
        return {
            name: Listed(
                tensor.shape,
                tensor.dtype,
                self._may_add_biases and name.endswith(".bias") and not tensor.read((slice(None),)).any(),
            )
            for name, (_, tensor) in self._stored.items()
        }

    def holds(self, name: str) -> bool:
        """Whether it has a tensor of this name."""
        return name in self._stored

    def differ(self, name: str, other: str) -> bool:
        """Whether the checkpoint holds both tensors and they are unequal. Reads both until numbers differ."""
        if name not in self._stored or other not in self._stored:
            return False
        (_, first), (_, second) = self._stored[name], self._stored[other]
        if first.shape != second.shape:
            return True
        axis, length = first.piece()
        size = first.shape[axis]
        for start in range(0, size, length):
            part = (*(slice(None),) * axis, slice(start, min(start + length, size)))
            if not np.array_equal(self.read(name, part), self.read(other, part)):
                return True
        return False

    def read(self, name: str, slices: tuple[slice, ...] = ()) -> np.ndarray:
        """One tensor, or a slice along its first axes, in the file's type. Several threads may call it at a time.

        Raises:
            ModelError: The data is damaged. The message names the tensor.
        """
        _, tensor = self._stored[name]
        numbers = tensor.read((*slices, *(slice(None),) * (len(tensor.shape) - len(slices))))
        self._count(tensor, numbers.size, numbers.nbytes)
        return numbers

    def _count(self, tensor: StoredTensor, num_read: int, num_bytes: int) -> None:
        """Counts numbers that were read, which take so many bytes if they are whole."""
        few = tensor.num_bytes if isinstance(tensor, FewBits) else 0
        with self._lock:
            self.num_bytes_read += num_read * few // math.prod(tensor.shape) if few else num_bytes

    def kept(self, name: str, slices: tuple[slice, ...], form: Form) -> Kept:
        """A slice of [..., out, in] of a kernel that has a form, in this one. See `read` and `Form.joined`."""
        _, tensor = self._stored[name]
        assert isinstance(tensor, FewBits), "a tensor with a form"
        kept = tensor.kept(slices, form)
        self._count(tensor, kept.numbers.size * form.per_byte, kept.numbers.nbytes)
        return kept

    def piece(self, name: str, outer: int = 0) -> Piece:
        """The part of the tensor that is cheap to read at once, of one index of each of the `outer` first axes."""
        return Piece(*self._stored[name][1].piece(outer))

    def forms(self) -> dict[str, KeptForm]:
        """How kernels are kept in few bits, by name, of those that can be."""
        # `isinstance` of a protocol would take a second for the experts of a large model.
        forms = {name: getattr(tensor, "kept_form", None) for name, (_, tensor) in self._stored.items()}
        orders = dict[str, str]()  # programs depend on which kernels have one order, and not on the order
        return {
            name: form._replace(order=orders.setdefault(form.order, f"order {len(orders)}")) if form.order else form
            for name, form in forms.items()
            if form is not None
        }

    def stored(self) -> Iterator[tuple[str, str, StoredTensor]]:
        """The name, the stored name and the tensor, of each tensor."""
        return ((name, stored, tensor) for name, (stored, tensor) in self._stored.items())


class SafeTensor:
    """One tensor of an open safetensors file, which holds it row by row."""

    def __init__(self, file: Any, name: str):
        self._file, self._name = file, name
        header = file.get_slice(name)
        self.shape, self.dtype = tuple(header.get_shape()), header.get_dtype()

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """A copy of a slice."""
        if all(each == slice(None) for each in slices):
            return self._file.get_tensor(self._name)
        return self._file.get_slice(self._name)[slices]

    def piece(self, outer: int = 0) -> tuple[int, int]:
        """Rows of about `PIECE_BYTES`."""
        return outer, rows_at_once(self.shape, 4 if self.dtype == "F32" else 2, outer)


class MappedTensor:
    """One tensor of a safetensors file of a type that the library does not give to numpy."""

    def __init__(self, file: np.ndarray, first: int, of: SafeTensor):
        """Takes the bytes of the file, where in them the tensor begins, and the tensor's shape and type."""
        self.shape, self.dtype = of.shape, of.dtype
        last = first + math.prod(self.shape)
        self._numbers = file[first:last].view(EIGHT_BITS[self.dtype]).reshape(self.shape)

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """A copy of a slice."""
        return np.array(self._numbers[slices])

    def piece(self, outer: int = 0) -> tuple[int, int]:
        """Rows of about `PIECE_BYTES`."""
        return outer, rows_at_once(self.shape, 1, outer)


def has_checkpoint(directory: Path) -> bool:
    """Whether a directory has weights of either kind."""
    return has_weights(path.name for path in directory.iterdir())


@contextlib.contextmanager
def open_checkpoint(directory: Path, names: TensorNames = AS_STORED, kind: str = "auto") -> Iterator[Checkpoint]:
    """The checkpoint of a model directory. Its files stay open inside the `with`.

    Args:
        directory: The model directory.
        names: How its tensors are named and stored. Quantised kernels are restored as they are read.
        kind: `safetensors`, in one file or in shards, `orbax`, or `auto` for the one that exists.

    Raises:
        ModelError: There is no such checkpoint, or there are both and `kind` is `auto`; a file is missing or damaged;
            shards and index disagree; a kernel lacks a tensor, or has one that does not fit.
    """
    form = weights_form((path.name for path in directory.iterdir()), kind)
    with contextlib.ExitStack() as stack:
        tensors: Mapping[str, StoredTensor]
        if form == "safetensors":
            tensors = _open_safetensors(directory, stack)
        elif form == "orbax":
            tensors = orbax_checkpoint.open_tensors(directory)
        else:
            tensors = open_tensors(sorted(directory.glob(f"{GGUF_LINK}*")))
        if names.published is not None:
            tensors = restored(tensors, names.published, names.here)
        yield Checkpoint(tensors, names)


def listed_tensors(directory: Path, names: TensorNames, kind: str = "auto") -> dict[str, Listed]:
    """What is known of the tensors of a checkpoint of which files may be missing; nothing if the index is missing, too.

    Args:
        directory: The model directory.
        names: As `open_checkpoint`.
        kind: As `open_checkpoint`.

    Raises:
        ModelError: A file that is there is damaged.
    """
    if (directory / INDEX_FILE).is_file() and kind != "orbax":
        weight_map = _weight_map(directory)
        if not all((directory / shard).is_file() for shard in weight_map.values()):
            stored = weight_map if names.published is None else itertools.chain(*names.published.sorted(weight_map))
            may_add = names.published is not None and names.published.adds_biases
            return {names.here(name): Listed(is_spare=may_add and name.endswith(".bias")) for name in stored}
    if not has_checkpoint(directory):
        return {}
    with open_checkpoint(directory, names, kind) as checkpoint:
        return checkpoint.listed()


def _open_safetensors(directory: Path, stack: contextlib.ExitStack) -> Mapping[str, StoredTensor]:
    if not (directory / INDEX_FILE).is_file():
        return _tensors_of(directory / SINGLE_FILE, stack)
    weight_map = _weight_map(directory)
    opened = {shard: _tensors_of(directory / shard, stack) for shard in sorted(set(weight_map.values()))}
    held = {name: shard for shard, tensors in opened.items() for name in tensors}
    for name in held.keys() ^ weight_map.keys():
        raise ModelError(f"{INDEX_FILE} and its files disagree about the tensor {name!r}; download them again")
    return {name: opened[shard][name] for name, shard in held.items()}


def _tensors_of(path: Path, stack: contextlib.ExitStack) -> Mapping[str, StoredTensor]:
    """The tensors of a safetensors file."""
    file = _open_file(path, stack)
    tensors = {name: SafeTensor(file, name) for name in file.keys()}  # noqa: SIM118 # a method
    mapped = [name for name, tensor in tensors.items() if tensor.dtype in EIGHT_BITS]
    if not mapped:
        return tensors
    everything = np.memmap(path, np.uint8, "r")
    begin = 8 + int.from_bytes(everything[:8].tobytes(), "little")
    header = json.loads(everything[8:begin].tobytes())  # the library has checked it
    places = {name: begin + header[name]["data_offsets"][0] for name in mapped}
    return tensors | {name: MappedTensor(everything, first, tensors[name]) for name, first in places.items()}


def _weight_map(directory: Path) -> dict[str, str]:
    """From tensor to file, as the index says. Raises ModelError if it is damaged."""
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ModelError(f"{INDEX_FILE} must have a weight_map from tensor to file, but has none; download it again")
    shards = set(weight_map.values())
    if len(shards) > MAX_FILES:
        raise ModelError(f"{INDEX_FILE} must name at most {MAX_FILES} files, but names {len(shards)}")
    for shard in sorted(shards):
        if Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ModelError(f"{INDEX_FILE} must name safetensors files beside itself, but names {shard!r}")
    return weight_map


def _open_file(path: Path, stack: contextlib.ExitStack) -> Any:
    from safetensors import SafetensorError, safe_open  # here: dummy weights run without the library

    try:
        return stack.enter_context(safe_open(path, framework="numpy"))
    except FileNotFoundError:
        raise ModelError(
            f"the checkpoint must have the file {path.name}, but it is missing; download it again"
        ) from None
    except OSError as error:  # its text would carry the path
        raise ModelError(f"{path.name} must be readable ({type(error).__name__}); check its permissions") from None
    except SafetensorError as error:
        raise ModelError(f"{path.name} must be a whole safetensors file ({error}); download it again") from None
