"""The tree as plain data: it is correct, limited in depth, and shows no token and no namespace."""

import json
from typing import Any

import numpy as np
import pytest

from jsg.cache.allocator import PageAllocator
from jsg.cache.dump import MAX_DEPTH, MAX_NODES
from jsg.cache.radix import RadixCache
from jsg.errors import RequestError
from jsg.types import namespace_digest


def make_cache(*prompts: tuple[str, list[int]]) -> RadixCache:
    allocator = PageAllocator(1000)
    cache = RadixCache(1, allocator)
    for namespace, tokens in prompts:
        pages = allocator.allocate(len(tokens))
        result = cache.insert(np.array(tokens, np.int32), pages, namespace)
        allocator.free(pages[: result.num_existing])
    return cache


@pytest.fixture
def cache() -> RadixCache:
    """A trunk of 3 tokens with two branches, one of which forks again; and another namespace."""
    return make_cache(
        ("secret-salt", [70001, 70002, 70003, 70011]),
        ("secret-salt", [70001, 70002, 70003, 70021, 70022, 70031]),
        ("secret-salt", [70001, 70002, 70003, 70021, 70022, 70041, 70042]),
        ("other", [70001]),
    )


def sizes(node: dict[str, Any]) -> Any:
    return (node["num_tokens"], [sizes(child) for child in node["children"]])


def test_the_whole_tree_is_told(cache: RadixCache):
    lock = cache.lock(cache.match(np.array([70001, 70002, 70003, 70011], np.int32), "secret-salt"))
    dump = cache.dump(MAX_DEPTH, MAX_NODES)
    assert (dump["page_size"], dump["num_nodes"], dump["num_cached_tokens"], dump["num_namespaces"]) == (1, 6, 10, 2)
    salted, other = dump["namespaces"]
    assert salted["namespace"] == namespace_digest("secret-salt") != other["namespace"]
    assert [sizes(node) for node in salted["children"]] == [(3, [(1, []), (2, [(1, []), (2, [])])])]
    assert [sizes(node) for node in other["children"]] == [(1, [])]
    (trunk,) = salted["children"]
    assert (trunk["num_locks"], trunk["num_children"], trunk["last_used"]) == (1, 2, dump["time"])
    assert [branch["num_locks"] for branch in trunk["children"]] == [1, 0]
    cache.unlock(lock)


def test_neither_tokens_nor_namespaces_are_told(cache: RadixCache):
    text = json.dumps(cache.dump(MAX_DEPTH, MAX_NODES))
    assert "7000" not in text
    assert "secret" not in text


@pytest.mark.parametrize("max_depth", [1, 2, 3, 4])
def test_a_depth_limit_shows_that_there_is_more(cache: RadixCache, max_depth: int):
    def depth(node: dict[str, Any]) -> int:
        return 1 + max((depth(child) for child in node["children"]), default=0)

    salted = cache.dump(max_depth, MAX_NODES)["namespaces"][0]
    assert depth(salted) - 1 == min(max_depth, 3)
    cut = [node for node in walk(salted) if node["num_children"] > len(node["children"])]
    assert bool(cut) == (max_depth < 3)


def walk(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(below for child in node["children"] for below in walk(child))]


@pytest.mark.parametrize("max_nodes", range(1, 9))
def test_a_node_limit_keeps_the_top(cache: RadixCache, max_nodes: int):
    namespaces = cache.dump(MAX_DEPTH, max_nodes)["namespaces"]
    levels: list[list[dict[str, Any]]] = [namespaces]
    while levels[-1]:
        levels.append([child for node in levels[-1] for child in node["children"]])
    shown = [len(level) for level in levels[:-1]]
    assert sum(shown) == min(max_nodes, 8)
    assert shown[:-1] == [2, 2, 2, 2][: len(shown) - 1], "a level before the last is cut"


@pytest.mark.parametrize(
    ("depth", "nodes", "param"),
    [
        (0, 1, "max_depth"),
        (MAX_DEPTH + 1, 1, "max_depth"),
        (1, 0, "max_nodes"),
        (1, MAX_NODES + 1, "max_nodes"),
    ],
)
def test_limits_out_of_range_are_refused(cache: RadixCache, depth: int, nodes: int, param: str):
    with pytest.raises(RequestError) as refused:
        cache.dump(depth, nodes)
    assert refused.value.param == param


def test_the_deepest_dump_is_still_json():
    prompts = [("", list(range(length))) for length in range(1, 3 * MAX_DEPTH)]
    dump = make_cache(*prompts).dump(MAX_DEPTH, MAX_NODES)
    assert json.loads(json.dumps(dump)) == dump
