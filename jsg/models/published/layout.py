"""How a kernel in few bits lies in the tensors of a published checkpoint. No JAX and no numpy."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn, Protocol

from jsg.errors import ModelError

DAMAGED = "download the checkpoint again"
SCALES = ("F32", "F16", "BF16")
EXPONENTS = ("F8_E8M0", "U8")
"""Types of scales that are powers of two: byte b is 2^(b - 127)."""

Number = Literal["int4", "int8", "e2m1", "e4m3"]
"""A kind of number."""


class Stored(Protocol):
    """The part of `StoredTensor` that layouts need."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        ...

    @property
    def dtype(self) -> str:
        """The type, as safetensors calls it."""
        ...

    def read(self, slices: tuple[slice, ...]) -> Any:
        """A slice."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Reshaped:
    """A small tensor in another shape. It is read whole."""

    tensor: Stored
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The tensor's type."""
        return self.tensor.dtype

    def read(self, slices: tuple[slice, ...]) -> Any:
        """A slice."""
        return self.tensor.read((slice(None),) * len(self.tensor.shape)).reshape(self.shape)[slices]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plane:
    """A matrix [..., out, in] of small numbers, or of scales or zeros [..., rows, groups], as a tensor holds it.

    Attributes:
        tensor: The tensor.
        shape: The shape of the matrix.
        bits: Bits of a number in a word; None if numbers are not packed.
        per_word: How many numbers a word has, the first in the lowest bits.
        word_bytes: The length of the last axis, if that is the bytes of a word.
        packs_rows: A word has numbers of one column, not of one row.
        is_turned: The tensor is [..., in, out].
        lanes: For each number of a word its place in there; None if they are in order.
        added: What is added to each word of 32 bits before it is taken apart.
    """

    tensor: Stored
    shape: tuple[int, ...]
    bits: int | None = None
    per_word: int = 1
    word_bytes: int = 0
    packs_rows: bool = False
    is_turned: bool = False
    lanes: tuple[int, ...] | None = None
    added: int = 0

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that the tensor must have."""
        *lead, rows, columns = self.shape
        sizes = [-(-rows // self.per_word), columns] if self.packs_rows else [rows, -(-columns // self.per_word)]
        return (*lead, *sizes[:: -1 if self.is_turned else 1], *([self.word_bytes] if self.word_bytes else []))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One kernel: (number - zero) x scale.

    Attributes:
        kind: The kind of its numbers.
        numbers: Where they are.
        scale: Where its scales are, one for each block.
        block: How many rows and columns a block has.
        zero: Where its zeros are, one for each block.
        no_zero: The zero of all numbers if there is none.
        order: A tensor with the group of each column; None if groups are consecutive columns.
        may_be_unset: An order of -1 alone means none.
        factor: A tensor without axes that multiplies all scales.
        divides: The factor divides.
        is_turned: The model has it as [..., in, out].
        is_exact: See `Form`.
    """

    kind: Number
    numbers: Plane
    scale: Plane
    block: tuple[int, int]
    zero: Plane | None = None
    no_zero: int = 0
    order: Stored | None = None
    may_be_unset: bool = False
    factor: Stored | None = None
    divides: bool = False
    is_turned: bool = False
    is_exact: bool = False


def module_of(kernel: str) -> str:
    """The name of a kernel's module."""
    return kernel.removesuffix(".weight")


def full_name(kernel: str, role: str) -> str:
    """The name of the tensor with this role for a kernel."""
    return (module_of(kernel) if role.startswith(".") else kernel) + role


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The tensors of a checkpoint that make one kernel.

    A role is the end of a tensor's name: what follows the kernel's name, or from a dot on the module's.

    Attributes:
        name: The kernel's name, such as `model.layers.0.mlp.down_proj.weight`.
        parts: Its tensors by their roles.
    """

    name: str
    parts: Mapping[str, Stored]

    @property
    def module(self) -> str:
        """The module's name."""
        return module_of(self.name)

    def full_name(self, role: str) -> str:
        """The name of the tensor with this role."""
        return full_name(self.name, role)

    def find(self, role: str) -> Stored | None:
        """The tensor with this role, if there is one."""
        return self.parts.get(role)

    def tensor(self, role: str, dtypes: Sequence[str], *axes: int) -> Stored:
        """The tensor with this role.

        Args:
            role: The role.
            dtypes: The types that it may have.
            axes: How many axes it may have; any number of them by default.

        Raises:
            ModelError: It is missing, or is not as it must be.
        """
        tensor = self.find(role)
        if tensor is None:
            name = self.full_name(role)
            raise ModelError(f"the checkpoint must hold {name}, a part of {self.name}, but does not; {DAMAGED}")
        if tensor.dtype not in dtypes:
            raise ModelError(f"{self.full_name(role)} must be {' or '.join(dtypes)}, but is {tensor.dtype}; {DAMAGED}")
        if 0 in tensor.shape:
            self._refuse(role, "numbers")
        if axes and len(tensor.shape) not in axes:
            self._refuse(role, f"{' or '.join(map(str, axes))} axes")
        return tensor

    def plane(self, role: str, dtypes: Sequence[str], shape: tuple[int, ...], **packing: Any) -> Plane:
        """The plane in the tensor with this role, whose shape must fit. See `tensor`."""
        plane = Plane(tensor=self.tensor(role, dtypes), shape=shape, **packing)
        if plane.tensor.shape != plane.stored_shape:
            self._refuse(role, f"the shape {list(plane.stored_shape)} beside the other tensors of {self.name}")
        return plane

    def reshaped(self, role: str, dtypes: Sequence[str], shape: tuple[int, ...] = ()) -> Stored:
        """The small tensor with this role, in a shape with as many numbers. See `tensor`."""
        tensor = self.tensor(role, dtypes)
        if math.prod(tensor.shape) != math.prod(shape):
            self._refuse(role, f"{math.prod(shape)} numbers beside the other tensors of {self.name}")
        return Reshaped(tensor, shape)

    def scale(
        self, role: str, dtypes: Sequence[str], shape: tuple[int, ...], block: tuple[int, int]
    ) -> tuple[Plane, tuple[int, int]]:
        """The scales of a kernel of this shape and their blocks: one for each block, or for each row, or one for all.

        Which of these, the tensor says. A block that is 0 wide has all columns.
        """
        tensor, (*lead, rows, columns) = self.tensor(role, dtypes), shape
        wide = block[1] or columns
        count = math.prod(tensor.shape) / math.prod(lead)
        if tensor.shape == (*lead, -(-rows // block[0]), -(-columns // wide)):
            return Plane(tensor=tensor, shape=tensor.shape), (block[0], wide)
        if count not in (1, rows):
            self._refuse(role, f"one scale, one for each of {rows} rows, or one for each {block[0]} x {wide} numbers")
        small = (*lead, int(count), 1)
        return Plane(tensor=Reshaped(tensor, small), shape=small), (1 if count == rows else rows, columns)

    def _refuse(self, role: str, rule: str) -> NoReturn:
        shape = list(self.parts[role].shape)
        raise ModelError(f"{self.full_name(role)} must have {rule}, but has the shape {shape}; {DAMAGED}")
