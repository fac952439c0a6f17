"""The inputs of a forward pass, and the dimension key of all signatures on the device side.

    B  rows that bring one token         N  query heads          P  pages of the KV pool
    T  new tokens of all rows, packed    K  key-value heads      S  context (key) positions
    D  model width                       H  head dimension       C  pages in one row of the page table
    F  feed-forward width                L  layers               R  rows of the page table, or rows that need logits
    V  vocabulary                        E  experts              Q  query tiles
    I  rows of encoded images            M  patches of a tile
    G  page groups; GR, GT: rows or tokens of each group, one group after another

New tokens are packed: a decode step has one per request, an extend step the concatenation of its requests' chunks.
"""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.inputs import AttentionInputs, Pieces, PieceTiles

LayerArrays = tuple[Float[Array, "_ _ _ ..."], ...]
"""What one layer keeps: its part of the KV pool, or the states of all slots."""


class WindowInputs(NamedTuple):
    """What differs for the layers of a page group after the first one (see `ModelSpec.page_groups`).

    The rows of each group follow those of the group before it in the page table.

    Attributes:
        slots: As `ForwardInputs.slots`, in the pages of this group.
        single_rows: As `AttentionInputs.single_rows`, among the rows of this group; likewise `tile_rows`.
        tile_rows: See `single_rows`.
    """

    slots: Int[Array, " T"]
    single_rows: Int[Array, " B"]
    tile_rows: Int[Array, " Q"]


class ForwardInputs(NamedTuple):
    """One step of the model.

    Attributes:
        token_ids: The new tokens, packed; 0 for padding. Ids from the vocabulary's size on are rows of `vision`.
        positions: Position of each token in its sequence; 0 for padding.
        slots: KV slot (page * page_size + offset) that each token is written to; 0, the dump, for padding.
        attention: Which tokens each token sees.
        vision: Embeddings of image tokens; None in a step without them.
        windows: For each page group but the first; empty if all layers have the same pages.
        pieces: Which tokens belong to which states; None for a model without states.
        piece_tiles: How they are cut for layers that compute many tokens at a time; None if each token is computed by
            itself, as in decode steps and in deterministic mode.
    """

    token_ids: Int[Array, " T"]
    positions: Int[Array, " T"]
    slots: Int[Array, " T"]
    attention: AttentionInputs
    vision: Float[Array, "I D"] | None = None
    windows: tuple[WindowInputs, ...] = ()
    pieces: Pieces | None = None
    piece_tiles: PieceTiles | None = None

    def of_groups(self) -> list["ForwardInputs"]:
        """The inputs of the layers of each page group."""
        first, attention = self._replace(windows=()), self.attention
        return [
            first,
            *(
                first._replace(
                    slots=group.slots,
                    attention=attention._replace(single_rows=group.single_rows, tile_rows=group.tile_rows, groups=None),
                )
                for group in self.windows
            ),
        ]
