"""A copy of an engine's radix tree, and its changes as steps that a reader can show one after another."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, final

Change = tuple[str | int, ...]
"""One of ("split", upper, lower, tokens of upper), ("insert", id, parent, tokens), ("evict", id), ("hit", id, hits),
("hold", id, holders) and ("use", id, whether it can be used). A parent that is a namespace is 0."""


class TreeNode(NamedTuple):
    """A node: see `TreeLog.look`. At the top `parent` is 0 and `namespace` is known."""

    id: int
    parent: int
    length: int
    holders: int
    used_at: float
    hits: int
    tokens: bytes
    namespace: str | None
    is_usable: bool = True


@final
class TreeCopy:
    """What the engine has told.

    Attributes:
        cursor: The number of the engine's last look.
        version: The number of the last change.
        is_whole: Whether it equals the tree. Before that it is of no use.
        nodes: By id. Records are never changed, so a shallow copy stays as it is.
        pool: The pages of the pool, in tokens.
    """

    def __init__(self) -> None:
        self.cursor = 0
        self.version = 0
        self.is_whole = False
        self.nodes: dict[int, TreeNode] = {}
        self.pool: dict[str, Any] = {}

    def take(self, news: Mapping[str, Any]) -> list[Change] | None:
        """Takes the news of a look and gives the changes; None if the copy was not whole before, or was begun anew."""
        was_whole, self.is_whole = self.is_whole and not news["is_new"], news["is_whole"]
        if news["is_new"]:
            self.nodes.clear()
        told = {node.id: node for node in map(_node, news["nodes"])}
        changes = changes_between(self.nodes, told, news["removed"]) if was_whole else None
        self.nodes |= told
        for gone in news["removed"]:
            self.nodes.pop(gone, None)
        is_changed = changes is None or changes or news["pool"] != self.pool
        self.cursor, self.pool = news["cursor"], news["pool"]
        self.version += bool(is_changed)
        return changes


def _node(row: Sequence[Any]) -> TreeNode:
    number, above, length, holders, used_at, hits, tokens, is_usable = row
    parent, namespace = (0, above) if isinstance(above, str) else (above, None)
    return TreeNode(number, parent, length, holders, used_at, hits, tokens, namespace, is_usable)


def changes_between(
    before: Mapping[int, TreeNode], told: Mapping[int, TreeNode], removed: Iterable[int]
) -> list[Change]:
    """The steps from one state of a tree to the next one, in which the nodes of `told` are new or other than before.

    An upper half begins with the hits and holders of the lower half, and any other new node without. It can be used as
    the lower half can, and any other new node can.
    """
    changes: list[Change] = []
    begin: dict[int, tuple[int, int, bool]] = {}  # hits, holders and use that the reader knows of
    for node in told.values():
        old = before.get(node.id)
        if old is None:
            continue
        begin[node.id] = old.hits, old.holders, old.is_usable
        if node.parent != old.parent:  # only a split moves a node, and all that is between is new then
            for upper in reversed(_new_above(node, before, told)):
                changes.append(("split", upper.id, node.id, upper.length))
                begin[upper.id] = old.hits, old.holders, old.is_usable
    for node in told.values():
        if node.id not in begin:
            for new in reversed([node, *_new_above(node, before, told)]):
                if new.id not in begin:
                    changes.append(("insert", new.id, new.parent, new.length))
                    begin[new.id] = 0, 0, True
    changes += [("evict", gone) for gone in removed if gone in before]
    for node in told.values():
        hits, holders, is_usable = begin[node.id]
        if node.hits > hits:
            changes.append(("hit", node.id, node.hits))
        if node.holders != holders:
            changes.append(("hold", node.id, node.holders))
        if node.is_usable != is_usable:
            changes.append(("use", node.id, int(node.is_usable)))
    return changes


def _new_above(node: TreeNode, before: Mapping[int, TreeNode], told: Mapping[int, TreeNode]) -> list[TreeNode]:
    """The new nodes right above a node, from the lowest one up."""
    path: list[TreeNode] = []
    while (above := told.get(node.parent)) is not None and above.id not in before:
        path.append(above)
        node = above
    return path
