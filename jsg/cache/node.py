"""The nodes of the radix tree: compressed edges of tokens, and the pages with their keys and values.

An edge has its tokens and pages as `bytes` of int32. They are copies, so that they keep no prompt alive. They cost 33
bytes beside the data, where an array costs more than a hundred. One call of `startswith` follows an edge.
"""

from collections.abc import Iterator

import numpy as np

INT_BYTES = np.dtype(np.int32).itemsize


class Node:
    """One edge and the point at its end. An edge has whole pages, at least one.

    Invariants: `last_used` is never larger than that of the parent. Nor are `num_locks` and `num_yielding`, but a root
    counts no locks.

    Attributes:
        parent: The node above; None for a root, and for a node that was evicted.
        tokens: The token ids of the edge.
        pages: The page numbers of the edge, one for every `page_size` tokens.
        children: The nodes below, by the first page of tokens on their edge.
        num_locks: Locks here or below. While there are any the pages stay.
        num_yielding: How many of them yield, because they are of holds (see `RadixCache.lock`).
        last_used: The count of matches and inserts when one of them last ended here or below.
        serial: A number that grows with each node that is made.
        is_queued: Whether the eviction queue has an entry for the node.
    """

    __slots__ = (
        "children",
        "is_queued",
        "last_used",
        "num_locks",
        "num_yielding",
        "pages",
        "parent",
        "serial",
        "tokens",
    )

    def __init__(self, parent: "Node | None", tokens: bytes, pages: bytes, *, serial: int, last_used: int):
        self.parent = parent
        self.tokens = tokens
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.num_locks = 0
        self.num_yielding = 0
        self.last_used = last_used
        self.serial = serial
        self.is_queued = False

    @property
    def num_tokens(self) -> int:
        """Tokens of the edge."""
        return len(self.tokens) // INT_BYTES

    @property
    def num_pages(self) -> int:
        """Pages of the edge."""
        return len(self.pages) // INT_BYTES

    @property
    def is_evictable_leaf(self) -> bool:
        """Whether it may be evicted: nobody has locked it, and no longer prefix needs it."""
        return not self.children and self.num_locks == 0 and self.parent is not None

    def split(self, num_pages: int, page_size: int, serial: int) -> "Node":
        """Splits the edge after `num_pages` pages and returns the new node there.

            parent ──tokens──▶ self        parent ──head──▶ upper ──tail──▶ self

        The lower half stays `self`. So this node still stands for the whole old path, and locks, matches and watches
        need no change.
        """
        parent = self.parent
        assert parent is not None and 0 < num_pages < self.num_pages, f"cannot split {self.num_pages} at {num_pages}"
        page_bytes = page_size * INT_BYTES
        cut = num_pages * page_bytes
        upper = Node(
            parent,
            self.tokens[:cut],
            self.pages[: num_pages * INT_BYTES],
            serial=serial,
            last_used=self.last_used,
        )
        upper.num_locks, upper.num_yielding = self.num_locks, self.num_yielding
        parent.children[self.tokens[:page_bytes]] = upper
        self.parent = upper
        self.tokens = self.tokens[cut:]
        self.pages = self.pages[num_pages * INT_BYTES :]
        upper.children[self.tokens[:page_bytes]] = self
        return upper


class Root(Node):
    """The beginning of all prefixes of one namespace. It has no pages, so it is never locked and never evicted."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: str):
        super().__init__(None, b"", b"", serial=0, last_used=0)
        self.namespace = namespace


def path_up(node: Node) -> Iterator[Node]:
    """`node` and the nodes above it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent


def common_len(edge: bytes, key: bytes, start: int) -> int:
    """How many leading int32 of `edge` are equal to those of `key` from byte `start` on."""
    count = min(len(edge), len(key) - start) // INT_BYTES
    differs = np.frombuffer(edge, np.int32, count) != np.frombuffer(key, np.int32, count, start)
    return int(differs.argmax()) if differs.any() else count
