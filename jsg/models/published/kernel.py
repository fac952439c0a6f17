"""Reads kernels in few bits: restored to float32, or as they are. No JAX."""

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jsg.errors import ModelError
from jsg.kernels_pallas.form import NUMBERS_OF_4_BITS, Form
from jsg.models.published.layout import DAMAGED, EXPONENTS, Group, Layout, Plane, Stored
from jsg.models.published.record import KeptForm, Published

PIECE_NUMBERS = 2**18
"""About as many numbers are restored at once. In float32 they are 1 MiB."""
ROWS_TOGETHER = 32
"""Rows of a piece are a multiple of it, so that no word is read twice."""
_BYTES = np.arange(256, dtype=np.uint8)
_E4M3 = _BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E8M0 = _BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
_E2M1 = np.array(NUMBERS_OF_4_BITS["e2m1"], np.float32)
ITEM_BYTES = {"F32": 4, "I32": 4, "I64": 8, "F16": 2, "BF16": 2, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1}
DROPPED_BITS = 19
"""Lower bits of a float32 that scales have not where bfloat16 holds each number times its scale (`Form.is_exact`): five
significant bits are left, and a number of 4 bits has at most three."""
SCALE_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn"}
"""Types of scales → as `Form` names them. The others are powers of two."""
KEPT_GROUPS = (16, 32, 64, 128)
"""Groups of inputs that are kept in few bits, beside whole rows."""


class Kept(NamedTuple):
    """A part of a kernel in its few bits, in rows of [..., out, in]. See `kernels_pallas.few_bits.Quantised`.

    Attributes:
        numbers: Bytes of one number or two.
        scale: [..., out, groups].
        zero: Likewise, or None.
        factor: [..., out, blocks], or None.
        order: [in], or None.
        step: [..., out, blocks], or None.
    """

    numbers: np.ndarray
    scale: np.ndarray
    zero: np.ndarray | None = None
    factor: np.ndarray | None = None
    order: np.ndarray | None = None
    step: np.ndarray | None = None


class Kernel:
    """A `StoredTensor` that is restored from few bits as it is read. Several threads may read at the same time.

    Attributes:
        shape: Its shape in the model.
        dtype: The type that it is restored to.
        parts: Its tensors in the file by their stored names.
        num_bytes: Their bytes.
    """

    dtype = "F32"

    def __init__(self, group: Group, layout: Layout):
        self._name, self._layout = group.name, layout
        *lead, rows, columns = layout.numbers.shape
        self.shape = (*lead, columns, rows) if layout.is_turned else (*lead, rows, columns)
        self.parts = {group.full_name(role): tensor for role, tensor in group.parts.items()}
        self.num_bytes = sum(math.prod(each.shape) * ITEM_BYTES.get(each.dtype, 1) for each in self.parts.values())

    @property
    def kept_form(self) -> KeptForm | None:
        """Its form, with what else kernels must have in common to be kept as one."""
        if self.form is None:
            return None
        order = "" if self.order is None else hashlib.sha256(self.order.tobytes()).hexdigest()
        return KeptForm(self.form, order, self._layout.is_turned)

    @functools.cached_property
    def form(self) -> Form | None:
        """How it is kept in few bits; None if it must be restored, because its groups are not alike."""
        layout, (_, wide), columns = self._layout, self._layout.block, self._layout.numbers.shape[-1]
        group = None if wide >= columns else wide
        if group is not None and (group not in KEPT_GROUPS or columns % group):
            return None
        if self.order is not None and (np.bincount(self.order, minlength=columns // wide) != wide).any():
            return None
        if columns % 2:
            return None
        return Form(
            layout.kind,
            group,
            SCALE_TYPES.get(layout.scale.tensor.dtype, "float8_e8m0fnu"),
            has_zero=layout.zero is not None,
            has_factor=layout.factor is not None,
            has_order=self.order is not None,
            is_exact=layout.is_exact,
        )

    @functools.cached_property
    def order(self) -> np.ndarray | None:
        """The group of each column; None if groups are consecutive columns. Raises ModelError if it is damaged."""
        layout = self._layout
        if layout.order is None:
            return None
        groups = layout.order.read((slice(None),)).astype(np.int64)
        count = layout.scale.shape[-1]
        if (layout.may_be_unset and (groups == -1).all()) or np.array_equal(
            groups, np.arange(len(groups)) // layout.block[1]
        ):
            return None
        if groups.min() < 0 or groups.max() >= count:
            raise ModelError(
                f"the groups of the columns of {self._name} must be in [0, {count}), but one is "
                f"{groups.min() if groups.min() < 0 else groups.max()}; {DAMAGED}"
            )
        return groups

    def read(self, slices: tuple[slice, ...]) -> np.ndarray:
        """A slice in float32, restored by the formula of its format. Raises ModelError if it is damaged."""
        layout, (*lead, rows, columns) = self._layout, self._within(slices)
        numbers = self._checked(_numbers(layout.numbers, lead, rows, columns))
        table = {"e4m3": _E4M3, "e2m1": _E2M1}.get(layout.kind)
        restored = numbers.astype(np.float32) if table is None else table.take(numbers.view(np.uint8))
        if layout.zero is not None:
            zero = _numbers(layout.zero, lead, *self._blocks(rows, columns)).astype(np.float32)
            self._apply(np.subtract, restored, zero, rows, columns)
        elif layout.no_zero:
            restored -= np.float32(layout.no_zero)
        self._apply(np.multiply, restored, self._scale(lead, rows, columns), rows, columns)
        return np.ascontiguousarray(restored.swapaxes(-2, -1)) if layout.is_turned else restored

    def kept(self, slices: tuple[slice, ...], form: Form) -> Kept:
        """A slice of [..., out, in] in its few bits, if it has a form: of whole groups, of all if there is an order.

        A factor that divides scales is turned over, which may change a scale in its last bit.

        Raises:
            ModelError: It is damaged.
        """
        assert form == self.form, "what `kept_form` says"
        layout = self._layout
        *lead, rows, columns = (slice(*s.indices(n)[:2]) for s, n in zip(slices, layout.numbers.shape, strict=True))
        numbers = self._checked(_numbers(layout.numbers, lead, rows, columns))
        zero = None if layout.zero is None else _numbers(layout.zero, lead, *self._blocks(rows, columns))
        order = None if self.order is None else np.argsort(self.order, kind="stable").astype(np.int32)
        numbers = numbers if order is None else numbers[..., order]
        if layout.kind in NUMBERS_OF_4_BITS:
            numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
            zero = None if zero is None else zero.astype(np.int8) - 8
        elif numbers.dtype == np.uint8:  # of int8, plus 128
            numbers, zero = (numbers ^ 128).view(np.int8), None if zero is None else (zero ^ 128).view(np.int8)
        self._scale(lead, rows, columns)  # for its checks
        scale, factor = self._of_rows(_plain(layout.scale, lead, *self._blocks(rows, columns)), rows), None
        if layout.is_exact and (scale.view(np.uint32) % (1 << DROPPED_BITS)).any():
            raise ModelError(
                f"the scales of {self._name} must have five significant bits, as jsg convert writes them, but one has "
                f"more; {DAMAGED}, or write another name into producer"
            )
        if layout.factor is not None:
            number = np.float32(layout.factor.read(()))
            factor = np.full((*scale.shape[:-1], 1), 1 / number if layout.divides else number)
        return Kept(numbers, scale, None if zero is None else self._of_rows(zero, rows), factor, order)

    def piece(self, outer: int = 0) -> tuple[int, int]:
        """Rows of about `PIECE_NUMBERS`."""
        if outer < len(self.shape) - 2:
            return outer, 1
        rows = PIECE_NUMBERS // max(1, self._layout.numbers.shape[-1]) // ROWS_TOGETHER * ROWS_TOGETHER
        return len(self.shape) - (1 if self._layout.is_turned else 2), max(ROWS_TOGETHER, rows)

    def _checked(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers as they are stored. Raises ModelError if one is NaN."""
        if self._layout.kind == "e4m3" and (numbers.view(np.uint8) & 127 == 127).any():
            raise ModelError(f"the numbers of {self._name} must be finite, but one is NaN; {DAMAGED}")
        return numbers

    def _within(self, slices: tuple[slice, ...]) -> list[slice]:
        """Slices of [..., out, in] with whole numbers."""
        spans = [slice(*each.indices(size)[:2]) for each, size in zip(slices, self.shape, strict=True)]
        return [*spans[:-2], spans[-1], spans[-2]] if self._layout.is_turned else spans

    def _blocks(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        """The blocks that these rows and columns are in."""
        high, wide = self._layout.block
        across = slice(0, self._layout.scale.shape[-1])
        if self.order is None:
            across = slice(columns.start // wide, -(-columns.stop // wide))
        return slice(rows.start // high, -(-rows.stop // high)), across

    def _scale(self, lead: list[slice], rows: slice, columns: slice) -> np.ndarray:
        """The scales of the blocks. Raises ModelError if one is not finite."""
        layout = self._layout
        scale = _plain(layout.scale, lead, *self._blocks(rows, columns))
        if layout.factor is not None:
            factor = layout.factor.read(())
            with np.errstate(all="ignore"):
                scale = scale / factor if layout.divides else scale * factor
        if not np.isfinite(scale).all():
            raise ModelError(f"the scales of {self._name} must be finite, but one is NaN or infinity; {DAMAGED}")
        return scale

    def _apply(self, change: np.ufunc, numbers: np.ndarray, of_blocks: np.ndarray, rows: slice, columns: slice) -> None:
        """Changes numbers, which are contiguous, by what their blocks have."""
        of_rows, wide = self._of_rows(of_blocks, rows), self._layout.block[1]
        if self.order is not None:
            of_rows = of_rows[..., self.order[columns]]
        elif of_rows.shape[-1] > 1 and columns.start % wide == 0 == numbers.shape[-1] % wide:
            numbers, of_rows = numbers.reshape(*of_rows.shape, wide), of_rows[..., None]
        elif of_rows.shape[-1] > 1:
            first = columns.start % wide
            of_rows = of_rows.repeat(wide, -1)[..., first : first + numbers.shape[-1]]
        change(numbers, of_rows, out=numbers)

    def _of_rows(self, of_blocks: np.ndarray, rows: slice) -> np.ndarray:
        """What blocks have, for each row."""
        high = self._layout.block[0]
        first = rows.start % high
        return of_blocks.repeat(high, -2)[..., first : first + rows.stop - rows.start, :] if high > 1 else of_blocks


def _plain(plane: Plane, lead: list[slice], rows: slice, columns: slice) -> np.ndarray:
    """A part of a plane of scales, in float32."""
    tensor = plane.tensor.read((*lead, *((columns, rows) if plane.is_turned else (rows, columns))))
    scale = _E8M0.take(tensor.view(np.uint8)) if plane.tensor.dtype in EXPONENTS else tensor.astype(np.float32)
    return scale.swapaxes(-2, -1) if plane.is_turned else scale


def _numbers(plane: Plane, lead: list[slice], rows: slice, columns: slice) -> np.ndarray:
    """A part of a plane of numbers, each in a byte."""
    spans, axis, size = [rows, columns], 0 if plane.packs_rows else 1, plane.per_word
    span = spans[axis]
    spans[axis] = slice(span.start // size, -(-span.stop // size))
    rest = (slice(None),) if plane.word_bytes else ()
    words = plane.tensor.read((*lead, *(spans[::-1] if plane.is_turned else spans), *rest))
    if plane.bits is None:
        return np.ascontiguousarray(words.swapaxes(-2, -1)) if plane.is_turned else words
    if plane.is_turned != plane.packs_rows:
        words = words.swapaxes(-2, -1)  # words along the last axis
    if plane.added:
        words = words.view(np.uint32) + np.uint32(plane.added)
    several = np.ascontiguousarray(words).view(np.uint8)
    if plane.bits == 4:
        several = np.stack([several & 15, several >> 4], -1)
    several = several.reshape(*words.shape[: len(plane.shape) - 1], -1, size)
    if plane.lanes is not None:
        several = several[..., plane.lanes]
    first = span.start % size
    numbers = several.reshape(*several.shape[:-2], -1)[..., first : first + span.stop - span.start]
    return np.ascontiguousarray(numbers.swapaxes(-2, -1)) if plane.packs_rows else numbers


def restored[Tensor: Stored](
    tensors: Mapping[str, Tensor], published: Published, here: Callable[[str], str]
) -> dict[str, Tensor | Kernel]:
    """The tensors of a checkpoint by their stored names, with one in place of those that make a kernel in few bits.

    Args:
        tensors: The tensors as they are stored.
        published: How the checkpoint's kernels are stored.
        here: From a stored name to the one in the modules.

    Raises:
        ModelError: A tensor is missing, or is not as it must be.
    """
    kernels, others = published.sorted(tensors)
    published.check_skips(kernels, here)
    made: dict[str, Tensor | Kernel] = {name: tensors[name] for name in others}
    for kernel, parts in kernels.items():
        group = Group(kernel, {role: tensors[name] for role, name in parts.items()})
        made[kernel] = Kernel(group, published.layout(group))
    return made
