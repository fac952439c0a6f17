"""Tensors read straight into a parameter's memory, piece by piece, where that memory is the host's: on a CPU.

Beside what it makes, a host holds a piece for each thread, however large a tensor is; but one tensor where it is
rounded to 8 bits and its file has it in columns, for a scale is decided by a whole row.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jsg.models.layers import Origin, Source
from jsg.models.places import Piece, Reader, Slices, Span, box_of, cut, source_slices, view_of
from jsg.models.quantise import Quantised, quantise

ALIGNMENT = 64
"""Bytes: on a CPU JAX takes over memory that begins at a multiple of this, and copies any other."""
ROUNDED_BYTES = 2**20
"""Of float32, which is what is rounded to 8 bits at once where more is read at once."""


class _Target(NamedTuple):
    """The arrays of one device: what of the shared axis they hold (None: all), and one array for each of the leaves."""

    span: Span | None
    arrays: list[np.ndarray]


def fill(
    declared: jax.ShapeDtypeStruct | Quantised,
    origin: Origin,
    reader: Reader,
    pool: concurrent.futures.Executor,
    spans: Sequence[Span | None],
) -> list[list[np.ndarray]]:
    """For each span of the shared axis, the arrays of that part of the parameter: its leaves, ready for JAX to take.

    Where spans share out what a scale belongs to, whole rows are read, once for all of them.

    Args:
        declared: Shapes and types of the whole value.
        origin: The tensors it is made of.
        reader: Reads them.
        pool: Reads pieces at the same time.
        spans: What is wanted; None is all of it.

    Raises:
        ModelError: A tensor cannot be read, or not be rounded to 8 bits.
    """
    leaves, axis = jax.tree.leaves(declared), origin.split_axis
    targets = [_Target(span, [_empty(leaf, axis, span) for leaf in leaves]) for span in spans]
    is_scale_shared = axis is not None and any(leaf.shape[axis] == 1 for leaf in leaves[1:])
    shares = [(None, targets)] if is_scale_shared else [(target.span, [target]) for target in targets]
    jobs = [
        (filling, slices)
        for span, share in shares
        for source, offset in _offsets(origin, leaves[0].shape)
        for filling in [_Filling(declared, origin, reader, source, offset, share)]
        for slices in filling.pieces(span)
    ]
    for filling, slices in jobs:
        if filling.is_read_whole:  # one at a time, or each thread would hold a tensor; its chunks are read together
            filling.put(slices)
    for _ in pool.map(lambda job: job[0].put(job[1]), [job for job in jobs if not job[0].is_read_whole]):
        pass
    return [target.arrays for target in targets]


def _empty(leaf: jax.ShapeDtypeStruct, axis: int | None, span: Span | None) -> np.ndarray:
    """Memory for a leaf, or for a span of it, that JAX takes over without a copy."""
    shape = list(leaf.shape)
    if span is not None and axis is not None and shape[axis] > 1:
        shape[axis] = span[1] - span[0]
    num_bytes = math.prod(shape) * leaf.dtype.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + num_bytes].view(leaf.dtype).reshape(shape)


def _offsets(origin: Origin, shape: tuple[int, ...]) -> Iterator[tuple[Source, int]]:
    """Each source, and where it begins along the axis that they are joined along."""
    offset = 0
    for source in origin.sources:
        yield source, offset
        offset += view_of(source, origin, shape)[origin.join_axis]


@dataclasses.dataclass(frozen=True, slots=True)
class _Filling:
    """One source on its way into the arrays of one or several devices. Boxes are those of the whole parameter."""

    declared: jax.ShapeDtypeStruct | Quantised
    origin: Origin
    reader: Reader
    source: Source
    offset: int
    targets: Sequence[_Target]

    def pieces(self, span: Span | None) -> list[Slices]:
        """What of the tensor makes the span, as it is read."""
        slices = source_slices(self.source, self.origin, self._shape, span)
        if self.is_read_whole:
            return [slices]
        return cut(self.source, self.origin, self._shape, slices, self.reader.piece(self.source))

    @property
    def is_read_whole(self) -> bool:
        """Whether pieces are no help: a scale is decided by a whole row, and each piece has a part of every row."""
        return isinstance(self.declared, Quantised) and self.reader.piece(self.source).axis != 0

    def put(self, slices: Slices) -> None:
        """Reads one piece and writes it into the arrays."""
        tensor = self.reader.read(self.source, slices)
        if not isinstance(self.declared, Quantised):
            self._place(0, tensor, self._box(slices))
            return
        first, _, _ = slices[0].indices(self.source.shape[0])
        for part in self._rounded_parts(slices, tensor.shape[1]):
            start, stop, _ = part[0].indices(self.source.shape[0])
            rows, box = slice(start - first, stop - first), self._box(part)
            values, scale = quantise(jnp.asarray(tensor[rows]), self.source.name, self.declared.values.dtype)
            self._place(0, np.asarray(values), box)
            lengths = self.declared.scale.shape
            ones = [slice(0, 1) if length == 1 else each for each, length in zip(box, lengths, strict=True)]
            self._place(1, np.asarray(scale), ones)

    def _rounded_parts(self, slices: Slices, width: int) -> list[Slices]:
        """What is rounded at once of what was read: all of it, if it is a piece.

        Each number of rows is a program that is compiled and kept, so there shall be few, wherever pieces begin.
        """
        if not self.is_read_whole:
            return [slices]
        rows = Piece(0, max(1, ROUNDED_BYTES // (4 * width)))
        return cut(self.source, self.origin, self._shape, slices, rows)

    @property
    def _shape(self) -> tuple[int, ...]:
        return jax.tree.leaves(self.declared)[0].shape

    def _box(self, slices: Slices) -> list[slice]:
        """The box that a piece fills, each of its heads once."""
        box = box_of(self.source, self.origin, self._shape, slices)
        join = box[self.origin.join_axis]
        box[self.origin.join_axis] = slice(join.start + self.offset, join.stop + self.offset)
        return box

    def _place(self, leaf: int, tensor: np.ndarray, box: list[slice]) -> None:
        """Writes what fills a box, rounded to the type of the leaf, into the parts of it that devices hold."""
        block = (tensor.T if self.origin.transposed else tensor).reshape([each.stop - each.start for each in box])
        repeats, heads = self.source.repeats, self.origin.join_axis - 1
        if repeats > 1:
            block = block.repeat(repeats, heads)
            box = [*box]
            box[heads] = slice(box[heads].start * repeats, box[heads].stop * repeats)
        axis = self.origin.split_axis
        is_whole = axis is None or jax.tree.leaves(self.declared)[leaf].shape[axis] == 1
        for span, arrays in self.targets:
            here, part = [*box], block
            if span is not None and axis is not None and not is_whole:
                start, stop = max(box[axis].start, span[0]), min(box[axis].stop, span[1])
                if start >= stop:
                    continue
                here[axis] = slice(start - span[0], stop - span[0])
                part = block[(slice(None),) * axis + (slice(start - box[axis].start, stop - box[axis].start),)]
            with np.errstate(over="ignore", invalid="ignore"):  # what is too large for the type becomes infinite
                arrays[leaf][tuple(here)] = part
