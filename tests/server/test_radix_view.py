"""Which nodes of a tree are shown, and how the others are counted."""

import dataclasses
import random

import pytest

from jsg.engine.front.tree_copy import TreeNode
from jsg.errors import NotFoundError
from jsg.server.native.radix_view import FOLDED, LOCKED, View

NOW = 1000.0
NAMESPACES = ("", "other")


def random_tree(seed: int, count: int) -> list[TreeNode]:
    """In no order; a node may be locked where its parent is."""
    draw = random.Random(seed)
    nodes: dict[int, TreeNode] = {}
    numbers = draw.sample(range(1, 10 * count), count)
    for number in numbers:
        parent = draw.choice([0, *nodes])
        holders = draw.randrange(3) if parent == 0 or nodes[parent].holders else 0
        namespace = draw.choice(NAMESPACES) if parent == 0 else None
        nodes[number] = TreeNode(number, parent, draw.randrange(1, 50), holders, NOW - 7.5, 2, b"", namespace)
    return draw.sample([*nodes.values()], count)


def totals(drawn: dict) -> tuple[int, int, int]:
    """Nodes, tokens and evictable tokens of what is shown and what is folded."""
    folded = drawn["aggregates"].values()
    rows = drawn["nodes"]
    return (
        len(rows) + sum(each["nodes"] for each in folded),
        sum(row[2] for row in rows) + sum(each["tokens"] for each in folded),
        sum(row[2] for row in rows if not row[3]) + sum(each["evictable"] for each in folded),
    )


@pytest.mark.parametrize("namespace", [None, *NAMESPACES])
def test_folding_keeps_sums_and_all_above(namespace):
    for seed in range(20):
        whole = random_tree(seed, 60)
        view = View(60, None, namespace, b"secret")
        nodes = view.seen(whole)
        assert namespace is not None or len(nodes) == len(whole)
        expected = (
            len(nodes),
            sum(node.length for node in nodes),
            sum(node.length for node in nodes if not node.holders),
        )
        for limit in (1, 5, 30, 60):
            shown, drawn = dataclasses.replace(view, limit=limit).draw(whole, NOW)
            assert totals(drawn) == expected
            assert drawn["num_nodes"] == len(nodes)
            seen = {0}
            for node, row in zip(shown, drawn["nodes"], strict=True):
                assert view.name(node.parent) in seen, "parents come first, and none is folded"
                name = view.name(node.id)
                assert (name == node.id) == (namespace is None)
                seen.add(name)
                flags = (LOCKED if node.holders else 0) | (FOLDED if name in drawn["aggregates"] else 0)
                assert row == [name, view.name(node.parent), node.length, node.holders, 7, 2, flags]
                if node.parent == 0:
                    assert namespace in (None, node.namespace)
            assert set(drawn["aggregates"]) <= seen
            assert len(shown) == min(limit, len(nodes))


def test_the_smallest_subtrees_are_folded():
    def node(number: int, parent: int, length: int) -> TreeNode:
        return TreeNode(number, parent, length, 0, NOW, 0, b"", "" if parent == 0 else None)

    nodes = [node(1, 0, 10), node(2, 1, 5), node(3, 1, 1), node(4, 2, 1), node(5, 0, 3)]
    shown, drawn = View(2, None, None).draw(nodes, NOW)
    assert [each.id for each in shown] == [1, 2]
    assert drawn["aggregates"] == {
        0: {"nodes": 1, "tokens": 3, "evictable": 3},
        1: {"nodes": 1, "tokens": 1, "evictable": 1},
        2: {"nodes": 1, "tokens": 1, "evictable": 1},
    }


def test_the_subtree_of_a_node_alone():
    nodes = random_tree(1, 60)
    for node in nodes:
        shown, drawn = View(60, node.id, None).draw(nodes, NOW)
        assert shown[0] == node
        assert drawn["num_nodes"] == len(shown) and not drawn["aggregates"]
    other = next(node for node in nodes if node.namespace == "other")
    for view in (View(60, 10**6, None), View(60, other.id, "")):
        with pytest.raises(NotFoundError, match="root"):
            view.draw(nodes, NOW)
