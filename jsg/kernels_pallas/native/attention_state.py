"""What attention on a CPU works on: the buffers of a call, the rows of a pass, and their state. See `attention.py`."""

from typing import NamedTuple

from jsg.kernels_pallas.native.calls import Buffer
from jsg.kernels_pallas.native.emit import Function, Value
from jsg.kernels_pallas.native.tiles import ITEM_BYTES, PANEL_BYTES

KEY_BLOCK = 64
ROWS = 48
"""Rows whose scores are computed together, few enough for the first cache."""
PASS_ROWS = 4 * ROWS
"""Rows that pass over the keys together, so many that turning the keys costs little: a query tile of three heads."""
HEAD_DIMS = (256, 576)
"""The widths of heads that there is memory for, each in a kernel of its own: of attention, and of latent attention."""


class Call(NamedTuple):
    """The buffers of a call, in order."""

    queries: Buffer
    keys: Buffer
    values: Buffer
    page_table: Buffer
    single_rows: Buffer
    single_kv_lens: Buffer
    tile_rows: Buffer
    tile_starts: Buffer
    tile_lens: Buffer
    tile_positions: Buffer
    num_tiles: Buffer
    window: Buffer
    scale: Buffer
    sinks: Buffer
    out: Buffer


RANKS = (3, 4, 4, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 3)
"""The number of axes of each buffer of a `Call`."""


class AttentionTypes(NamedTuple):
    """The types of a call's numbers, and what multiplies them.

    Attributes:
        queries: Of the queries and of the result: "float32" or "bfloat16".
        pool: Of keys and values, likewise.
        unit: "amx" for the matrix unit, "pairs" for pairs of bfloat16 and "" for float32. For the first two both are
            "bfloat16", and so are the weights of values.
        has_sinks: Each query head has a sink: see `ops.paged_attention`.
        max_head_dim: One of `HEAD_DIMS`.
        softcap: See `Scoring`.
        is_aligned: Windows are: see `Window`.
    """

    queries: str
    pool: str
    unit: str
    has_sinks: bool = False
    max_head_dim: int = HEAD_DIMS[0]
    softcap: float | None = None
    is_aligned: bool = False

    @property
    def is_short(self) -> bool:
        """Whether bfloat16 are multiplied."""
        return bool(self.unit)

    @property
    def leaves_scale(self) -> bool:
        """Whether scores are scaled only when their exponentials are taken."""
        return self.is_short and self.softcap is None

    @property
    def query_bytes(self) -> int:
        """Bytes of a number of the queries."""
        return ITEM_BYTES[self.queries]

    @property
    def pool_bytes(self) -> int:
        """Bytes of a number of the pool."""
        return ITEM_BYTES[self.pool]


class Rows(NamedTuple):
    """The rows that pass over the keys together. Row r is query head r % group of token r // group.

    Attributes:
        table: The address of the request's page numbers.
        head: The key-value head.
        group: Query heads of a key-value head.
        token: The packed token of row 0.
        position: The position of that token in its request.
        first: The first of these rows.
        num_rows: How many there are.
    """

    table: Value
    head: Value
    group: Value
    token: Value
    position: Value
    first: Value
    num_rows: Value


class State(NamedTuple):
    """The addresses of what rows keep while they pass over the keys, and of the block of keys that they read.

    Attributes:
        queries: [PASS_ROWS, H], float32 and scaled; as they are where bfloat16 are multiplied.
        panels: The keys of the block: [KEY_BLOCK / LANES, H, LANES]; of bfloat16 [.., H / 2, LANES, 2].
        value_panels: Where bfloat16 are multiplied the values of the block: [H / LANES, KEY_BLOCK / 2, LANES, 2].
        offsets: Where each key and value of the block lies in its pool, in bytes: [KEY_BLOCK] of int64.
        scores: [ROWS, KEY_BLOCK].
        weights: Exponentials of scores: [ROWS, KEY_BLOCK].
        largest: The largest score of each row so far: [PASS_ROWS, LANES], the same in all lanes.
        shrink: What the block's largest score does to the sums so far: [ROWS, LANES], likewise.
        totals: Sums of exponentials, one in each lane: [PASS_ROWS, LANES].
        output: Sums of weighted values: [PASS_ROWS, H].
    """

    queries: Value
    panels: Value
    value_panels: Value
    offsets: Value
    scores: Value
    weights: Value
    largest: Value
    shrink: Value
    totals: Value
    output: Value

    def at(self, function: Function, types: AttentionTypes, call: Call, row: Value) -> "State":
        """The state of the rows from one on."""
        head_dim = call.queries.sizes[2]
        return self._replace(
            queries=function.address(self.queries, row * head_dim * (2 if types.is_short else 4)),
            largest=function.address(self.largest, row * PANEL_BYTES),
            totals=function.address(self.totals, row * PANEL_BYTES),
            output=function.address(self.output, row * head_dim * 4),
        )
