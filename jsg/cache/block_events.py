"""The radix tree as blocks of tokens: which blocks it gains and loses.

Routers in front of several servers know caches by blocks of a fixed number of tokens, each of which has a name that
follows from all tokens up to its end. A block is in the tree when the path to its end is; it belongs to the node in
which it ends. So a new leaf brings the blocks that end in it, and takes them away again when it is evicted.
"""

import dataclasses
import hashlib
import heapq
import math
from collections.abc import Callable, Sequence

from jsg.cache.node import INT_BYTES, Node, Root
from jsg.cache.observer import TreeObserver

HASH_BYTES = 8
LEAST_BLOCK_TOKENS = 16
"""Routers look at a limited number of blocks of a prompt, and blocks of one token would be too many."""


def block_tokens_of(page_size: int) -> int:
    """The tokens of a block: whole pages."""
    return math.lcm(LEAST_BLOCK_TOKENS, page_size)


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksStored:
    """Successive blocks that the tree has now.

    Attributes:
        hashes: Their names, each of 64 bits.
        parent: The name of the block before them; None at the beginning of a prompt.
        tokens: The key of the tree for them: token ids, or below 0 and beyond the vocabulary the words of tokens at
            other positions and of pictures.
        namespace: The namespace that they are in.
    """

    hashes: tuple[int, ...]
    parent: int | None
    tokens: bytes
    namespace: str


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that the tree no longer has."""

    hashes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BlocksCleared:
    """The tree has no blocks any more."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared


@dataclasses.dataclass(slots=True)
class _Ending:
    """The blocks that end in a node, where the node ends, and up to where its blocks are reported, in tokens."""

    hashes: tuple[int, ...]
    depth: int
    reach: int


class BlockRecorder(TreeObserver):
    """Turns the changes of a tree into events of blocks.

    Where a model has further kinds of state, a block is reported as long as a prompt can go on at its end or at some
    place after it. What comes after the last such place of a path is of no use to anybody.

    Invariant: `_endings` has an entry for each node of the tree but the roots and those that a clearing removes, by
    serial. No two nodes have a block in common, because children of a node differ in their first page, and so in the
    first block that ends in them.
    """

    def __init__(self, block_tokens: int, usable_at: Callable[[Node], int] | None = None) -> None:
        """Observes a tree that is empty and whose pages divide blocks of `block_tokens` tokens.

        Args:
            block_tokens: Tokens in a block.
            usable_at: See `RadixCache.usable_at`; None if all that is cached can be used.
        """
        self.block_tokens = block_tokens
        self._usable_at = usable_at
        self._block_bytes = block_tokens * INT_BYTES
        self._endings: dict[int, _Ending] = {}
        self._unsettled: dict[Node, None] = {}
        self._events: list[BlockEvent] = []

    def take(self) -> list[BlockEvent]:
        """The events since the last call, in order."""
        self._settle()
        events, self._events = self._events, []
        return events

    def added(self, leaf: Node) -> None:
        """Records the blocks that end in a new leaf."""
        assert leaf.parent is not None
        start = self._depth(leaf.parent)
        parent, namespace, tokens = self._blocks(leaf, start)
        ending = _Ending(self._chain(parent, namespace, tokens), start + leaf.num_tokens, start)
        self._endings[leaf.serial] = ending
        if self._usable_at is None:
            self._tell(leaf, ending.depth)
        else:
            self._unsettled[leaf] = None

    def split(self, upper: Node, lower: Node) -> None:
        """Gives the blocks that end in the upper part of an edge to the node there."""
        ending = self._endings[lower.serial]
        cut = ending.depth - lower.num_tokens
        kept = ending.depth // self.block_tokens - cut // self.block_tokens
        first = len(ending.hashes) - kept
        self._endings[upper.serial] = _Ending(ending.hashes[:first], cut, min(ending.reach, cut))
        self._endings[lower.serial] = _Ending(ending.hashes[first:], ending.depth, max(ending.reach, cut))
        self.changed(upper)

    def removed(self, leaf: Node) -> None:
        """Records that the blocks that end in a leaf are gone."""
        self._unsettled.pop(leaf, None)
        if (ending := self._endings.get(leaf.serial)) is not None:
            self._tell(leaf, ending.depth - leaf.num_tokens)
            del self._endings[leaf.serial]
            assert leaf.parent is not None
            self.changed(leaf.parent)

    def cleared(self) -> None:
        """Records that no block is left."""
        self._endings.clear()
        self._unsettled.clear()
        self._events.append(BlocksCleared())

    def changed(self, node: Node) -> None:
        """Notes that other blocks may be of use at a node."""
        if self._usable_at is not None and node.serial in self._endings:
            self._unsettled[node] = None

    def _settle(self) -> None:
        """Tells what is of use now and what is not, of the nodes where that may have changed, from their ends up."""
        reach: dict[Node, int] = {}
        nodes = [(-self._endings[node.serial].depth, node.serial, node) for node in self._unsettled]
        self._unsettled.clear()
        heapq.heapify(nodes)
        while nodes and self._usable_at is not None:
            node = heapq.heappop(nodes)[2]
            depth = self._endings[node.serial].depth
            below = (reach.get(child, self._endings[child.serial].reach) for child in node.children.values())
            start = depth - node.num_tokens
            reach[node] = depth if any(other > depth for other in below) else max(self._usable_at(node), start)
            above = node.parent
            if reach[node] != self._endings[node.serial].reach and above is not None and not isinstance(above, Root):
                heapq.heappush(nodes, (-self._depth(above), above.serial, above))
        by_depth = sorted(reach, key=self._depth)
        for node in reversed(by_depth):  # what comes last goes first
            self._tell(node, min(reach[node], self._endings[node.serial].reach))
        for node in by_depth:
            self._tell(node, reach[node])

    def _tell(self, node: Node, reach: int) -> None:
        """Tells the blocks of a node up to `reach` tokens from the beginning, and no more."""
        ending = self._endings[node.serial]
        start = ending.depth - node.num_tokens
        before, after = (tokens // self.block_tokens - start // self.block_tokens for tokens in (ending.reach, reach))
        ending.reach = reach
        if after < before:
            self._events.append(BlocksRemoved(ending.hashes[after:before]))
        elif after > before:
            parent, namespace, tokens = self._blocks(node, start)
            parent = ending.hashes[before - 1] if before else parent
            tokens = tokens[before * self._block_bytes : after * self._block_bytes]
            self._events.append(BlocksStored(ending.hashes[before:after], parent, tokens, namespace))

    def _blocks(self, node: Node, start: int) -> tuple[int | None, str, bytes]:
        """Of the blocks that end in a node: the name of the block before them, their namespace and their tokens."""
        assert node.parent is not None
        above, namespace = _above(node.parent)
        behind_block = start % self.block_tokens * INT_BYTES  # bytes of the path that begin a block without its end
        pending = _last_bytes(above, behind_block) + node.tokens
        return self._last_hash(above), namespace, pending[: len(pending) // self._block_bytes * self._block_bytes]

    def hit(self, node: Node) -> None:
        """Does nothing: the blocks stay as they are."""

    def _depth(self, node: Node) -> int:
        return 0 if isinstance(node, Root) else self._endings[node.serial].depth

    def _last_hash(self, path_up: Sequence[Node]) -> int | None:
        """The name of the last block that ends on a path, which is given from its end."""
        endings = (self._endings[node.serial].hashes for node in path_up)
        return next((hashes[-1] for hashes in endings if hashes), None)

    def _chain(self, parent: int | None, namespace: str, tokens: bytes) -> tuple[int, ...]:
        """The names of successive blocks. Each follows from the name before it; the first also from the namespace."""
        name = namespace.encode(errors="surrogatepass") if parent is None else parent.to_bytes(HASH_BYTES, "big")
        hashes: list[int] = []
        for start in range(0, len(tokens), self._block_bytes):
            digest = hashlib.blake2b(tokens[start : start + self._block_bytes], digest_size=HASH_BYTES)
            digest.update(name)  # after tokens of a fixed length, so no name runs into them
            name = digest.digest()
            hashes.append(int.from_bytes(name, "big"))
        return tuple(hashes)


def _above(node: Node) -> tuple[list[Node], str]:
    """The nodes from `node` up to below the root, and the namespace of the root."""
    path: list[Node] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    assert isinstance(node, Root)
    return path, node.namespace


def _last_bytes(path_up: Sequence[Node], count: int) -> bytes:
    """The last bytes of the tokens of a path, which is given from its end."""
    found = b""
    for node in path_up:
        if len(found) >= count:
            break
        found = node.tokens + found
    return found[len(found) - count :]
