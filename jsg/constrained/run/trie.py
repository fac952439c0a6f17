"""The tokens of a vocabulary as a prefix tree in flat arrays, in the order in which a walk visits them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_TOKEN_BYTES = 65_535
"""The most bytes of a token, because a node's depth has 16 bits."""


class Trie(NamedTuple):
    """The nodes of a trie in preorder. Node 0 is the root.

    Attributes:
        byte: uint8[N], the byte that leads to each node; it has no meaning for the root.
        depth: uint16[N], the number of bytes from the root to each node.
        skip: int32[N], the first node after each node's subtree.
        token_start: int32[N + 1], where each node's tokens begin in `tokens`.
        tokens: int32[...], for each node the ids of the tokens that end there, ascending.
        first: int32[c], the children of the root.
        first_byte: uint8[c], the bytes that lead to these children. They are stored together, so that a walk which
            enters few of the children reads little memory.
    """

    byte: NDArray[np.uint8]
    depth: NDArray[np.uint16]
    skip: NDArray[np.int32]
    token_start: NDArray[np.int32]
    tokens: NDArray[np.int32]
    first: NDArray[np.int32]
    first_byte: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        """Memory that the arrays take."""
        return sum(array.nbytes for array in self)


class SortedTokens(NamedTuple):
    """Tokens in the order of their bytes, from which the trie of all or some of them is made.

    Attributes:
        ids: int32[n]; tokens with equal bytes are sorted by id.
        data: uint8[...], the bytes of all tokens, one after another.
        start: int64[n + 1], where each token begins in `data`.
        shared: int64[n], the length of the prefix that each token shares with the token before it; 0 for the first.
    """

    ids: NDArray[np.int32]
    data: NDArray[np.uint8]
    start: NDArray[np.int64]
    shared: NDArray[np.int64]

    def subset(self, is_kept: NDArray[np.bool_]) -> "SortedTokens":
        """The tokens for which `is_kept`, bool[n], is true."""
        kept = np.flatnonzero(is_kept)
        if not len(kept):
            return sort_tokens((), ())
        lengths = np.diff(self.start)[kept]
        start = _offsets(lengths)
        # The prefix that two tokens share is the shortest that any two neighbours between them share.
        segments = np.concatenate(([0], kept[:-1] + 1))
        shared = np.minimum.reduceat(self.shared[: kept[-1] + 1], segments)
        shared[0] = 0
        data = self.data[np.repeat(self.start[kept] - start[:-1], lengths) + np.arange(start[-1])]
        return SortedTokens(self.ids[kept], data, start, shared)


def sort_tokens(ids: Sequence[int], tokens: Sequence[bytes]) -> SortedTokens:
    """The tokens in the order of their bytes. `ids` ascend, and `tokens` are the bytes of each id."""
    order = sorted(range(len(ids)), key=tokens.__getitem__)
    in_order = [tokens[i] for i in order]
    lengths = np.fromiter(map(len, in_order), np.int64, len(order))
    data = np.frombuffer(b"".join(in_order), np.uint8)
    start = _offsets(lengths)
    sorted_ids = np.array(ids, np.int32)[np.array(order, np.int64)]
    return SortedTokens(sorted_ids, data, start, _shared_with_previous(data, start, lengths))


def make_trie(tokens: SortedTokens) -> Trie:
    """The trie of the tokens, none of which is empty."""
    # A token adds nodes for the bytes that it does not share with the token before it. A prefix of a token comes before
    # it, and equal tokens are neighbours, so each token ends at the last node made so far.
    lengths = np.diff(tokens.start)
    added = lengths - tokens.shared
    num_nodes = 1 + int(added.sum())
    first_node = 1 + _offsets(added)[:-1]
    owner = np.repeat(np.arange(len(added)), added)
    place = np.arange(num_nodes - 1) - np.repeat(first_node - 1, added) + tokens.shared[owner]
    byte = np.zeros(num_nodes, np.uint8)
    byte[1:] = tokens.data[tokens.start[owner] + place]
    depth = np.zeros(num_nodes, np.uint16)
    depth[1:] = place + 1
    last_node = np.cumsum(added)
    token_start = np.zeros(num_nodes + 1, np.int32)
    np.cumsum(np.bincount(last_node, minlength=num_nodes), out=token_start[1:])
    first = np.flatnonzero(depth == 1).astype(np.int32)
    trie = Trie(byte, depth, _ends_of_subtrees(depth), token_start, tokens.ids.copy(), first, byte[first])
    for array in trie:
        array.flags.writeable = False
    return trie


def _offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The offsets at which pieces of these lengths begin in a row, and the end of the last one."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))


def _shared_with_previous(
    data: NDArray[np.uint8], start: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The length of the prefix that each token shares with the token before it."""
    shared = np.zeros(len(lengths), np.int64)
    most = np.minimum(lengths[1:], lengths[:-1])
    rows = np.flatnonzero(most > 0) + 1
    for depth in range(int(most.max(initial=0))):
        rows = rows[data[start[rows] + depth] == data[start[rows - 1] + depth]]
        shared[rows] = depth + 1
        rows = rows[most[rows - 1] > depth + 1]
        if not len(rows):
            break
    return shared


def _ends_of_subtrees(depth: NDArray[np.uint16]) -> NDArray[np.int32]:
    """The first node after the subtree of each node of a preorder."""
    num_nodes = len(depth)
    by_depth = np.argsort(depth, kind="stable")
    level_start = _offsets(np.bincount(depth))
    levels = [by_depth[level_start[d] : level_start[d + 1]] for d in range(len(level_start) - 1)]
    sizes = np.ones(num_nodes, np.int64)
    for parents, nodes in zip(reversed(levels[:-1]), reversed(levels[1:]), strict=True):
        # The parent of a node is the last node of the level above that comes before it.
        np.add.at(sizes, parents[np.searchsorted(parents, nodes) - 1], sizes[nodes])
    return (np.arange(num_nodes) + sizes).astype(np.int32)
