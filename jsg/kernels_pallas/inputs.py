"""What paged attention needs to know besides queries, keys and values. Letters: `jsg/models/inputs.py`."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

LayerCache = tuple[Float[Array, "P page_size heads H"], ...]
"""One layer of the KV pool: keys and values, `[P, page_size, K, H]` each; on a TPU one array `[P, page_size, 2·K, H]`
in which the key and the value of each head stand side by side. Only the ops look inside."""


class PrefixGroups(NamedTuple):
    """Singles whose first tokens are in the very same pages, cut into group tiles of at most `GROUP_TILE` members.

    A hint: whoever heeds it reads a shared prefix once per tile instead of once per member.

    Attributes:
        shared_lens: How many of its keys, from the first on, the group tile of packed token b covers; 0 where b is in
            none.
        rows: A request row whose pages hold the shared prefix of the tile.
        lens: Tokens of the shared prefix; 0 where there is no such tile. A multiple of the page size.
        members: The packed tokens of the tile; -1 for none. Real ones come first.
    """

    shared_lens: Int[Array, " B"]
    rows: Int[Array, " U"]
    lens: Int[Array, " U"]
    members: Int[Array, "U members"]


class AttentionInputs(NamedTuple):
    """Where each packed query token stands in its own request.

    New tokens are packed. Rows that bring one token may stand first, one packed token each (`single_*`); every other
    token belongs to a query tile. Nothing has a context dimension: attention loops over real lengths.

    Attributes:
        page_table: Request row → its pages, in order of position. Entries past a row's length are 0 or stale.
        single_rows: Request row of packed token b, for the leading tokens that are alone in their row.
        single_kv_lens: Keys that packed token b sees, itself included; 0 where b is not such a token.
        tile_rows: Request row of each query tile: at most `QUERY_TILE` consecutive packed tokens of one request. Only
            the last tile of a row is shorter, and a row brings either a single or tiles: room is sized by that.
        tile_starts: Index of the tile's first token among the packed tokens.
        tile_lens: Tokens in the tile.
        tile_positions: Position of the tile's first token in its sequence; its token i sees keys 0..position+i.
        num_tiles: How many tiles are real; they come first.
        groups: Shared prefixes of singles; None where the step has no room for them.
        num_short_tiles: The first so many tiles have at most `SHORT_TILE` tokens each, and may be computed in another
            way than the others. A hint; 0 in deterministic mode.
    """

    page_table: Int[Array, "R C"]
    single_rows: Int[Array, " B"]
    single_kv_lens: Int[Array, " B"]
    tile_rows: Int[Array, " Q"]
    tile_starts: Int[Array, " Q"]
    tile_lens: Int[Array, " Q"]
    tile_positions: Int[Array, " Q"]
    num_tiles: Int[Array, ""]
    groups: PrefixGroups | None = None
    num_short_tiles: Int[Array, ""] | int = 0


class Scoring(NamedTuple):
    """How queries and keys become scores; the same for a whole call.

    Attributes:
        scale: Multiplies queries · keys; above zero.
        window: A token sees the last `window` positions, its own included; None for all.
        softcap: Scores become softcap * tanh(score / softcap); None for none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class HeadNorms(NamedTuple):
    """Weights of the RMS norms that some families put every head's query and key through before they are turned."""

    query: Float[Array, " H"]
    key: Float[Array, " H"]
    eps: float
