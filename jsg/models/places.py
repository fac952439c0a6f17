"""Where the tensors of a checkpoint stand in a parameter: indices only, no numbers. See `Origin`."""

import itertools
import math
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from jsg.models.layers import Origin, Source

Span = tuple[int, int]
"""First index and the one after the last, along the axis that devices share out."""
Slices = tuple[slice, ...]


class Piece(NamedTuple):
    """What of a tensor is cheaply read at once: `length` indices of `axis`, beginning at a multiple of it."""

    axis: int
    length: int


@runtime_checkable  # the test run checks arguments
class Reader(Protocol):
    """Where tensors come from. Threads call both methods at the same time."""

    def read(self, source: Source, slices: Slices) -> np.ndarray:
        """A slice of a tensor, in the axes that the file has; changes nothing. Nobody writes into what it gives."""
        ...

    def piece(self, source: Source) -> Piece:
        """How the tensor is best cut; changes nothing."""
        ...


def source_slices(source: Source, origin: Origin, shape: tuple[int, ...], span: Span | None) -> Slices:
    """What of the file's tensor makes the indices `span` of the parameter's shared axis: a slice of one of its axes.

    Args:
        source: The tensor, one of the origin's.
        origin: Of the parameter.
        shape: Of the whole parameter.
        span: None for all of it.
    """
    axis, whole = origin.split_axis, (slice(None),) * len(source.shape)
    if span is None or axis is None:
        return whole
    if axis == origin.join_axis - 1:
        span = heads_of(source, span)
    view, sides = view_of(source, origin, shape), sides_of(source, origin)
    side = next(i for i in range(len(sides)) if math.prod(sides[:i]) == math.prod(view[:axis]))
    width = sides[side] // view[axis]
    side = len(sides) - 1 - side if origin.transposed else side
    return (*whole[:side], slice(span[0] * width, span[1] * width), *whole[side + 1 :])


def view_of(source: Source, origin: Origin, shape: tuple[int, ...]) -> list[int]:
    """How a whole tensor fills the axes of a parameter of this shape, each of its heads once."""
    view = list(shape)
    view[origin.join_axis - 1] //= source.repeats
    view[origin.join_axis] = 1
    view[origin.join_axis] = math.prod(source.shape) // math.prod(view)
    return view


def sides_of(source: Source, origin: Origin) -> tuple[int, ...]:
    """The tensor's lengths in the order in which they make the parameter's axes."""
    return source.shape[::-1] if origin.transposed else source.shape


def heads_of(source: Source, span: Span) -> Span:
    """Those of the source that stand in these places of the parameter."""
    return span[0] // source.repeats, -(-span[1] // source.repeats)


def outer_axis(view: list[int], sides: tuple[int, ...], side: int) -> int | None:
    """The first axis longer than 1 that this side of the tensor makes, or None where it is a part of an axis.

    Indices of that axis are runs of `sides[side] // view[axis]` indices of the side.
    """
    before = math.prod(sides[:side])
    for axis, length in enumerate(view):
        if length > 1 and math.prod(view[:axis]) == before:
            return axis if sides[side] % length == 0 else None
    return None


def cut(source: Source, origin: Origin, shape: tuple[int, ...], slices: Slices, piece: Piece) -> list[Slices]:
    """The slices in pieces, each of which fills a box of the parameter. A source that repeats heads stays whole."""
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
    """The box of the parameter that a piece fills, as if the source stood alone and each of its heads once."""
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
