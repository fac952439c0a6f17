"""Paged attention on a CPU: an online softmax over blocks of `KEY_BLOCK` keys, read from their pages where they lie.

An item is a key-value head of a single or of a query tile. Its rows are the query heads of its tokens, at most
`PASS_ROWS` at a time. For each block of keys:

    keys    are turned into panels, 16 keys side by side       [KEY_BLOCK / LANES, H, LANES]
    for `ROWS` rows at a time:
        scores  = queries · keys, masked, and their exponentials    [rows, KEY_BLOCK]
        output  = output · shrink + exponentials · values           [rows, H]

The sums of a query run over the keys in ascending order, in blocks that begin at position 0. So its result does not
depend on the batch, nor on how its prompt is cut. Masked values are multiplied by zero; see `ops.rotate_and_write`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from jsg.kernels_pallas.inputs import AttentionInputs, Scoring
from jsg.kernels_pallas.native import amx, amx_attention, library, pairs_attention
from jsg.kernels_pallas.native.attention_state import (
    HEAD_DIMS,
    KEY_BLOCK,
    PASS_ROWS,
    RANKS,
    ROWS,
    AttentionTypes,
    Call,
    Rows,
    State,
)
from jsg.kernels_pallas.native.calls import Buffer, Kernel, buffers_of, emit_handler
from jsg.kernels_pallas.native.emit import INT, INT32, LANES, LOG2_E, POINTER, Function, Value, Variable
from jsg.kernels_pallas.native.tiles import ITEM_BYTES, PANEL_BYTES, emit_product, emit_sums, load_number, load_panel

MASKED = -1e30
NO_WINDOW = 2**30
KINDS = ("float32", "bfloat16")
SHORT_TILES, LONG_TILES = ((6, 1), (2, 2), (1, 4)), ((6, 4), (3, 4), (2, 4), (1, 4))
"""(rows, panels) of register tiles: a head has few panels, so these are narrower than `tiles.tile_shapes`."""


def paged_attention(
    queries: Float[Array, "T N H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    inputs: AttentionInputs,
    scoring: Scoring,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
    """See `ops.paged_attention`. Sums are float32. Where bfloat16 are multiplied, weights are rounded to it.

    Raises:
        NotImplementedError: The pool has 8 bits, or heads are wide or no multiple of `LANES`.
    """
    head_dim, kind = queries.shape[-1], str(keys.dtype)
    if kind not in KINDS or head_dim % LANES or head_dim > HEAD_DIMS[-1]:
        raise NotImplementedError(
            f"the CPU's kernel reads float32 and bfloat16, and heads of a multiple of {LANES} up to "
            f"{HEAD_DIMS[-1]} numbers"
        )
    queries = queries if str(queries.dtype) in KINDS else queries.astype(jnp.float32)
    is_short = queries.dtype == jnp.bfloat16 and kind == "bfloat16"
    types = AttentionTypes(
        str(queries.dtype),
        kind,
        _unit(head_dim) if is_short else "",
        has_sinks=sinks is not None,
        max_head_dim=next(width for width in HEAD_DIMS if width >= head_dim),
        softcap=scoring.softcap,
        is_aligned=scoring.window is not None and scoring.window.is_aligned,
    )
    others = [
        "sinks" if types.has_sinks else "",
        "" if types.max_head_dim == HEAD_DIMS[0] else "wide",
        "" if types.softcap is None else f"capped_{types.softcap}",
        "aligned" if types.is_aligned else "",
    ]
    name = "_".join(filter(None, ("jsg_attention", types.unit, types.queries, types.pool, *others)))
    name = library.registered(name, functools.partial(_emit, types))
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(queries.shape, queries.dtype))(
        queries,
        keys,
        values,
        inputs.page_table,
        inputs.single_rows,
        inputs.single_kv_lens,
        inputs.tile_rows,
        inputs.tile_starts,
        inputs.tile_lens,
        inputs.tile_positions,
        jnp.asarray(inputs.num_tiles, jnp.int32),
        jnp.int32(NO_WINDOW if scoring.window is None else scoring.window.length),
        jnp.float32(scoring.scale),
        jnp.zeros(0, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
    )


def _unit(head_dim: int) -> str:
    """What multiplies bfloat16 on this processor."""
    if head_dim % amx.DEPTH:
        return ""
    return "amx" if amx.is_available() else "pairs" if library.multiplies_pairs() else ""


def _emit(types: AttentionTypes, module: ir.Module, name: str) -> None:
    rows = _emit_pass(types, module)
    item = functools.partial(_emit_item, types, rows)
    emit_handler(module, Kernel(name, RANKS, 1, _num_items, item, functools.partial(_clear, types)))


def _num_items(function: Function, buffers: list[Buffer]) -> Value:
    call = Call(*buffers)
    return (call.single_rows.sizes[0] + call.tile_rows.sizes[0]) * call.keys.sizes[2]


def _clear(types: AttentionTypes, function: Function, buffers: list[Buffer]) -> None:
    """Padding tokens, which no item computes, have zeros."""
    out = Call(*buffers).out
    with function.loop(out.sizes[0] * out.sizes[1] * out.sizes[2], step=LANES) as first:
        function.store_as(types.queries, function.zeros(), out.data, first * types.query_bytes)


def _emit_item(types: AttentionTypes, rows: Function, function: Function, buffers: list[Buffer], index: Value) -> None:
    """One key-value head of a single or of a query tile, `PASS_ROWS` rows at a time."""
    call = Call(*buffers)
    kv_heads, singles = call.keys.sizes[2], call.single_rows.sizes[0]
    group = call.queries.sizes[1] // kv_heads
    unit = index // kv_heads
    head = index - unit * kv_heads

    def number(buffer: Buffer, at: Value) -> Value:
        return function.widened(function.load(INT32, buffer.data, at * 4))

    def emit_rows(row: Value, token: Value, position: Value, length: Value) -> None:
        table = function.address(call.page_table.data, row * call.page_table.sizes[1] * 4)
        count = length * group
        if types.unit == "amx":
            amx.configure(function, count)
        with function.loop(count, step=PASS_ROWS) as first:
            some = function.smaller(count - first, function.constant(PASS_ROWS))
            function.call(rows, function.arguments[0], table, head, group, token, position, first, some)
        if types.unit == "amx":
            amx.release(function)

    with function.when(unit < singles):
        kv_len = number(call.single_kv_lens, unit)
        with function.when(function.constant(0) < kv_len):
            emit_rows(number(call.single_rows, unit), unit, kv_len - 1, function.constant(1))
    with function.when(singles <= unit):
        tile = unit - singles
        with function.when(tile < number(call.num_tiles, function.constant(0))):
            tiles = (call.tile_rows, call.tile_starts, call.tile_positions, call.tile_lens)
            emit_rows(*(number(buffer, tile) for buffer in tiles))


def _emit_pass(types: AttentionTypes, module: ir.Module) -> Function:
    """The function that computes some rows: it passes over the blocks of keys that any of them sees."""
    function = Function(module, "attention_rows", [POINTER, POINTER, *[INT] * 6])
    job, *arguments = function.arguments
    call, rows = Call(*buffers_of(function, RANKS, job)), Rows(*arguments)
    product_bytes = 2 if types.is_short else 4
    state = State(
        queries=function.buffer(PASS_ROWS * types.max_head_dim * product_bytes),
        panels=function.buffer(KEY_BLOCK * types.max_head_dim * product_bytes),
        value_panels=function.buffer(KEY_BLOCK * types.max_head_dim * 2 if types.is_short else PANEL_BYTES),
        offsets=function.buffer(KEY_BLOCK * 8),
        scores=function.buffer(ROWS * KEY_BLOCK * 4),
        weights=function.buffer(ROWS * KEY_BLOCK * product_bytes),
        largest=function.buffer(PASS_ROWS * PANEL_BYTES),
        shrink=function.buffer(ROWS * PANEL_BYTES),
        totals=function.buffer(PASS_ROWS * PANEL_BYTES),
        output=function.buffer(PASS_ROWS * types.max_head_dim * 4),
    )
    _emit_start(types, function, call, rows, state)
    window = function.widened(function.load(INT32, call.window.data))
    begin, end = _seen_blocks(types, function, rows, window)
    with function.loop(end, start=begin, step=KEY_BLOCK) as key:
        num_keys = function.smaller(end - key, function.constant(KEY_BLOCK))
        _emit_offsets(types, function, call, rows, state, key, num_keys)
        if types.is_short:
            pairs_attention.emit_keys_and_values(function, call, state, num_keys)
        else:
            _emit_keys(types, function, call, state, num_keys)
        with function.loop(rows.num_rows, step=ROWS) as row:
            _emit_block(types, function, call, rows, state, row, key, window)
    _emit_end(types, function, call, rows, state)
    function.builder.ret_void()
    return function


def _first_key(types: AttentionTypes, position: Value, window: Value) -> Value:
    """The first key that a token at a position sees, or a number below 0."""
    return position // window * window if types.is_aligned else position + 1 - window


def _seen_blocks(types: AttentionTypes, function: Function, rows: Rows, window: Value) -> tuple[Value, Value]:
    """The first key of the first block that any row sees, and the key behind the last one that any row sees."""
    first = rows.position + rows.first // rows.group
    last = rows.position + (rows.first + rows.num_rows - 1) // rows.group
    begin = function.larger_int(_first_key(types, first, window), function.constant(0))
    return begin // KEY_BLOCK * KEY_BLOCK, last + 1


def _emit_block(
    types: AttentionTypes,
    function: Function,
    call: Call,
    all_rows: Rows,
    whole: State,
    row: Value,
    key: Value,
    window: Value,
) -> None:
    """`ROWS` rows from one on and a block of keys, if any of these rows sees any of these keys."""
    some = function.smaller(all_rows.num_rows - row, function.constant(ROWS))
    rows, state = all_rows._replace(first=all_rows.first + row, num_rows=some), whole.at(function, types, call, row)
    begin, end = _seen_blocks(types, function, rows, window)
    with function.when(function.both(begin <= key, key < end)):
        num_keys = function.smaller(end - key, function.constant(KEY_BLOCK))
        if types.unit == "amx":
            amx_attention.emit_scores(function, call, rows, state)
        elif types.unit == "pairs":
            pairs_attention.emit_scores(function, call, rows, state, num_keys)
        else:
            _emit_scores(function, call, rows, state, num_keys)
        _emit_weights(types, function, call, rows, state, key, window)
        if types.unit == "amx":
            amx_attention.emit_output(function, call, rows, state, num_keys)
        elif types.unit == "pairs":
            pairs_attention.emit_output(function, call, rows, state, num_keys)
        else:
            _emit_output(types, function, call, rows, state, num_keys)


def _token_and_head(rows: Rows, row: Value) -> tuple[Value, Value]:
    """The packed token and the query head of a row."""
    index = rows.first + row
    token = index // rows.group
    return rows.token + token, rows.head * rows.group + index - token * rows.group


def _row_offset(types: AttentionTypes, rows: Rows, call: Call, row: Value) -> Value:
    """Where a row lies in the queries and in the result, in bytes."""
    token, head = _token_and_head(rows, row)
    heads, head_dim = call.queries.sizes[1:]
    return (token * heads + head) * head_dim * types.query_bytes


def _emit_start(types: AttentionTypes, function: Function, call: Call, rows: Rows, state: State) -> None:
    """Copies the rows' queries side by side, and empties the sums."""
    head_dim = call.queries.sizes[2]
    scale = function.spread(load_number(function, call.scale.data, 0))
    with function.loop(rows.num_rows) as row:
        source = _row_offset(types, rows, call, row)
        with function.loop(head_dim, step=LANES) as dim:
            at = row * head_dim + dim
            query = function.floats(types.queries, call.queries.data, source + dim * types.query_bytes)
            if types.is_short:
                function.store_as("bfloat16", query, state.queries, at * 2)
            else:  # scaling the queries is less work than scaling the scores
                function.store(query * scale, state.queries, at * 4)
            function.store(function.zeros(), state.output, at * 4)
        function.store(function.like(function.zeros(), MASKED), state.largest, row * PANEL_BYTES)
        function.store(function.zeros(), state.totals, row * PANEL_BYTES)


def _emit_offsets(
    types: AttentionTypes, function: Function, call: Call, rows: Rows, state: State, key: Value, num_keys: Value
) -> None:
    """Finds the keys of a block and asks memory for them. Places past its end read slot 0, which has zeros."""
    page_size, kv_heads, head_dim = call.keys.sizes[1:]
    head_bytes = head_dim * types.pool_bytes
    page = Variable(function, key // page_size)
    within = Variable(function, key - page.get() * page_size)
    with function.loop(num_keys) as index:
        number = function.widened(function.load(INT32, rows.table, page.get() * 4))
        offset = ((number * page_size + within.get()) * kv_heads + rows.head) * head_bytes
        function.store(offset, state.offsets, index * 8)
        with function.loop(head_bytes, step=64) as line:
            function.prefetch(call.keys.data, offset + line)
            function.prefetch(call.values.data, offset + line)
        is_last = (within.get() + 1).equals(page_size)
        page.set(function.chosen(is_last, page.get() + 1, page.get()))
        within.set(function.chosen(is_last, function.constant(0), within.get() + 1))
    with function.loop(function.constant(KEY_BLOCK), start=num_keys) as index:
        function.store(rows.head * head_bytes, state.offsets, index * 8)


def _emit_keys(types: AttentionTypes, function: Function, call: Call, state: State, num_keys: Value) -> None:
    """Turns the keys of a block into panels."""
    head_dim = call.keys.sizes[3]
    panel_bytes = head_dim * PANEL_BYTES
    with function.loop(num_keys, step=LANES) as first:
        target = function.address(state.panels, first // LANES * panel_bytes)
        starts = [function.load(INT, state.offsets, (first + lane) * 8) for lane in range(LANES)]
        with function.loop(head_dim, step=LANES) as dim:
            vectors = [function.floats(types.pool, call.keys.data, start + dim * types.pool_bytes) for start in starts]
            for i, turned in enumerate(function.transposed(vectors)):
                function.store(turned, target, (dim + i) * PANEL_BYTES)


def _emit_scores(function: Function, call: Call, rows: Rows, state: State, num_keys: Value) -> None:
    head_dim = call.queries.sizes[2]
    row_bytes, panel_bytes = head_dim * 4, head_dim * PANEL_BYTES

    def tile(row: Value, count: int, panel: Value, panels: int) -> None:
        queries = [function.address(state.queries, (row + r) * row_bytes) for r in range(count)]
        keys = [function.address(state.panels, (panel + p) * panel_bytes) for p in range(panels)]
        scores = emit_sums(
            function,
            head_dim,
            [[function.zeros()] * panels] * count,
            lambda dim, r: load_number(function, queries[r], dim * 4),
            lambda dim, p: [load_panel(function, keys[p], dim * PANEL_BYTES)],
        )
        for r in range(count):
            for p in range(panels):
                function.store(scores[r][p], state.scores, (row + r) * (KEY_BLOCK * 4) + (panel + p) * PANEL_BYTES)

    emit_product(function, rows.num_rows, (num_keys + (LANES - 1)) // LANES, tile, _shapes())


def _emit_weights(
    types: AttentionTypes, function: Function, call: Call, rows: Rows, state: State, key: Value, window: Value
) -> None:
    """Masks the scores of each row and takes their exponentials. Panels that were not computed are masked too."""
    first = rows.position + rows.first // rows.group
    last = rows.position + (rows.first + rows.num_rows - 1) // rows.group
    sees_all = function.both(key + (KEY_BLOCK - 1) <= first, _first_key(types, last, window) <= key)
    for is_masked, is_taken in ((False, sees_all), (True, sees_all.equals(0))):
        with function.when(is_taken), function.loop(rows.num_rows) as row:
            position = rows.position + (rows.first + row) // rows.group
            seen = _seen(function, _first_key(types, position, window) - key, position - key) if is_masked else None
            _emit_row_weights(types, function, call, state, row, seen)


def _seen(function: Function, first: Value, last: Value) -> list[Value]:
    """Which keys of a block a row sees: those from `first` to `last`."""
    least = function.larger_int(first - 1, function.constant(-1))
    lanes = [function.lanes() + function.narrowed(function.constant(at)) for at in range(0, KEY_BLOCK, LANES)]
    low, high = (function.spread(function.narrowed(limit)) for limit in (least, last))
    return [function.both(lane <= high, low < lane) for lane in lanes]


def _emit_row_weights(
    types: AttentionTypes, function: Function, call: Call, state: State, row: Value, seen: list[Value] | None
) -> None:
    """The exponentials of the scores of a row, of those that it sees; None: it sees all."""
    panels = range(KEY_BLOCK // LANES)
    kind = "bfloat16" if types.is_short else "float32"
    row_scores = function.address(state.scores, row * (KEY_BLOCK * 4))
    weights = function.address(state.weights, row * (KEY_BLOCK * ITEM_BYTES[kind]))
    at = row * PANEL_BYTES
    before = load_panel(function, state.largest, at)
    scores, largest = [], before
    for panel in panels:
        score = _capped(types, function, call, load_panel(function, row_scores, panel * PANEL_BYTES))
        scores.append(score if seen is None else function.chosen(seen[panel], score, function.like(score, MASKED)))
        largest = function.larger(scores[-1], largest)
    largest = function.largest(largest)
    exponential, shrink = _exponential(types, function, call, before, largest)
    total = load_panel(function, state.totals, at) * shrink
    for panel in panels:
        weight = exponential(scores[panel])
        weight = weight if seen is None else function.chosen(seen[panel], weight, function.zeros())
        function.store_as(kind, weight, weights, panel * (LANES * ITEM_BYTES[kind]))
        total = total + weight
    for value, kept in ((largest, state.largest), (shrink, state.shrink), (total, state.totals)):
        function.store(value, kept, at)


def _capped(types: AttentionTypes, function: Function, call: Call, score: Value) -> Value:
    """Scores, within the bound if there is one. These are scaled."""
    if types.softcap is None:
        return score
    score = score * function.spread(load_number(function, call.scale.data, 0)) if types.is_short else score
    return function.tanh(score * (1 / types.softcap)) * types.softcap


def _exponential(
    types: AttentionTypes, function: Function, call: Call, before: Value, largest: Value
) -> tuple[Callable[[Value], Value], Value]:
    """Emits exponentials of differences from the largest score; and what it does to those that had another largest."""
    if not types.is_short:
        return lambda score: function.exp(score - largest), function.exp(before - largest)
    # Queries in bfloat16 are not scaled, and processors that multiply them raise 2 to a power faster than e.
    scale = function.like(largest, LOG2_E)
    if types.leaves_scale:
        scale = function.spread(load_number(function, call.scale.data, 0) * LOG2_E)
    subtracted = function.zeros() - largest * scale
    shrink = function.power_of_2((before - largest) * scale)
    return lambda score: function.power_of_2(function.fused(score, scale, subtracted)), shrink


def _emit_output(
    types: AttentionTypes, function: Function, call: Call, rows: Rows, state: State, num_keys: Value
) -> None:
    head_dim = call.queries.sizes[2]
    row_bytes = head_dim * 4

    def tile(row: Value, count: int, panel: Value, panels: int) -> None:
        outputs = [function.address(state.output, (row + r) * row_bytes + panel * PANEL_BYTES) for r in range(count)]
        weights = [function.address(state.weights, (row + r) * (KEY_BLOCK * 4)) for r in range(count)]
        values = function.address(call.values.data, panel * (LANES * types.pool_bytes))
        shrinks = [load_panel(function, state.shrink, (row + r) * PANEL_BYTES) for r in range(count)]
        before = [
            [load_panel(function, outputs[r], p * PANEL_BYTES) * shrinks[r] for p in range(panels)]
            for r in range(count)
        ]

        def value(key: Value, p: int) -> list[Value]:
            start = function.load(INT, state.offsets, key * 8)
            return [function.floats(types.pool, values, start + p * (LANES * types.pool_bytes))]

        sums = emit_sums(function, num_keys, before, lambda key, r: load_number(function, weights[r], key * 4), value)
        for r in range(count):
            for p in range(panels):
                function.store(sums[r][p], outputs[r], p * PANEL_BYTES)

    emit_product(function, rows.num_rows, head_dim // LANES, tile, _shapes())


def _emit_end(types: AttentionTypes, function: Function, call: Call, rows: Rows, state: State) -> None:
    """Divides each row by its sum of exponentials, and writes it to the result."""
    head_dim = call.queries.sizes[2]
    with function.loop(rows.num_rows) as row:
        target = _row_offset(types, rows, call, row)
        total = function.spread(function.total(load_panel(function, state.totals, row * PANEL_BYTES)))
        if types.has_sinks:
            total = _with_sink(types, function, call, rows, state, row, total)
        with function.loop(head_dim, step=LANES) as dim:
            average = load_panel(function, state.output, (row * head_dim + dim) * 4) / total
            function.store_as(types.queries, average, call.out.data, target + dim * types.query_bytes)


def _with_sink(
    types: AttentionTypes, function: Function, call: Call, rows: Rows, state: State, row: Value, total: Value
) -> Value:
    """The sum of a row's exponentials with that of its sink.

    A sink far above all scores makes it infinite, and the result zero.
    """
    largest = load_panel(function, state.largest, row * PANEL_BYTES)
    if types.leaves_scale:
        largest = largest * function.spread(load_number(function, call.scale.data, 0))
    _, head = _token_and_head(rows, row)
    difference = function.spread(load_number(function, call.sinks.data, head * 4)) - largest
    is_above = function.like(difference, 0.0) < difference
    decay = function.exp(function.chosen(is_above, function.zeros() - difference, difference))
    return total + function.chosen(is_above, function.like(decay, 1.0) / decay, decay)


def _shapes() -> tuple[tuple[int, int], ...]:
    return LONG_TILES if library.has_long_registers() else SHORT_TILES
