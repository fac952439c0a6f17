"""Where in the tree each group of watches ends, and what each change of the tree does to it.

A place may be inside of an edge, so watches split no edges, however many of them end on one path.
"""

import itertools
from collections.abc import Iterator
from typing import final

import numpy as np

from jsg.cache.node import INT_BYTES, Node
from jsg.cache.watch import Edge, Place, Watch, WatchGroup


@final
class WatchIndex:
    """The edges on which watches end, by node. At the end of a root there may be a place too.

    All dicts keep their order, so equal histories give equal groups.

    Invariant: no edge is without places, no place without groups, and no group without watches.

    Attributes:
        num_moved: How often a group has got another place so far.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._edges: dict[Node, Edge] = {}
        self._changed: dict[WatchGroup, None] = {}
        self.num_moved = 0

    def add(self, watch: Watch, node: Node, matched: int, end: int) -> None:
        """Adds a new watch, `matched` tokens of which match, on the edge of `node`, whose path has `end` tokens."""
        place = self._edge(node, end).at(matched)
        page = watch.tokens[matched : matched + self._page_size].tobytes()
        if (group := place.groups.get(page)) is None:
            place.groups[page] = WatchGroup(place, [watch])
        else:
            group.add(watch, self._page_size)

    def end(self, watch: Watch) -> None:
        """Ends a watch."""
        group = watch.group
        assert group is not None, "a watch must be ended once, by the cache that made it"
        page = group.next_page(self._page_size)
        group.end(watch)
        if not group.size:
            self._changed.pop(group, None)
            self._take(group.place, page)

    def added(self, leaf: Node, start: int) -> None:
        """Moves the watches that waited for the first page of a new leaf as far along its edge as they match.

        Args:
            leaf: The leaf.
            start: How many tokens the path has before its edge.
        """
        assert leaf.parent is not None, "a leaf has a parent"
        above = self._edges.get(leaf.parent)
        if above is None or above.places[-1].matched != start:
            return
        group = self._take(above.places[-1], leaf.tokens[: self._page_size * INT_BYTES])
        if group is None:
            return
        edge = Edge(leaf, start, [])
        self._edges[leaf] = edge
        parts = group.divide(np.frombuffer(leaf.tokens, np.int32), self._page_size)
        place = edge.at(parts[0][0])
        for matched, part in parts:
            if matched != place.matched:
                place = edge.at(matched)
            part.place = place
            place.groups[part.next_page(self._page_size)] = part
        self._changed.update(dict.fromkeys([group, *(part for _, part in parts)]))  # it may have no watches now
        self.num_moved += len(parts)

    def removed(self, leaf: Node, parent: Node) -> None:
        """Moves the watches on the edge of a leaf that is evicted to its beginning, as one group."""
        edge = self._edges.pop(leaf, None)
        if edge is None:
            return
        group = self._join(edge)
        group.place = self._edge(parent, edge.start).at(edge.start)
        group.place.groups[leaf.tokens[: self._page_size * INT_BYTES]] = group
        self._changed[group] = None

    def split(self, upper: Node, lower: Node) -> None:
        """Gives the places in the upper part of the edge of `lower` to the node there, which is new."""
        edge = self._edges.get(lower)
        if edge is None:
            return
        cut = edge.start + upper.num_tokens
        index = edge.find(cut + 1)
        head, tail = edge.places[:index], edge.places[index:]
        if head and len(head) < len(tail):
            _part(Edge(upper, edge.start, head), self._edges)
            edge.places, edge.start = tail, cut
        elif head:
            del self._edges[lower]
            if tail:
                _part(Edge(lower, cut, tail), self._edges)
            edge.node, edge.places = upper, head
            self._edges[upper] = edge
        else:
            edge.start = cut

    def num_kept(self, leaf: Node, num_tokens: int) -> int:
        """How many leading tokens of a leaf's edge some watch matches and are not needed, if `num_tokens` must go."""
        edge = self._edges.get(leaf)
        if edge is None:
            return 0
        index = edge.find(edge.start + leaf.num_tokens - num_tokens + 1)
        return edge.places[index - 1].matched - edge.start if index else 0

    def places(self) -> Iterator[Place]:
        """The places where watches end, after at least one page."""
        return (place for edge in self._edges.values() for place in edge.places if place.matched)

    def change_all(self) -> None:
        """Counts all groups as changed."""
        self._changed.update(dict.fromkeys(group for place in self.places() for group in place.groups.values()))

    def drain_changed(self) -> list[WatchGroup]:
        """The groups that are new, may match more or less, or have no watches any more, since the last call."""
        changed = [*self._changed]
        self._changed.clear()
        return changed

    def __contains__(self, node: Node) -> bool:
        """Whether any watch ends on the edge of `node`."""
        return node in self._edges

    def __iter__(self) -> Iterator[Watch]:
        places = (place for edge in self._edges.values() for place in edge.places)
        return (watch for place in places for group in place.groups.values() for watch in group)

    def _edge(self, node: Node, end: int) -> Edge:
        """The edge of a node, whose path has `end` tokens; a new one if no watch ends there."""
        if (edge := self._edges.get(node)) is None:
            self._edges[node] = edge = Edge(node, end - node.num_tokens, [])
        return edge

    def _take(self, place: Place, page: bytes) -> WatchGroup | None:
        """Takes a group out, and forgets places and edges without groups."""
        group = place.groups.pop(page, None)
        if not place.groups:
            edge = place.edge
            del edge.places[edge.find(place.matched)]
            if not edge.places:
                del self._edges[edge.node]
        return group

    def _join(self, edge: Edge) -> WatchGroup:
        """Joins all groups on an edge. Their order is known: each has left the edge at its place."""
        tokens, width = edge.node.tokens, self._page_size * INT_BYTES
        before: list[WatchGroup] = []
        behind: list[list[WatchGroup]] = []
        for place in edge.places:
            at = (place.matched - edge.start) * INT_BYTES
            along, pages = tokens[at : at + width], sorted(place.groups)
            before += [place.groups[page] for page in pages if page < along or not along]
            behind.append([place.groups[page] for page in pages if page > along > b""])
        parts = [*before, *itertools.chain.from_iterable(reversed(behind))]
        index = max(range(len(parts)), key=lambda part: len(parts[part].watches))
        parts[index].absorb(parts[:index], parts[index + 1 :])
        self._changed.update(dict.fromkeys(parts))
        self.num_moved += len(parts)
        return parts[index]


def _part(edge: Edge, edges: dict[Node, Edge]) -> None:
    """Keeps an edge that was part of another one."""
    for place in edge.places:
        place.edge = edge
    edges[edge.node] = edge
