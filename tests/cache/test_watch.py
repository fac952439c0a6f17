"""Watches: each follows the tree exactly, and only the watches that a change concerns are touched by it."""

import numpy as np
import pytest

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.cache.watch import WatchIndex
from tests.cache.integrity import check_cache


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(1, PageAllocator(1000))


def insert(cache: RadixCache, tokens: np.ndarray, namespace: str = "") -> None:
    pages = cache._allocator.allocate(len(tokens) // cache.page_size)
    result = cache.insert(tokens, pages, namespace)
    cache._allocator.free(pages[: result.num_existing])
    check_cache(cache)


def test_a_watch_begins_at_the_present_match(cache: RadixCache):
    insert(cache, array(1, 2, 3))
    assert cache.watch(array(1, 2, 4)).matched == 2
    assert cache.watch(array(4)).matched == 0
    assert cache.watch(array(1), "other").matched == 0
    assert cache.drain_changed() == []
    check_cache(cache)


def test_an_insert_lengthens_the_watches_it_concerns(cache: RadixCache):
    first = cache.watch(array(1, 2, 3, 4))
    second = cache.watch(array(1, 2, 9))
    other = cache.watch(array(7, 2, 3))
    insert(cache, array(1, 2, 3))
    assert (first.matched, second.matched, other.matched) == (3, 2, 0)
    assert cache.drain_changed() == [first, second]
    assert cache.drain_changed() == []
    insert(cache, array(1, 2, 3, 4, 5))
    assert (first.matched, second.matched) == (4, 2)
    assert cache.drain_changed() == [first]


def test_an_eviction_shortens_the_watches_it_concerns(cache: RadixCache):
    insert(cache, array(1, 2, 3, 4))
    insert(cache, array(1, 2, 5, 6))
    first, second = cache.watch(array(1, 2, 3, 9)), cache.watch(array(1, 2, 5, 6))
    assert (first.matched, second.matched) == (3, 4)
    cache.evict(1)  # The tail [4], which nobody watches.
    assert cache.drain_changed() == []
    cache.evict(1)
    assert (first.matched, second.matched) == (2, 4)
    assert cache.drain_changed() == [first]
    cache.reset()
    assert (first.matched, second.matched) == (0, 0)
    assert cache.drain_changed() == [first, second]
    check_cache(cache)


def test_changes_are_reported_oldest_watch_first(cache: RadixCache):
    watches = [cache.watch(array(prompt, 0)) for prompt in (3, 1, 2)]
    for prompt in (2, 3, 1):
        insert(cache, array(prompt, 0))
    assert cache.drain_changed() == watches


def test_no_more_matches_than_the_limit(cache: RadixCache):
    capped = cache.watch(array(1, 2, 3), limit=2)
    nothing = cache.watch(array(1, 2, 3), limit=0)
    insert(cache, array(1, 2, 3))
    assert (capped.matched, nothing.matched) == (2, 0)
    assert cache.drain_changed() == [capped]
    insert(cache, array(1, 2, 3, 4))
    assert cache.drain_changed() == []


@pytest.mark.parametrize(("limit", "matched"), [(None, 8), (11, 8), (8, 8), (7, 4), (3, 0)])
def test_whole_pages_within_the_limit_match(limit: int | None, matched: int):
    cache = RadixCache(4, PageAllocator(100))
    before = cache.watch(np.arange(11, dtype=np.int32), limit=limit)
    insert(cache, np.arange(12, dtype=np.int32))
    after = cache.watch(np.arange(11, dtype=np.int32), limit=limit)
    assert (before.matched, after.matched) == (matched, matched)


def test_an_ended_watch_is_not_reported(cache: RadixCache):
    watch, other = cache.watch(array(1, 2)), cache.watch(array(1, 2))
    insert(cache, array(1, 2))
    cache.unwatch(watch)
    assert cache.drain_changed() == [other]
    with pytest.raises(AssertionError, match="ended once"):
        cache.unwatch(watch)
    check_cache(cache)


def test_namespaces_live_as_long_as_their_watches(cache: RadixCache):
    watch = cache.watch(array(1, 2), "a")
    assert cache.stats().num_namespaces == 1
    insert(cache, array(1, 2), "a")
    cache.evict(2)
    assert (watch.matched, cache.stats().num_namespaces) == (0, 1)
    cache.unwatch(watch)
    assert cache.stats().num_namespaces == 0


def test_a_watch_is_no_use(cache: RadixCache):
    insert(cache, array(1, 2))
    insert(cache, array(3, 4))
    watch = cache.watch(array(1, 2))
    cache.evict(1)
    assert (watch.matched, cache.matched_len(array(3, 4))) == (0, 2)


def test_a_change_touches_only_the_watches_that_it_changes(cache: RadixCache, monkeypatch: pytest.MonkeyPatch):
    insert(cache, array(*range(10)))
    bystanders = [cache.watch(array(*range(10), 100 + i)) for i in range(50)]
    concerned = [cache.watch(array(*range(10), 7, i)) for i in range(3)]
    touched = []
    put_back = WatchIndex.put_back

    def spy(index: WatchIndex, watch, node, matched):
        touched.append(watch)
        put_back(index, watch, node, matched)

    monkeypatch.setattr(WatchIndex, "put_back", spy)
    insert(cache, array(*range(5), 50))  # Splits the edge above them all.
    assert touched == []
    insert(cache, array(*range(10), 7))
    assert touched == concerned
    touched.clear()
    cache.lock(cache.match(array(*range(10))))
    cache.evict(1000)
    assert touched == concerned
    assert {watch.matched for watch in bystanders + concerned} == {10}
