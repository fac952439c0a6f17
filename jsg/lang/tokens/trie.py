"""The tokens of several choices as a trie."""

from collections.abc import Sequence
from typing import final


@final
class TokenTrie:
    """Token sequences as a tree with node 0 as its root. Each edge is a token.

    Attributes:
        children: The edges of each node: the next node by token id.
        ends: The node at which each sequence ends.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.children: list[dict[int, int]] = [{}]
        self._parents: list[tuple[int, int]] = [(0, 0)]
        self.ends = [self._insert(sequence) for sequence in sequences]

    @property
    def inner_nodes(self) -> list[int]:
        """The nodes with edges."""
        return [node for node, edges in enumerate(self.children) if edges]

    @property
    def paths(self) -> list[list[int]]:
        """The trie cut into paths: each begins at an inner node, which no other path goes on from, and ends at a leaf.

        A path comes after the one on which its first node's parent lies.
        """
        tops = [0] + [node for edges in self.children for node in list(edges.values())[1:]]
        return [self._down(top) for top in sorted(tops) if self.children[top]]

    def depths(self) -> list[int]:
        """Gives for each node the number of tokens that lead to it."""
        depths = [0] * len(self.children)
        for node in range(1, len(depths)):  # a node comes after its parent
            depths[node] = depths[self._parents[node][0]] + 1
        return depths

    def path(self, node: int) -> list[int]:
        """Gives the nodes on the path to this one, without node 0."""
        nodes: list[int] = []
        while node:
            nodes.append(node)
            node = self._parents[node][0]
        return nodes[::-1]

    def token(self, node: int) -> int:
        """Gives the token of the edge to a node."""
        return self._parents[node][1]

    def _down(self, node: int) -> list[int]:
        """Gives the nodes from this one to a leaf, along the first edge of each."""
        nodes = [node]
        while edges := self.children[nodes[-1]]:
            nodes.append(next(iter(edges.values())))
        return nodes

    def _insert(self, sequence: Sequence[int]) -> int:
        node = 0
        for token in sequence:
            if token not in self.children[node]:
                self.children[node][token] = len(self.children)
                self.children.append({})
                self._parents.append((node, token))
            node = self.children[node][token]
        return node
