"""Which tokens the tree has after a text: as a search through all that was put into it finds them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.cache.allocator import PageAllocator
from jsg.cache.following import following
from jsg.cache.node import Node
from jsg.cache.radix import RadixCache

TEXTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=8)


def filled(texts: list[list[int]], page_size: int) -> tuple[RadixCache, list[list[int]]]:
    """A cache with these texts, put in one after another, and what it has of each: whole pages."""
    allocator = PageAllocator(200)
    cache = RadixCache(page_size, allocator)
    whole = [text[: len(text) // page_size * page_size] for text in texts]
    for text in whole:
        pages = allocator.allocate(len(text) // page_size)
        assert pages is not None
        cache.insert(np.array(text, np.int32), pages)
    return cache, whole


def root_of(cache: RadixCache) -> Node:
    return cache.roots[0] if cache.roots else cache._root("")


@settings(max_examples=60)
@given(texts=TEXTS, asked=st.lists(st.integers(0, 2), max_size=6), page_size=st.sampled_from([1, 3]))
def test_what_follows_is_how_a_text_in_the_tree_went_on(texts, asked, page_size: int):
    cache, whole = filled(texts, page_size)
    found = following(root_of(cache), np.array(asked, np.int32), 5, page_size)
    going_on = [text[len(asked) :] for text in whole if text[: len(asked)] == asked and len(text) > len(asked)]
    if not going_on:
        assert found == []
        return
    assert found and any(text[: len(found)] == found for text in going_on)
    assert len(found) == 5 or found in going_on, "it goes on to the end of a path"


def test_the_branch_counts_that_was_used_last():
    cache, _ = filled([[1, 2, 3, 4], [1, 2, 5, 6], [1, 2, 7, 8]], 1)
    asked = np.array([1, 2], np.int32)
    assert following(root_of(cache), asked, 9, 1) == [7, 8]
    cache.match(np.array([1, 2, 5], np.int32))
    assert following(root_of(cache), asked, 9, 1) == [5, 6]
    assert following(root_of(cache), asked, 1, 1) == [5]


@pytest.mark.parametrize("asked", [[3, 4], [3, 4, 9], []])
def test_it_begins_where_a_lock_ends_and_goes_on_in_a_split_edge(asked: list[int]):
    cache, _ = filled([[1, 2, 3, 4, 9, 9, 7]], 1)
    lock = cache.lock(cache.match(np.array([1, 2], np.int32)))
    rest = [3, 4, 9, 9, 7]
    assert following(lock.node, np.array(asked, np.int32), 20, 1) == rest[len(asked) :]


def test_another_namespace_is_not_seen():
    cache, _ = filled([[1, 2, 3]], 1)
    other = cache.lock(cache.match(np.array([1], np.int32), "other"))
    assert following(other.node, np.array([1], np.int32), 5, 1) == []
