"""Reads tensors piece by piece into the memory of a parameter on the host. See `assemble.py`.

Beside the parameter a host holds one piece for each thread, however large a tensor is. A tensor that is quantised and
lies in columns in its file is held whole, because a whole row decides a scale.
"""

import concurrent.futures
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jsg.kernels_pallas.few_bits import Quantised
from jsg.models.checkpoint import Piece
from jsg.models.origin import Origin, Source
from jsg.models.quantise import quantise
from jsg.models.slices import Reader, Slices, Span, box_of, cut, leaf_span, source_slices, view_of

ALIGNMENT = 64
"""On a CPU, JAX takes over memory that begins at a multiple of so many bytes, and copies other memory."""
ROUNDED_BYTES = 2**20
"""The most bytes of float32 that are quantised at once, where more is read at once."""


class _Target(NamedTuple):
    """The arrays of one device, one for each leaf, and their span of the axis that is shared out; None for all."""

    span: Span | None
    arrays: list[np.ndarray]


def fill(
    declared: jax.ShapeDtypeStruct | Quantised,
    origin: Origin,
    reader: Reader,
    pool: concurrent.futures.Executor,
    spans: Sequence[Span | None],
) -> list[list[np.ndarray]]:
    """For each span of the axis that is shared out, the leaves of that part of the parameter, which JAX can take over.

    If spans share out the rows that scales belong to, whole rows are read, once for all spans.

    Args:
        declared: Shapes and types of the whole value.
        origin: The tensors it is made of.
        reader: Reads them.
        pool: Reads pieces at the same time.
        spans: The wanted spans; None for the whole axis.

    Raises:
        ModelError: A tensor cannot be read, or cannot be quantised.
    """
    leaves, axis, shape = jax.tree.leaves(declared), origin.split_axis, declared.shape
    targets = [_Target(span, [_empty(leaf, shape, axis, span) for leaf in leaves]) for span in spans]
    with_axes = [leaf for leaf in leaves[1:] if len(leaf.shape) == len(shape)]
    is_scale_shared = axis is not None and any(leaf.shape[axis] == 1 for leaf in with_axes)
    shares = [(None, targets)] if is_scale_shared else [(target.span, [target]) for target in targets]
    jobs = [
        (filling, slices)
        for span, share in shares
        for source, offset in _offsets(origin, shape)
        for filling in [_Filling(declared, origin, reader, source, offset, share)]
        for slices in filling.pieces(span)
    ]
    for filling, slices in jobs:
        if filling.is_read_whole:  # one by one, because each thread would hold a tensor; chunks are read in parallel
            filling.put(slices)
    for _ in pool.map(lambda job: job[0].put(job[1]), [job for job in jobs if not job[0].is_read_whole]):
        pass
    return [target.arrays for target in targets]


def _empty(leaf: jax.ShapeDtypeStruct, whole: tuple[int, ...], axis: int | None, span: Span | None) -> np.ndarray:
    """Memory that JAX takes over for a leaf of a parameter with the shape `whole`, or for a span of it."""
    shape = list(leaf.shape)
    if span is not None and axis is not None and len(shape) == len(whole):
        first, last = leaf_span(span, whole[axis], shape[axis])
        shape[axis] = last - first
    return empty(tuple(shape), leaf.dtype)


def empty(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> np.ndarray:
    """Memory for an array that JAX takes over without a copy."""
    kind = jnp.dtype(dtype)
    num_bytes = math.prod(shape) * kind.itemsize
    memory = np.empty(num_bytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + num_bytes].view(kind).reshape(shape)


def _offsets(origin: Origin, shape: tuple[int, ...]) -> Iterator[tuple[Source, int]]:
    """Each source, and its first index along the axis on which the sources are joined."""
    offset = 0
    for source in origin.sources:
        yield source, offset
        offset += view_of(source, origin, shape)[origin.join_axis]


@dataclasses.dataclass(frozen=True, slots=True)
class _Filling:
    """Fills a part of the arrays of one or several devices from one source. Boxes are boxes of the whole parameter."""

    declared: jax.ShapeDtypeStruct | Quantised
    origin: Origin
    reader: Reader
    source: Source
    offset: int
    targets: Sequence[_Target]

    def pieces(self, span: Span | None) -> list[Slices]:
        """The slices of the tensor that make the span, as they are read."""
        slices = source_slices(self.source, self.origin, self._shape, span)
        if self.is_read_whole:
            return [slices]
        return cut(self.source, self.origin, self._shape, slices, self.reader.piece(self.source))

    @property
    def is_read_whole(self) -> bool:
        """Whether the tensor is read at once: a whole row decides a scale, and a piece has a part of every row."""
        return isinstance(self.declared, Quantised) and self.reader.piece(self.source).axis != 0

    def put(self, slices: Slices) -> None:
        """Reads one piece and writes it into the arrays."""
        form = self.declared.form if isinstance(self.declared, Quantised) else None
        kept = None if form is None else self.reader.kept(self.source, slices, form)
        if kept is not None:
            for leaf, array in enumerate(jax.tree.leaves(kept)):
                self._place(leaf, array, self._box(slices))
            return
        tensor = self.reader.read(self.source, slices)
        if not isinstance(self.declared, Quantised):
            self._place(0, tensor, self._box(slices))
            return
        first, _, _ = slices[0].indices(self.source.shape[0])
        for part in self._rounded_parts(slices, tensor.shape[1]):
            start, stop, _ = part[0].indices(self.source.shape[0])
            rows, box = slice(start - first, stop - first), self._box(part)
            made = quantise(tensor[rows], self.source.name, self.declared.form)
            for leaf, array in enumerate(jax.tree.leaves(made)):
                self._place(leaf, array, box)

    def _rounded_parts(self, slices: Slices, width: int) -> list[Slices]:
        """The parts of what was read that are rounded at once, so that float32 of a whole tensor are never held."""
        if not self.is_read_whole:
            return [slices]
        rows = Piece(0, max(1, ROUNDED_BYTES // (4 * width)))
        return cut(self.source, self.origin, self._shape, slices, rows)

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.declared.shape

    def _box(self, slices: Slices) -> list[slice]:
        """The box that a piece fills, with each of its heads once."""
        box = box_of(self.source, self.origin, self._shape, slices)
        join = box[self.origin.join_axis]
        box[self.origin.join_axis] = slice(join.start + self.offset, join.stop + self.offset)
        return box

    def _place(self, leaf: int, tensor: np.ndarray, box: list[slice]) -> None:
        """Writes the numbers of a box, rounded to the type of the leaf, into the arrays of the devices that hold it."""
        lengths, axis = jax.tree.leaves(self.declared)[leaf].shape, self.origin.split_axis
        if len(lengths) < len(box):  # the order of inputs
            for _, arrays in self.targets:
                arrays[leaf][...] = tensor
            return
        box = [
            slice(*leaf_span((each.start, each.stop), *sizes))
            for each, *sizes in zip(box, self._shape, lengths, strict=True)
        ]
        block = (tensor.T if self.origin.transposed else tensor).reshape([each.stop - each.start for each in box])
        repeats, heads = self.source.repeats, self.origin.join_axis - 1
        if repeats > 1:
            block = block.repeat(repeats, heads)
            box[heads] = slice(box[heads].start * repeats, box[heads].stop * repeats)
        for span, arrays in self.targets:
            here, part = [*box], block
            if span is not None and axis is not None:
                first, last = leaf_span(span, self._shape[axis], lengths[axis])
                start, stop = max(box[axis].start, first), min(box[axis].stop, last)
                if start >= stop:
                    continue
                here[axis] = slice(start - first, stop - first)
                part = block[(slice(None),) * axis + (slice(start - box[axis].start, stop - box[axis].start),)]
            with np.errstate(over="ignore", invalid="ignore"):  # a number that is too large becomes infinite
                arrays[leaf][tuple(here)] = part
