"""Blocks of keys and values as pairs of bfloat16, and scores and weighted values of them. See `attention.py`.

The matrix unit reads the same blocks (`amx_attention.py`). Where there is none, an instruction of AVX512-BF16
multiplies them. Each row is computed in the same way whatever the other rows are, and however many.
"""

from collections.abc import Sequence

from llvmlite import ir

from jsg.kernels_pallas.native.amx import DEPTH, LINE_BYTES
from jsg.kernels_pallas.native.attention_state import KEY_BLOCK, Call, Rows, State
from jsg.kernels_pallas.native.emit import FLOAT, INT, INT16, LANES, Function, Value, vector
from jsg.kernels_pallas.native.tiles import PANEL_BYTES, emit_product, emit_sums, load_pair, load_pairs, load_panel

TILES: Sequence[tuple[int, int]] = ((6, 4), (3, 4), (2, 4), (1, 4))
"""(rows, panels) of register tiles."""


def emit_keys_and_values(function: Function, call: Call, state: State, num_keys: Value) -> None:
    """Lays out a block of keys and values as the unit reads them. Past its end they are those of slot 0."""
    for first in range(0, KEY_BLOCK, LANES):
        _turn_keys(function, call, state, function.constant(first))
    _turn_values(function, call, state, (num_keys + (DEPTH - 1)) // DEPTH)


def _turn_keys(function: Function, call: Call, state: State, first: Value) -> None:
    """Writes `LANES` keys side by side, pairs of their numbers together."""
    panel = function.address(state.panels, first * (call.keys.sizes[3] * 2))
    starts = [function.load(INT, state.offsets, (first + lane) * 8) for lane in range(LANES)]
    with function.loop(call.keys.sizes[3] * 2, step=LINE_BYTES) as at:
        pairs = [function.load(vector(FLOAT), call.keys.data, start + at) for start in starts]
        for i, turned in enumerate(function.transposed(pairs)):
            function.store(turned, panel, at * LANES + i * LINE_BYTES)


def _turn_values(function: Function, call: Call, state: State, num_steps: Value) -> None:
    """Writes the values of the block in panels of `LANES` dimensions, two keys of each side by side."""
    numbers = ir.VectorType(INT16, 2 * LANES)
    orders = [[lane + half * LANES + key * 2 * LANES for lane in range(LANES) for key in (0, 1)] for half in (0, 1)]
    panel_bytes = KEY_BLOCK * LANES * 2
    with function.loop(num_steps * DEPTH, step=2) as key:
        starts = [function.load(INT, state.offsets, (key + i) * 8) for i in (0, 1)]
        with function.loop(call.values.sizes[3] * 2, step=LINE_BYTES) as at:
            pair = [function.load(numbers, call.values.data, start + at) for start in starts]
            for half, order in enumerate(orders):
                target = at // LINE_BYTES * (2 * panel_bytes) + half * panel_bytes + key * (LINE_BYTES // 2)
                function.store(function.shuffled(pair[0], pair[1], order), state.value_panels, target)


def emit_scores(function: Function, call: Call, rows: Rows, state: State, num_keys: Value) -> None:
    """The scores of the block's keys, before they are scaled."""
    head_dim = call.queries.sizes[2]

    def tile(row: Value, count: int, panel: Value, panels: int) -> None:
        queries = [function.address(state.queries, (row + r) * (head_dim * 2)) for r in range(count)]
        keys = [function.address(state.panels, (panel + p) * (head_dim * 2 * LANES)) for p in range(panels)]
        scores = emit_sums(
            function,
            head_dim // 2,
            [[function.zeros()] * panels] * count,
            lambda pair, r: load_pair(function, queries[r], pair),
            lambda pair, p: [load_pairs(function, keys[p], pair)],
            fused=Function.fused_pairs,
        )
        for r in range(count):
            for p in range(panels):
                function.store(scores[r][p], state.scores, (row + r) * (KEY_BLOCK * 4) + (panel + p) * PANEL_BYTES)

    emit_product(function, rows.num_rows, (num_keys + (LANES - 1)) // LANES, tile, TILES)


def emit_output(function: Function, call: Call, rows: Rows, state: State, num_keys: Value) -> None:
    """Adds the weighted values of the block to the sums of each row."""
    head_dim = call.queries.sizes[2]

    def tile(row: Value, count: int, panel: Value, panels: int) -> None:
        outputs = [function.address(state.output, ((row + r) * head_dim + panel * LANES) * 4) for r in range(count)]
        weights = [function.address(state.weights, (row + r) * (KEY_BLOCK * 2)) for r in range(count)]
        values = [function.address(state.value_panels, (panel + p) * (KEY_BLOCK * 2 * LANES)) for p in range(panels)]
        shrinks = [load_panel(function, state.shrink, (row + r) * PANEL_BYTES) for r in range(count)]
        before = [
            [load_panel(function, output, p * PANEL_BYTES) * shrink for p in range(panels)]
            for output, shrink in zip(outputs, shrinks, strict=True)
        ]
        sums = emit_sums(
            function,
            (num_keys + 1) // 2,
            before,
            lambda pair, r: load_pair(function, weights[r], pair),
            lambda pair, p: [load_pairs(function, values[p], pair)],
            fused=Function.fused_pairs,
        )
        for r in range(count):
            for p in range(panels):
                function.store(sums[r][p], outputs[r], p * PANEL_BYTES)

    emit_product(function, rows.num_rows, head_dim // LANES, tile, TILES)
