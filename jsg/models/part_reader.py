"""Reads sources out of a checkpoint, whatever part of a tensor each is. No JAX."""

import numpy as np

from jsg.models.checkpoint import Checkpoint, Piece
from jsg.models.origin import Source
from jsg.models.slices import Slices


class PartReader:
    """A `Reader` of a checkpoint. See `Part`."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint

    def read(self, source: Source, slices: Slices) -> np.ndarray:
        """A slice of a source. Of its tensor only what the slice spans is read, in whole heads if these are reordered.

        Raises:
            ModelError: The data is damaged. The message names the tensor.
        """
        part = source.part
        if part is None:
            return self._checkpoint.read(source.name, slices)
        start, stop, _ = slices[0].indices(source.shape[0])
        unit, head = part.rows_of_head
        low, last = start // unit * head, (stop - 1) // unit * head + max(part.order or (0,))
        rows = slice(part.first + low * part.step, part.first + last * part.step + 1)
        stored = (rows, *slices[1:])[:: -1 if part.is_transposed else 1]
        if part.expert is None:
            tensor = self._checkpoint.read(source.name, stored)
        else:
            (tensor,) = self._checkpoint.read(source.name, (slice(part.expert, part.expert + 1), *stored))
        tensor = (tensor.T if part.is_transposed else tensor)[:: part.step]
        if part.order is None:
            return tensor
        return tensor[[row // unit * head + part.order[row % unit] - low for row in range(start, stop)]]

    def piece(self, source: Source) -> Piece:
        """How the source is best cut into pieces. Changes nothing."""
        part = source.part
        if part is None:
            return self._checkpoint.piece(source.name)
        outer = 0 if part.expert is None else 1
        axis, length = self._checkpoint.piece(source.name, outer)
        axis = len(source.shape) - 1 - (axis - outer) if part.is_transposed else axis - outer
        if axis == 0:
            unit, head = part.rows_of_head
            length = max(1, length // part.step // head) * unit
        return Piece(axis, length)
