"""Products of bfloat16 rows, two inputs at a time, by an instruction of AVX512-BF16. See `matmul.py`.

It does twice the work of a fused multiplication and addition of float32, and reads kernels in bfloat16 as they lie in
panels. Each sum adds pairs of products from the first input to the last, whatever the number of rows. So a result does
not depend on the batch.
"""

import functools
from collections.abc import Iterable

from jsg.kernels_pallas.native import library
from jsg.kernels_pallas.native.calls import Buffer
from jsg.kernels_pallas.native.emit import LANES, Function, Value
from jsg.kernels_pallas.native.tiles import (
    Panel,
    Types,
    emit_group_sums,
    emit_product,
    emit_results,
    emit_sums,
    load_pair,
)

MAX_FEW = 8
"""Rows for which kernels in 8 or 4 bits are converted where they are used. For more rows they are converted once."""
FEW_TILES, MANY_TILES = ((8, 3), (4, 6), (2, 6), (1, 6)), ((8, 3), (4, 3), (2, 3), (1, 3))
"""(rows, panels) of the register tiles."""
MANY_PANELS = 3


def can_multiply(depth: int, types: Types) -> bool:
    """Whether this processor multiplies bfloat16 rows with a kernel of these types of so many inputs as pairs."""
    return types.kernel != "float32" and depth % 2 == 0 and library.multiplies_pairs()


def emit_item(types: Types, function: Function, buffers: list[Buffer], first: Value, width: Value) -> None:
    """All rows times `width` panels from the first one on."""
    num_rows, depth = buffers[0].sizes
    with function.when(num_rows <= MAX_FEW):
        tile = functools.partial(_emit_tile, types, function, buffers, first, None)
        emit_product(function, num_rows, width, tile, FEW_TILES)
    with function.when(function.constant(MAX_FEW) < num_rows):
        scratch = function.allocated(depth * (2 * LANES * MANY_PANELS)) if types.is_short else None
        with function.loop(width, step=MANY_PANELS) as group:
            panels = function.smaller(width - group, function.constant(MANY_PANELS))
            if scratch is not None:
                _convert(types, function, buffers, first + group, panels, scratch)
            tile = functools.partial(_emit_tile, types, function, buffers, first + group, scratch)
            emit_product(function, num_rows, panels, tile, MANY_TILES)
        if scratch is not None:
            function.free(scratch)


def _convert(
    types: Types, function: Function, buffers: list[Buffer], first: Value, panels: Value, scratch: Value
) -> None:
    """Writes panels as pairs of bfloat16 to `scratch`."""
    depth, step = buffers[0].sizes[1], max(2, types.together)
    with function.loop(panels) as panel:
        read = Panel.at(function, types, buffers, first + panel)
        target = function.address(scratch, panel * (depth * (2 * LANES)))
        with function.loop(depth, step=step) as k:
            for i, pair in enumerate(read.pairs(function, types, k, step)):
                function.store(pair, target, k * (2 * LANES) + i * (4 * LANES))


def _emit_tile(
    types: Types,
    function: Function,
    buffers: list[Buffer],
    first: Value,
    scratch: Value | None,
    row: Value,
    rows: int,
    panel: Value,
    panels: int,
) -> None:
    """Some rows times some panels, counted from the first one, which are in `scratch` if there is one."""
    depth = buffers[0].sizes[1]
    at = [function.address(buffers[0].data, (row + r) * (depth * 2)) for r in range(rows)]
    read = [Panel.at(function, types, buffers, first + panel + p) for p in range(panels)]
    if scratch is None:
        lines, kind = read, types
    else:
        kind = types._replace(kernel="bfloat16")
        lines = [Panel(function.address(scratch, (panel + p) * (depth * (2 * LANES))), None) for p in range(panels)]
    pairs_together = max(1, kind.together // 2)

    def number(k: Value, r: int) -> Value:
        return load_pair(function, at[r], k)

    def vectors(k: Value, p: int) -> Iterable[Value]:
        return lines[p].pairs(function, kind, k * 2, 2 * pairs_together)

    if types.sums_groups:
        sums = emit_group_sums(
            function, types, buffers, read, row, rows, number, vectors, pairs_together, Function.fused_pairs
        )
    else:
        zeros = [[function.zeros()] * panels] * rows
        sums = emit_sums(function, depth // 2, zeros, number, vectors, pairs_together, Function.fused_pairs)
    emit_results(function, types, buffers, read, sums, row, first + panel)
