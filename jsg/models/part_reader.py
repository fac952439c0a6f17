"""Reads sources out of a checkpoint, whatever part of a tensor each is. No JAX."""

from typing import Any

import numpy as np

from jsg.kernels_pallas.form import Form
from jsg.models.checkpoint import Checkpoint, Piece
from jsg.models.origin import Part, Source
from jsg.models.published.kernel import Kept
from jsg.models.slices import Slices


class PartReader:
    """A `Reader` of a checkpoint. See `Part`."""

    def __init__(self, checkpoint: Checkpoint, *, keeps: bool = False):
        """Takes the checkpoint, and whether its few bits are kept."""
        self._checkpoint, self._keeps = checkpoint, keeps

    def read(self, source: Source, slices: Slices) -> np.ndarray:
        """A slice of a source. Of its tensor only what the slice spans is read, in whole heads if these are reordered.

        Raises:
            ModelError: The data is damaged. The message names the tensor.
        """
        part = source.part
        if part is None:
            return self._checkpoint.read(source.name, slices)
        lead, rows = _stored_rows(part, source, slices[0])
        stored = (*lead, *(rows, *slices[1:])[:: -1 if part.is_transposed else 1])
        tensor = self._checkpoint.read(source.name, stored)
        tensor = tensor[0] if lead else tensor
        return _own_rows(part, source, slices[0], tensor.T if part.is_transposed else tensor)

    def kept(self, source: Source, slices: Slices, form: Form) -> Kept | None:
        """A slice of a source in few bits of this form; None if none are kept. See `read`."""
        part = source.part
        if not self._keeps:
            return None
        if part is None:
            return self._checkpoint.kept(source.name, slices, form)
        lead, rows = _stored_rows(part, source, slices[0])
        kept = self._checkpoint.kept(source.name, (*lead, rows, *slices[1:]), form)

        def own(stored: np.ndarray | None) -> Any:
            return None if stored is None else _own_rows(part, source, slices[0], stored[0] if lead else stored)

        return Kept(*map(own, kept._replace(order=None)))._replace(order=kept.order)

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


def _stored_rows(part: Part, source: Source, wanted: slice) -> tuple[Slices, slice]:
    """The slices of the file's tensor that some rows of a source are among: of experts if there are, and of rows."""
    start, stop, _ = wanted.indices(source.shape[0])
    unit, head = part.rows_of_head
    low, last = start // unit * head, (stop - 1) // unit * head + max(part.order or (0,))
    rows = slice(part.first + low * part.step, part.first + last * part.step + 1)
    return () if part.expert is None else (slice(part.expert, part.expert + 1),), rows


def _own_rows(part: Part, source: Source, wanted: slice, stored: np.ndarray) -> np.ndarray:
    """The wanted rows of a source, of those in the file that `_stored_rows` names."""
    stored = stored[:: part.step]
    if part.order is None:
        return stored
    start, stop, _ = wanted.indices(source.shape[0])
    unit, head = part.rows_of_head
    first = start // unit * head
    return stored[[row // unit * head + part.order[row % unit] - first for row in range(start, stop)]]
