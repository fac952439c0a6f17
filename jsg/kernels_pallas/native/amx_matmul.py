"""Products of bfloat16 rows by the matrix unit. See `matmul.py` and `amx.py`.

Sums are float32; each adds two products at a time, from the first input to the last, whatever the number of rows. So a
result does not depend on the batch.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

from jsg.kernels_pallas.native import amx
from jsg.kernels_pallas.native.amx import DEPTH, LINE_BYTES, ROWS
from jsg.kernels_pallas.native.calls import Buffer
from jsg.kernels_pallas.native.emit import LANES, Function, Value, Variable
from jsg.kernels_pallas.native.tiles import (
    PANEL_BYTES,
    Panel,
    Types,
    emit_panels,
    emit_product,
    emit_results,
    load_number,
    load_panel,
)

AHEAD_BYTES = 4096
"""How far behind what is read memory is asked for what follows."""
KEPT_BYTES = 1 << 20
"""Rows that all panels are multiplied with before the next ones: half of the second-level cache of processors that have
a matrix unit. A thousand rows of 2048 inputs took 0.7 of the time then, and of 768 inputs 0.9 (Xeon, 2026-11-27)."""
MAX_FEW = 2
"""Rows for which reading the kernel takes so long that the matrix unit has nothing to gain."""
FEW_TILES = ((4, 2), (2, 4), (1, 6))
"""(rows, panels) of the register tiles without the matrix unit, each with three sums in a register of its own."""


class _Block(NamedTuple):
    """A block of sums that stays in matrix tiles 0 to 3, and the tiles that are loaded for each `DEPTH` inputs.

    Attributes:
        panels: How many panels it has.
        rows: The tiles of rows.
    """

    panels: int
    rows: tuple[int, ...]


FEW_ROWS, MANY_ROWS = _Block(4, (4,)), _Block(2, (4, 5))
"""For up to `ROWS` rows, and for more."""


def can_multiply(depth: int, types: Types) -> bool:
    """Whether the matrix unit multiplies bfloat16 rows with a kernel of these types of so many inputs."""
    is_read = (types.kernel in ("bfloat16", "int8", "e4m3") and types.scale is None) or types.is_exact
    return is_read and depth % DEPTH == 0 and amx.is_available()


def emit_item(types: Types, function: Function, buffers: list[Buffer], first: Value, width: Value) -> None:
    """All rows times `width` panels from the first one on."""
    num_rows, depth = buffers[0].sizes
    scratch = function.allocated(depth * (2 * LANES * FEW_ROWS.panels)) if types.is_short else None
    amx.configure(function, num_rows)

    def emit_group(block: _Block, start: Value, end: Value, panel: Value, panels: int) -> None:
        panels_read = [Panel.at(function, types, buffers, panel + p) for p in range(panels)]
        read = _Reading(types, panels_read, depth, scratch)
        step = ROWS * len(block.rows)
        emit_block = functools.partial(_emit_block, types, function, buffers, block)
        emit_block(start, panel, panels, functools.partial(_read_first, function, read))
        with function.loop(end, start=start + step, step=step) as row:
            emit_block(row, panel, panels, functools.partial(_read_again, function, read))

    for block, is_taken in ((FEW_ROWS, num_rows <= ROWS), (MANY_ROWS, function.constant(ROWS) < num_rows)):
        with function.when(is_taken):
            # Each group of panels passes over all rows, which stay in the cache if there are not too many of them.
            step = ROWS * len(block.rows)
            kept = function.larger_int(
                function.constant(KEPT_BYTES // 2) // depth // step * step, function.constant(step)
            )
            with function.loop(num_rows, step=kept) as start:
                end = function.smaller(start + kept, num_rows)
                emit_panels(
                    function, first, first + width, block.panels, functools.partial(emit_group, block, start, end)
                )
    amx.release(function)
    if scratch is not None:
        function.free(scratch)


def emit_item_of_few(types: Types, function: Function, buffers: list[Buffer], first: Value, width: Value) -> None:
    """What `emit_item` computes, to the bit, without the matrix unit. It is faster for `MAX_FEW` rows or fewer.

    Only numbers too small for a normal float32, which count as zero there and not here, can make a difference.

    The matrix unit multiplies and adds in this order: for each `DEPTH` inputs it sums the even and the odd ones by
    themselves, each in ascending order, and adds both sums to each other and then to the sum before.
    """
    x = buffers[0]
    depth, step = x.sizes[1], max(2, types.together)

    def tile(row: Value, rows: int, panel: Value, panels: int) -> None:
        at = [function.address(x.data, (row + r) * depth * 4) for r in range(rows)]
        read = [Panel.at(function, types, buffers, first + panel + p) for p in range(panels)]
        sums = _zeros(function, rows, panels)
        with function.loop(depth, step=DEPTH) as block:
            even, odd = _zeros(function, rows, panels), _zeros(function, rows, panels)
            with function.loop(block + DEPTH, start=block, step=step) as k:
                inputs = (each.scaled(function, types, k, step) for each in read)
                for i, vectors in enumerate(zip(*inputs, strict=True)):
                    partial = (even, odd)[i % 2]
                    for r in range(rows):
                        factor = function.spread(load_number(function, at[r], (k + i) * 4))
                        for partial_sum, numbers in zip(partial[r], vectors, strict=True):
                            partial_sum.set(function.fused(factor, numbers, partial_sum.get()))
            for r in range(rows):
                for p, total in enumerate(sums[r]):
                    total.set(total.get() + (even[r][p].get() + odd[r][p].get()))
        totals = [[total.get() for total in of_row] for of_row in sums]
        emit_results(function, types, buffers, read, totals, row, first + panel)

    emit_product(function, x.sizes[0], width, tile, FEW_TILES)


def _zeros(function: Function, rows: int, panels: int) -> list[list[Variable]]:
    return [[Variable(function, function.zeros()) for _ in range(panels)] for _ in range(rows)]


class _Reading(NamedTuple):
    """Panels that are read.

    Attributes:
        types: Their type.
        panels: Where they lie.
        depth: Inputs of each.
        scratch: For 8 and 4 bits the address of their numbers as bfloat16, once they are read; else None.
    """

    types: Types
    panels: list[Panel]
    depth: Value
    scratch: Value | None


def _read_first(function: Function, read: _Reading, tile: int, k: Value, p: int) -> None:
    """Loads `DEPTH` inputs of panel p from memory, and asks for those that are read soon."""
    line = read.types.line_bytes
    source = function.address(read.panels[p].numbers, k * line)
    for offset in range(0, DEPTH * line, LINE_BYTES):
        function.prefetch(source, offset + AHEAD_BYTES)
    if read.scratch is not None:
        target = function.address(read.scratch, (read.depth * p + k) * (2 * LANES))
        for i, pair in enumerate(read.panels[p].pairs(function, read.types, k, DEPTH)):
            function.store(pair, target, i * (4 * LANES))
        source = target
    amx.load(function, tile, source, LINE_BYTES)


def _read_again(function: Function, read: _Reading, tile: int, k: Value, p: int) -> None:
    """Loads what `_read_first` has loaded before."""
    if read.scratch is None:
        source = function.address(read.panels[p].numbers, k * (2 * LANES))
    else:
        source = function.address(read.scratch, (read.depth * p + k) * (2 * LANES))
    amx.load(function, tile, source, LINE_BYTES)


def _emit_block(
    types: Types,
    function: Function,
    buffers: list[Buffer],
    block: _Block,
    row: Value,
    panel: Value,
    panels: int,
    read: Callable[[int, Value, int], None],
) -> None:
    """One or two row tiles from a row on, times some panels. The last ones reach back over rows computed before."""
    x = buffers[0]
    num_rows, depth = x.sizes
    row_bytes = depth * 2
    last = function.larger_int(num_rows - ROWS, function.constant(0))
    starts = [function.smaller(row + ROWS * i, last) for i in range(len(block.rows))]
    sums = [[i * block.panels + p for p in range(panels)] for i in range(len(starts))]
    for tile in (tile for tiles in sums for tile in tiles):
        amx.clear(function, tile)
    with function.loop(depth, step=DEPTH) as k:
        for tile, start in zip(block.rows, starts, strict=True):
            amx.load(function, tile, function.address(x.data, start * row_bytes + k * 2), row_bytes)
        for p in range(panels):
            tile = amx.COLUMN_TILES[p % len(amx.COLUMN_TILES)]
            read(tile, k, p)
            for rows, tiles in zip(block.rows, sums, strict=True):
                amx.multiply(function, tiles[p], rows, tile)
            amx.clear(function, tile)
        for tile in block.rows:
            amx.clear(function, tile)
    for start, tiles in zip(starts, sums, strict=True):
        for p, tile in enumerate(tiles):
            _finish(types, function, buffers, tile, start, panel + p)


def _finish(types: Types, function: Function, buffers: list[Buffer], tile: int, row: Value, panel: Value) -> None:
    """Writes the sums of a matrix tile to the result, multiplied with the factors of their columns, if any."""
    sums = function.buffer(ROWS * PANEL_BYTES)
    amx.store(function, tile, sums, PANEL_BYTES)
    result_bytes = buffers[1].sizes[0] * types.result_bytes
    target = function.address(buffers[-1].data, row * result_bytes + panel * types.result_bytes)
    factor = Panel.at(function, types, buffers, panel).column_factor(function, types)
    with function.loop(function.smaller(buffers[0].sizes[0], function.constant(ROWS))) as line:
        total = load_panel(function, sums, line * PANEL_BYTES)
        function.store_as(types.result, total if factor is None else total * factor, target, line * result_bytes)
