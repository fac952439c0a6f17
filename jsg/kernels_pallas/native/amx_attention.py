"""Scores and weighted values of `attention.py` by the matrix unit. See `amx.py`.

Each row is computed in the same way whatever the other rows are, and however many.
"""

from collections.abc import Sequence

from jsg.kernels_pallas.native import amx
from jsg.kernels_pallas.native.amx import COLUMN_TILES, DEPTH, LINE_BYTES, ROWS
from jsg.kernels_pallas.native.attention_state import KEY_BLOCK, Call, Rows, State
from jsg.kernels_pallas.native.emit import LANES, Function, Value
from jsg.kernels_pallas.native.tiles import PANEL_BYTES, load_number, load_panel

SUMS, ROW_TILE = (0, 1, 2, 3), 4
"""The matrix tiles that have sums, one for each panel that is read, and rows. Fewer would wait for each other."""
TILE_BYTES = ROWS * LINE_BYTES


def emit_scores(function: Function, call: Call, rows: Rows, state: State) -> None:
    """The scores of the block's keys, before they are scaled."""
    head_bytes = call.keys.sizes[3] * 2
    panels = [function.address(state.panels, head_bytes * key) for key in range(0, KEY_BLOCK, LANES)]
    with function.loop(rows.num_rows, step=ROWS) as row:
        queries = function.address(state.queries, row * head_bytes)
        for tile in SUMS:
            amx.clear(function, tile)
        with function.loop(head_bytes, step=LINE_BYTES) as at:
            amx.load(function, ROW_TILE, function.address(queries, at), head_bytes)
            _multiply(function, [function.address(panel, at * LANES) for panel in panels])
        scores = function.address(state.scores, row * (KEY_BLOCK * 4))
        for tile in SUMS:
            amx.store(function, tile, function.address(scores, tile * PANEL_BYTES), KEY_BLOCK * 4)


def _multiply(function: Function, panels: Sequence[Value]) -> None:
    """Multiplies the tile of rows with tiles of columns, and adds to the sums. The other tiles are given back."""
    for tile, panel in enumerate(panels):
        columns = COLUMN_TILES[tile % len(COLUMN_TILES)]
        amx.load(function, columns, panel, LINE_BYTES)
        amx.multiply(function, tile, ROW_TILE, columns)
        amx.clear(function, columns)
    amx.clear(function, ROW_TILE)


def emit_output(function: Function, call: Call, rows: Rows, state: State, num_keys: Value) -> None:
    """Adds the weighted values of the block to the sums of each row."""
    head_dim = call.queries.sizes[2]
    num_steps = (num_keys + (DEPTH - 1)) // DEPTH
    with function.loop(rows.num_rows) as row:
        # Past the first blocks the largest score is seldom another one, and then the sums stay as they are.
        changes = load_number(function, state.shrink, row * PANEL_BYTES).equals(1.0).equals(0)
        with function.when(changes):
            shrink = load_panel(function, state.shrink, row * PANEL_BYTES)
            with function.loop(head_dim, step=LANES) as dim:
                at = (row * head_dim + dim) * 4
                function.store(load_panel(function, state.output, at) * shrink, state.output, at)
    with function.loop(rows.num_rows, step=ROWS) as row:
        whole = head_dim // (len(SUMS) * LANES) * (len(SUMS) * LANES)
        for panels, start, end in ((len(SUMS), function.constant(0), whole), (2, whole, head_dim)):
            with function.loop(end, start=start, step=panels * LANES) as dim:
                _add_values(function, state, row, dim, panels, head_dim, num_steps)


def _add_values(
    function: Function, state: State, row: Value, dim: Value, panels: int, head_dim: Value, num_steps: Value
) -> None:
    """Adds the weighted values of some dimensions to the sums of 16 rows."""
    output = function.address(state.output, (row * head_dim + dim) * 4)
    values = [function.address(state.value_panels, (dim + p * LANES) * (KEY_BLOCK * 2)) for p in range(panels)]
    weights = function.address(state.weights, row * (KEY_BLOCK * 2))
    for tile in range(panels):
        amx.load(function, tile, function.address(output, tile * PANEL_BYTES), head_dim * 4)
    with function.loop(num_steps) as step:
        amx.load(function, ROW_TILE, function.address(weights, step * LINE_BYTES), KEY_BLOCK * 2)
        _multiply(function, [function.address(value, step * TILE_BYTES) for value in values])
    for tile in range(panels):
        amx.store(function, tile, function.address(output, tile * PANEL_BYTES), head_dim * 4)
