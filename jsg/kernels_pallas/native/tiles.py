"""The register tile that all products are made of: some rows of numbers times some panels of `LANES` columns.

Each result is summed over k in ascending order, with one fused multiplication and addition for each k. So a result does
not depend on the tile that computes it: not on the number of rows, nor on the row's place among them.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from jsg.kernels_pallas.form import NUMBERS_OF_4_BITS
from jsg.kernels_pallas.inputs import TOGETHER
from jsg.kernels_pallas.native import library
from jsg.kernels_pallas.native.calls import Buffer
from jsg.kernels_pallas.native.emit import FLOAT, INT32, LANES, Function, Value, Variable, vector

PANEL_BYTES = 4 * LANES
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of the types that have more than one."""
EXACT_GROUP = 32
"""Inputs of a group whose scales are exact."""


class Types(NamedTuple):
    """The types of a product's numbers.

    Attributes:
        kernel: Of the kernel: a key of `TOGETHER`.
        result: Of the result: "float32" or "bfloat16".
        group: Inputs of a group that has a scale of its own, if they are few; None if there is none, or for any number.
        scale: Of the scales of groups; None if there are no groups.
        has_zero: Whether groups have zeros. Then sums over the inputs of each group come with the rows.
        has_factor: Whether each column's sum is multiplied with a factor, or the scales of each block.
        has_step: Whether zeros are multiplied with the step of their block, and not with the scale of their group.
        block: Groups of a block; None if factors are of columns.
        is_exact: Whether bfloat16 holds each number times its scale.
    """

    kernel: str
    result: str
    group: int | None = None
    scale: str | None = None
    has_zero: bool = False
    has_factor: bool = False
    has_step: bool = False
    block: int | None = None
    is_exact: bool = False

    @property
    def name(self) -> str:
        """All of it in one word."""
        group, block = ("" if length is None else str(length) for length in (self.group, self.block))
        parts = (
            self.kernel,
            group,
            self.scale,
            "zero" * self.has_zero,
            "factor" * self.has_factor,
            "step" * self.has_step,
            block,
            "exact" * self.is_exact,
        )
        return "_".join([*filter(None, parts), self.result])

    @property
    def is_short(self) -> bool:
        """Whether the kernel's numbers must be converted to be multiplied with bfloat16."""
        return self.kernel not in ITEM_BYTES

    @property
    def sums_groups(self) -> bool:
        """Whether bfloat16 rows are multiplied group by group."""
        return self.scale is not None and not self.is_exact

    @property
    def in_4_bits(self) -> bool:
        """Whether a byte has two of its numbers."""
        return self.kernel in NUMBERS_OF_4_BITS

    @property
    def together(self) -> int:
        """Inputs of a column that are read together."""
        return TOGETHER[self.kernel] * (1 + self.in_4_bits)

    @property
    def line_bytes(self) -> int:
        """Bytes of an input in a panel."""
        return LANES * ITEM_BYTES.get(self.kernel, 1) // (1 + self.in_4_bits)

    @property
    def result_bytes(self) -> int:
        """Bytes of a panel's width in a row of the result."""
        return LANES * ITEM_BYTES[self.result]

    @property
    def ranks(self) -> list[int]:
        """The axes of each argument and of the result, in the order of `matmul`."""
        zeros, beside = [4, 2] * self.has_zero, [4] * (self.has_factor + self.has_step)
        return [2, 4, *[4] * (self.scale is not None), *zeros, *beside, 2]


class Panel(NamedTuple):
    """A panel of a kernel in memory.

    Attributes:
        numbers: The address of its numbers.
        scale: The address of its groups' scales, if it has any.
        zero: Likewise of their zeros.
        factor: Likewise of the factors of its columns, or of its blocks.
        step: Likewise of the steps of its blocks.
    """

    numbers: Value
    scale: Value | None = None
    zero: Value | None = None
    factor: Value | None = None
    step: Value | None = None

    @classmethod
    def at(cls, function: Function, types: Types, buffers: Sequence[Buffer], index: Value) -> "Panel":
        """The panel with this index. Buffers are as `Types.ranks` says."""
        scale = zero = factor = step = None

        def part(buffer: Buffer, line_bytes: int) -> Value:
            return function.address(buffer.data, index * (buffer.sizes[1] * line_bytes))

        if types.scale is not None:
            scale = part(buffers[2], LANES * ITEM_BYTES.get(types.scale, 1))
        if types.has_zero:
            zero = part(buffers[3], LANES)
        if types.has_factor:
            factor = part(buffers[-2 - types.has_step], PANEL_BYTES)
        if types.has_step:
            step = part(buffers[-2], PANEL_BYTES)
        numbers = function.address(buffers[1].data, index * (buffers[0].sizes[1] * types.line_bytes))
        return cls(numbers, scale, zero, factor, step)

    def inputs(self, function: Function, types: Types, first: Value, count: int) -> Iterator[Value]:
        """Emits the vectors of `count` inputs from a first one on, each only when it is asked for, without scales."""
        for start in range(0, count, types.together):
            k = first + start
            at = k * types.line_bytes
            if types.kernel == "bfloat16":
                yield from function.float_pairs(self.numbers, at)
            elif types.in_4_bits:
                yield from function.nibbles(types.kernel, self.numbers, at)
            else:
                yield function.floats(types.kernel, self.numbers, at)

    def scaled(self, function: Function, types: Types, first: Value, count: int) -> Iterator[Value]:
        """The same, but exact ones are multiplied with the scales of their groups."""
        if not types.is_exact:
            yield from self.inputs(function, types, first, count)
            return
        for start in range(0, count, types.together):
            factor = self.group_scale(function, types, (first + start) // EXACT_GROUP)
            yield from (number * factor for number in self.inputs(function, types, first + start, types.together))

    def pairs(self, function: Function, types: Types, first: Value, count: int) -> Iterator[Value]:
        """Emits the same as pairs of inputs in bfloat16, which holds every number of a kernel exactly."""
        if types.kernel == "bfloat16":
            for i in range(0, count, 2):
                yield function.load(vector(INT32), self.numbers, (first + i) * types.line_bytes)
        elif types.in_4_bits and not types.is_exact:
            for i in range(0, count, types.together):
                yield from function.nibble_pairs(types.kernel, self.numbers, (first + i) * types.line_bytes)
        else:
            inputs = self.scaled(function, types, first, count)
            for number in inputs:
                yield function.bfloat16_pairs(number, next(inputs))

    def group_scale(self, function: Function, types: Types, group: Value) -> Value:
        """The scales of a group."""
        assert self.scale is not None and types.scale is not None, "the kernel has scales"
        scale = function.floats(types.scale, self.scale, group * (LANES * ITEM_BYTES.get(types.scale, 1)))
        if types.block is None or self.factor is None:
            return scale
        return scale * self._of_block(function, types, self.factor, group)

    def group_offset(self, function: Function, types: Types, group: Value, scale: Value) -> Value | None:
        """The zeros of a group, times its scale or the step of its block; None if there are none."""
        if self.zero is None:
            return None
        step = scale if self.step is None else self._of_block(function, types, self.step, group)
        return function.floats("int8", self.zero, group * LANES) * step

    def _of_block(self, function: Function, types: Types, parts: Value, group: Value) -> Value:
        return load_panel(function, parts, 0 if types.block is None else group // types.block * PANEL_BYTES)

    def column_factor(self, function: Function, types: Types) -> Value | None:
        """What the sums of its columns are multiplied with; None for nothing."""
        return None if types.block is not None or self.factor is None else load_panel(function, self.factor, 0)


def tile_shapes() -> Sequence[tuple[int, int]]:
    """(rows, panels) of the tiles whose sums fit the registers, most rows first. The last one has one row."""
    return ((8, 3), (4, 6), (2, 6), (1, 6)) if library.has_long_registers() else ((6, 1), (4, 1), (2, 3), (1, 6))


def emit_product(
    function: Function,
    num_rows: Value | int,
    num_panels: Value | int,
    tile: Callable[[Value, int, Value, int], None],
    shapes: Sequence[tuple[int, int]] | None = None,
) -> None:
    """Emits a loop over panels and inside it one over rows, so that a tile's panels stay in the cache.

    Args:
        function: Where to emit.
        num_rows: Rows of the product.
        num_panels: Panels of the product.
        tile: Emits the tile of some rows from a first row on, and some panels from a first panel on.
        shapes: (rows, panels) of tiles, most rows first, one row last; None for `tile_shapes`.
    """
    shapes = shapes or tile_shapes()
    rows_in_all = num_rows if isinstance(num_rows, Value) else function.constant(num_rows)
    panels_in_all = num_panels if isinstance(num_panels, Value) else function.constant(num_panels)
    # All rows pass over a group of panels before the next group: as many as the widest tile of the fewest rows takes.
    width = max(panels for _, panels in shapes)
    with function.loop(panels_in_all, step=width) as group:
        end = function.smaller(panels_in_all, group + width)
        first = Variable(function, function.constant(0))
        for rows, panels in shapes:
            last = first.get() + (rows_in_all - first.get()) // rows * rows
            with function.loop(last, start=first.get(), step=rows) as row:
                emit_panels(function, group, end, panels, functools.partial(tile, row, rows))
            first.set(last)


def emit_panels(function: Function, start: Value, end: Value, panels: int, tile: Callable[[Value, int], None]) -> None:
    """Covers panels start..end with tiles of `panels`, and what is left with tiles of one."""
    whole = start + (end - start) // panels * panels
    with function.loop(whole, start=start, step=panels) as panel:
        tile(panel, panels)
    if panels > 1:
        with function.loop(end, start=whole) as panel:
            tile(panel, 1)


def emit_sums(
    function: Function,
    length: Value | int,
    sums: list[list[Value]],
    number: Callable[[Value, int], Value],
    panel: Callable[[Value, int], Iterable[Value]],
    step: int = 1,
    fused: Callable[[Function, Value, Value, Value], Value] = Function.fused,
) -> list[list[Value]]:
    """sums[r][p] + Σ number(k, r) · panel(k, p) over k below `length`.

    Args:
        function: Where to emit.
        length: How many products each sum has, a multiple of `step`.
        sums: What is added to, for each row and panel.
        number: Emits the number of a row at k.
        panel: Emits the vectors of a panel from k on, as many as `step`, each when it is needed or before.
        step: How many vectors of a panel are read together.
        fused: Emits a · b + c. For pairs of bfloat16, k counts pairs.
    """
    running = [[Variable(function, start) for start in row] for row in sums]
    with function.loop(length, step=step) as first:
        panels = (panel(first, p) for p in range(len(sums[0])))
        for i, vectors in enumerate(zip(*panels, strict=True)):
            for r, row in enumerate(running):
                factor = function.spread(number(first + i, r))
                for variable, numbers in zip(row, vectors, strict=True):
                    variable.set(fused(function, factor, numbers, variable.get()))
    return [[variable.get() for variable in row] for row in running]


def emit_group_sums(
    function: Function,
    types: Types,
    buffers: Sequence[Buffer],
    panels: Sequence[Panel],
    row: Value,
    rows: int,
    number: Callable[[Value, int], Value],
    panel: Callable[[Value, int], Iterable[Value]],
    step: int = 1,
    fused: Callable[[Function, Value, Value, Value], Value] = Function.fused,
) -> list[list[Value]]:
    """The sums of rows times panels with groups: each group's own sum is multiplied with its scale and added.

    So an input costs no multiplication with its scale, and the sums of a group have the registers for themselves. A
    zero, which is the same for all inputs of a group, is multiplied with their sum, which comes with its sign changed.
    See `emit_sums` for the others.
    """
    groups, per_step = buffers[2].sizes[1], 1 if fused is Function.fused else 2
    length = (types.group or buffers[0].sizes[1] // groups) // per_step
    zeros = [[function.zeros()] * len(panels)] * rows
    totals = [[Variable(function, start) for start in each] for each in zeros]
    with function.loop(groups) as group:
        first = group * length
        sums = emit_sums(
            function,
            length,
            zeros,
            lambda k, r: number(first + k, r),
            lambda k, p: panel(first + k, p),
            step,
            fused,
        )
        of_rows = [function.zeros()] * rows
        if types.has_zero:
            at = [(row + r) * groups + group for r in range(rows)]
            of_rows = [function.spread(load_number(function, buffers[4].data, each * 4)) for each in at]
        for p, read in enumerate(panels):
            scale = read.group_scale(function, types, group)
            offset = read.group_offset(function, types, group, scale)
            scale *= function.nibble_unit(types.kernel)
            for r, own in enumerate(each[p] for each in sums):
                total = function.fused(own, scale, totals[r][p].get())
                totals[r][p].set(total if offset is None else function.fused(offset, of_rows[r], total))
    return [[total.get() for total in each] for each in totals]


def emit_results(
    function: Function,
    types: Types,
    buffers: Sequence[Buffer],
    panels: Sequence[Panel],
    sums: Sequence[Sequence[Value]],
    row: Value,
    column: Value,
) -> None:
    """Writes sums[r][p], multiplied with the factors of their columns, if any, from a row and a panel on."""
    row_bytes = buffers[1].sizes[0] * types.result_bytes
    for p, panel in enumerate(panels):
        factor = panel.column_factor(function, types)
        for r, of_row in enumerate(sums):
            total = of_row[p] if factor is None else of_row[p] * factor
            target = (row + r) * row_bytes + (column + p) * types.result_bytes
            function.store_as(types.result, total, buffers[-1].data, target)


def load_number(function: Function, base: Value, offset: Value | int) -> Value:
    """A float32."""
    return function.load(FLOAT, base, offset)


def load_pair(function: Function, base: Value, index: Value) -> Value:
    """A pair of bfloat16 in memory, with its index among pairs."""
    return function.load(INT32, base, index * 4)


def load_pairs(function: Function, base: Value, index: Value) -> Value:
    """`LANES` pairs of bfloat16, with the index of the line among lines of as many."""
    return function.load(vector(INT32), base, index * PANEL_BYTES)


def load_panel(function: Function, base: Value, offset: Value | int) -> Value:
    """`LANES` float32."""
    return function.load(vector(FLOAT), base, offset)
