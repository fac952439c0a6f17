"""Places of a checkpoint's tensors in a parameter. It computes indices only and reads no tensors. See `Origin`."""

import itertools
import math
from typing import Protocol, runtime_checkable

import numpy as np

from jsg.kernels_pallas.form import Form
from jsg.models.checkpoint import Piece
from jsg.models.origin import Origin, Source
from jsg.models.published.kernel import Kept

Span = tuple[int, int]
"""The first index, and the index after the last, along the axis that devices share out."""
Slices = tuple[slice, ...]


@runtime_checkable  # the test run checks arguments
class Reader(Protocol):
    """Reads sources. Several threads may call both methods at the same time."""

    def read(self, source: Source, slices: Slices) -> np.ndarray:
        """A slice of a source. Changes nothing. Callers must not write into the result."""
        ...

    def kept(self, source: Source, slices: Slices, form: Form) -> Kept | None:
        """The same in the few bits of the checkpoint, as this form; None if it is to be rounded. Changes nothing."""
        ...

    def piece(self, source: Source) -> Piece:
        """How the source is best cut into pieces. Changes nothing."""
        ...


def source_slices(source: Source, origin: Origin, shape: tuple[int, ...], span: Span | None) -> Slices:
    """The slices of the file's tensor that make a span of the axis that is shared out: a slice of one of its axes.

    Args:
        source: The tensor, one of the origin's.
        origin: The parameter's.
        shape: Shape of the whole parameter.
        span: The span; None for the whole axis.
    """
    axis, whole = origin.split_axis, (slice(None),) * len(source.shape)
    if span is None or axis is None:
        return whole
    if axis == origin.join_axis - 1:
        span = heads_of(source, span)
    view, sides = view_of(source, origin, shape), sides_of(source, origin)
    side = next(i for i, length in enumerate(sides) if length > 1 and math.prod(sides[:i]) == math.prod(view[:axis]))
    width = sides[side] // view[axis]
    side = len(sides) - 1 - side if origin.transposed else side
    return (*whole[:side], slice(span[0] * width, span[1] * width), *whole[side + 1 :])


def view_of(source: Source, origin: Origin, shape: tuple[int, ...]) -> list[int]:
    """How many indices of each axis of a parameter of this shape a whole tensor fills, with each of its heads once."""
    view = list(shape)
    view[origin.join_axis - 1] //= source.repeats
    view[origin.join_axis] = 1
    view[origin.join_axis] = math.prod(source.shape) // math.prod(view)
    return view


def sides_of(source: Source, origin: Origin) -> tuple[int, ...]:
    """The tensor's lengths in the order in which they make the parameter's axes."""
    return source.shape[::-1] if origin.transposed else source.shape


def leaf_span(span: Span, length: int, leaf_length: int) -> Span:
    """A span of an axis of a parameter, as a span of a leaf that has `leaf_length` where the parameter has `length`."""
    return span[0] * leaf_length // length, -(-span[1] * leaf_length // length)


def heads_of(source: Source, span: Span) -> Span:
    """The heads of the source that are in this span of the parameter's heads."""
    return span[0] // source.repeats, -(-span[1] // source.repeats)


def outer_axis(view: list[int], sides: tuple[int, ...], side: int) -> int | None:
    """The first axis longer than 1 that this side of the tensor makes, or None if the side is a part of an axis.

    An index of that axis is a run of `sides[side] // view[axis]` indices of the side.
    """
    before = math.prod(sides[:side])
    for axis, length in enumerate(view):
        if length > 1 and math.prod(view[:axis]) == before:
            return axis if sides[side] % length == 0 else None
    return None


def cut(source: Source, origin: Origin, shape: tuple[int, ...], slices: Slices, piece: Piece) -> list[Slices]:
    """The slices, cut into pieces that each fill a box of the parameter. A source that repeats heads is not cut."""
    view, sides = view_of(source, origin, shape), sides_of(source, origin)
    axis = outer_axis(view, sides, len(sides) - 1 - piece.axis if origin.transposed else piece.axis)
    if axis is None or source.repeats > 1:
        return [slices]
    first, last, _ = slices[piece.axis].indices(source.shape[piece.axis])
    unit = source.shape[piece.axis] // view[axis]
    step = max(unit, piece.length // unit * unit)
    inner = range((first // step + 1) * step, last, step)
    bounds = [first, *inner, last]
    return [
        (*slices[: piece.axis], slice(start, stop), *slices[piece.axis + 1 :])
        for start, stop in itertools.pairwise(bounds)
    ]


def box_of(source: Source, origin: Origin, shape: tuple[int, ...], slices: Slices) -> list[slice]:
    """The box of the parameter that a piece would fill if there were only this source, with each of its heads once."""
    view, sides = view_of(source, origin, shape), sides_of(source, origin)
    ordered = slices[::-1] if origin.transposed else slices
    box = [slice(0, length) for length in view]
    for side, (length, each) in enumerate(zip(sides, ordered, strict=True)):
        start, stop, _ = each.indices(length)
        axis = outer_axis(view, sides, side)
        if (start, stop) != (0, length):
            assert axis is not None, f"{source.name} cannot be cut along {side}"
            unit = length // view[axis]
            assert start % unit == stop % unit == 0, f"{source.name} is cut inside a unit of {unit}"
            box[axis] = slice(start // unit, stop // unit)
    return box
