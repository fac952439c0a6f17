"""The radix tree as plain data, for people who look at a running engine. It has sizes and counts, and no tokens."""

from collections import deque
from collections.abc import Iterable
from typing import Any

from jsg.cache.node import Node, Root
from jsg.errors import RequestError
from jsg.types import namespace_digest

MAX_DEPTH = 64
"""The most levels of nodes, so that every JSON parser reads the nested result."""
MAX_NODES = 10_000
"""The most nodes, since the step loop stands still meanwhile."""


def dump_namespaces(roots: Iterable[Root], max_depth: int, max_nodes: int) -> list[dict[str, Any]]:
    """Each namespace with the nodes below it. They are taken breadth first, so that limits cut off leaves.

    Args:
        roots: The namespaces.
        max_depth: The most levels of nodes below a namespace.
        max_nodes: The most namespaces and nodes together.

    Raises:
        RequestError: A limit is out of range.
    """
    for param, value, largest in (("max_depth", max_depth, MAX_DEPTH), ("max_nodes", max_nodes, MAX_NODES)):
        if not 1 <= value <= largest:
            raise RequestError(f"{param} must be in [1, {largest}], but got {value}", param=param)
    namespaces: list[dict[str, Any]] = []
    pending: deque[tuple[Node, list[dict[str, Any]], int]] = deque((root, namespaces, 0) for root in roots)
    num_nodes = 0
    while pending and num_nodes < max_nodes:
        node, siblings, depth = pending.popleft()
        record = _record(node)
        siblings.append(record)
        num_nodes += 1
        if depth < max_depth:
            pending.extend((child, record["children"], depth + 1) for child in node.children.values())
    return namespaces


def _record(node: Node) -> dict[str, Any]:
    shown: dict[str, Any] = (
        {"namespace": namespace_digest(node.namespace)}
        if isinstance(node, Root)
        else {"num_tokens": node.num_tokens, "num_locks": node.num_locks, "last_used": node.last_used}
    )
    return shown | {"num_children": len(node.children), "children": []}
