"""What paged attention needs to know besides queries, keys and values. Letters: `jsg/models/inputs.py`."""

from typing import NamedTuple

from jaxtyping import Array, Int


class AttentionInputs(NamedTuple):
    """Where each packed query token stands in its own request.

    New tokens are packed. Rows that bring one token may stand first, one packed token each (`single_*`); every other
    token belongs to a query tile. Nothing has a context dimension: attention loops over real lengths.

    Attributes:
        page_table: Request row → its pages, in order of position. Entries past a row's length are 0 or stale.
        single_rows: Request row of packed token b, for the leading tokens that are alone in their row.
        single_kv_lens: Keys that packed token b sees, itself included; 0 where b is not such a token.
        tile_rows: Request row of each query tile: at most `QUERY_TILE` consecutive packed tokens of one request.
        tile_starts: Index of the tile's first token among the packed tokens.
        tile_lens: Tokens in the tile.
        tile_positions: Position of the tile's first token in its sequence; its token i sees keys 0..position+i.
        num_tiles: How many tiles are real; they come first.
    """

    page_table: Int[Array, "R C"]
    single_rows: Int[Array, " B"]
    single_kv_lens: Int[Array, " B"]
    tile_rows: Int[Array, " Q"]
    tile_starts: Int[Array, " Q"]
    tile_lens: Int[Array, " Q"]
    tile_positions: Int[Array, " Q"]
    num_tiles: Int[Array, ""]
