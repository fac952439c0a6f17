"""What has changed in a radix tree since the last look, for somebody who keeps a copy of it.

Which nodes changed is recorded, and not how: a look reports a node once, as it then is, however often it changed. The
nodes that were there before come by a walk, some at each look, so no look takes long. Nodes that are reported twice, or
that change after the walk, do no harm, because the copy takes the last report. When the walk has ended, each look makes
the copy equal to the tree.
"""

import collections
from typing import Any, final

from jsg.cache.node import INT_BYTES, Node, Root, path_up
from jsg.cache.observer import TreeObserver
from jsg.cache.radix import RadixCache

MAX_CHANGES = 2000
"""The most changes between two looks. With more the log ends, and the next look begins anew."""
WALK_NODES = 1000
"""The most nodes of the walk in one look: some milliseconds."""
SHOWN_TOKENS = 64
"""The first tokens of an edge, which are reported on demand."""
STOP = -1
"""The cursor of who will not look again."""


@final
class TreeLog(TreeObserver):
    """Observes a tree while somebody looks. One copy is kept; its keeper has a cursor, the number of its looks.

    Invariant: while the log is on, each node of the tree is reported, or in `_changed`, or not above or in `_walk`.
    """

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache
        self._is_on = False
        self._cursor = 0
        self._with_tokens = False
        self._changed: dict[int, Node] = {}
        self._removed: list[int] = []
        self._hits: collections.Counter[int] = collections.Counter()
        self._walk: list[Node] = []

    def look(self, cursor: int, *, with_tokens: bool) -> dict[str, Any]:
        """The news since the look that gave this cursor; `is_new` if a new copy must be begun with them.

        `nodes` has (id, id of the parent or namespace, tokens, holders, time of the last use, hits, first tokens,
        whether a prompt that goes on at its end can use all before), and `is_whole` says that the walk has ended. Hits
        are counted from the first look on.
        """
        if cursor == STOP:
            self._stop()
            return {}
        is_new = not self._is_on or cursor != self._cursor or with_tokens > self._with_tokens
        if is_new:
            self._begin(with_tokens=with_tokens)
        rows = [self._row(node) for node in self._changed.values()]
        removed, self._removed = self._removed, []
        self._changed.clear()
        end = len(rows) + WALK_NODES
        while self._walk and len(rows) < end:
            node = self._walk.pop()
            if node.parent is not None:
                rows.append(self._row(node))
            elif not isinstance(node, Root):  # it was evicted before its turn came
                continue
            self._walk.extend(node.children.values())
        self._cursor += 1
        is_whole = not self._walk
        return {"cursor": self._cursor, "is_new": is_new, "is_whole": is_whole, "nodes": rows, "removed": removed}

    def _begin(self, *, with_tokens: bool) -> None:
        self._stop()
        self._is_on, self._with_tokens = True, with_tokens
        self._walk = self._cache.roots
        self._cache.observe(self)

    def _stop(self) -> None:
        if self._is_on:
            self._cache.unobserve(self)
        self._is_on = False
        self._changed.clear()
        self._removed.clear()
        self._hits.clear()
        self._walk = []

    def _row(self, node: Node) -> tuple[int, int | str, int, int, float, int, bytes, bool]:
        above = node.parent
        assert above is not None
        place = above.namespace if isinstance(above, Root) else above.serial
        used_at, hits = self._cache.used_at(node), self._hits.get(node.serial, 0)
        tokens = node.tokens[: SHOWN_TOKENS * INT_BYTES] if self._with_tokens else b""
        is_usable = self._cache.is_usable(node)
        return node.serial, place, node.num_tokens, node.num_locks, used_at, hits, tokens, is_usable

    def _check(self) -> None:
        if len(self._changed) + len(self._removed) > MAX_CHANGES:
            self._stop()

    # The observer.

    def added(self, leaf: Node) -> None:
        """Notes a new node."""
        self._changed[leaf.serial] = leaf
        self._check()

    def split(self, upper: Node, lower: Node) -> None:
        """Notes both halves. The upper one has had the hits of the lower one."""
        self._changed[upper.serial], self._changed[lower.serial] = upper, lower
        if (hits := self._hits.get(lower.serial)) is not None:
            self._hits[upper.serial] = hits
        self._check()

    def removed(self, leaf: Node) -> None:
        """Notes that a node is gone."""
        self._changed.pop(leaf.serial, None)
        self._hits.pop(leaf.serial, None)
        self._removed.append(leaf.serial)
        self._check()

    def cleared(self) -> None:
        """Does nothing, because `removed` comes for each node."""

    def hit(self, node: Node) -> None:
        """Counts a hit of the whole path."""
        for above in path_up(node):
            self._hits[above.serial] += 1
            self._changed[above.serial] = above
        self._check()

    def changed(self, node: Node) -> None:
        """Notes the path, whose holders may have changed, or whose end can be used now or no longer."""
        for above in path_up(node):
            self._changed[above.serial] = above
        self._check()
