"""The tokens of several choices as a trie."""

from collections.abc import Sequence
from typing import final


@final
class TokenTrie:
    """Token sequences that begin at one point. Node 0 is that point; every edge is a token.

    Attributes:
        children: For each node its edges: token id → node.
        ends: For each sequence the node at which it ends.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]) -> None:
        self.children: list[dict[int, int]] = [{}]
        self._parents: list[tuple[int, int]] = [(0, 0)]
        self.ends = [self._insert(sequence) for sequence in sequences]

    @property
    def inner_nodes(self) -> list[int]:
        """Nodes from which something goes on."""
        return [node for node, edges in enumerate(self.children) if edges]

    @property
    def leaves(self) -> list[int]:
        """Nodes from which nothing goes on."""
        return [node for node, edges in enumerate(self.children) if not edges]

    def depths(self) -> list[int]:
        """For each node the number of tokens that lead to it."""
        depths = [0] * len(self.children)
        for node in range(1, len(depths)):  # behind its parent
            depths[node] = depths[self._parents[node][0]] + 1
        return depths

    def path(self, node: int) -> list[int]:
        """The nodes on the way from node 0, which is left out, to this one."""
        nodes: list[int] = []
        while node:
            nodes.append(node)
            node = self._parents[node][0]
        return nodes[::-1]

    def token(self, node: int) -> int:
        """The token of the edge that leads to a node."""
        return self._parents[node][1]

    def _insert(self, sequence: Sequence[int]) -> int:
        node = 0
        for token in sequence:
            if token not in self.children[node]:
                self.children[node][token] = len(self.children)
                self.children.append({})
                self._parents.append((node, token))
            node = self.children[node][token]
        return node
