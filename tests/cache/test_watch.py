"""Watches: each follows the tree exactly, and only the watches that a change concerns are touched by it."""

import math
import random
from collections.abc import Iterable

import numpy as np
import pytest

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.cache.watch import SPARE, Watch, WatchGroup
from tests.cache.integrity import changed_watches, check_cache


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
    assert cache.watch(array(1, 2, 4)).matched == 2 and cache.watch(array(4)).matched == 0
    assert cache.watch(array(1), "other").matched == 0
    assert changed_watches(cache) == []
    check_cache(cache)


def test_an_insert_lengthens_the_watches_it_concerns(cache: RadixCache):
    first = cache.watch(array(1, 2, 3, 4))
    second = cache.watch(array(1, 2, 9))
    other = cache.watch(array(7, 2, 3))
    insert(cache, array(1, 2, 3))
    assert (first.matched, second.matched, other.matched) == (3, 2, 0)
    assert changed_watches(cache) == [first, second] and changed_watches(cache) == []
    insert(cache, array(1, 2, 3, 4, 5))
    assert (first.matched, second.matched) == (4, 2)
    assert changed_watches(cache) == [first]


def test_an_eviction_shortens_the_watches_it_concerns(cache: RadixCache):
    insert(cache, array(1, 2, 3, 4))
    insert(cache, array(1, 2, 5, 6))
    first, second = cache.watch(array(1, 2, 3, 9)), cache.watch(array(1, 2, 5, 6))
    assert (first.matched, second.matched) == (3, 4)
    cache.evict(1)  # The tail [4], which nobody watches.
    assert changed_watches(cache) == []
    cache.evict(1)
    assert (first.matched, second.matched) == (2, 4)
    assert changed_watches(cache) == [first]
    cache.reset()
    assert (first.matched, second.matched) == (0, 0)
    assert changed_watches(cache) == [first, second]
    check_cache(cache)


def test_changes_are_reported_oldest_watch_first(cache: RadixCache):
    watches = [cache.watch(array(prompt, 0)) for prompt in (3, 1, 2)]
    for prompt in (2, 3, 1):
        insert(cache, array(prompt, 0))
    assert changed_watches(cache) == watches


def test_no_more_matches_than_the_limit(cache: RadixCache):
    capped = cache.watch(array(1, 2, 3), limit=2)
    nothing = cache.watch(array(1, 2, 3), limit=0)
    insert(cache, array(1, 2, 3))
    assert (capped.matched, nothing.matched) == (2, 0)
    assert changed_watches(cache) == [capped]
    insert(cache, array(1, 2, 3, 4))
    assert changed_watches(cache) == []


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
    assert changed_watches(cache) == [other]
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


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """The watches that were put into another group."""
    found: list[Watch] = []
    take = WatchGroup._take

    def spy(group: WatchGroup, watches: Iterable[Watch]) -> None:
        watches = [*watches]
        found.extend(watches)
        take(group, watches)

    monkeypatch.setattr(WatchGroup, "_take", spy)
    return found


def test_a_group_that_goes_one_way_is_moved_whole(cache: RadixCache, touched: list[Watch]):
    insert(cache, array(*range(10)))
    bystanders = [cache.watch(array(*range(10), 100 + i)) for i in range(50)]
    concerned = [cache.watch(array(*range(10), 7, 8, 9, 5, i)) for i in range(20)]
    touched.clear()
    insert(cache, array(*range(5), 50))  # splits the edge above them all
    insert(cache, array(*range(10), 7, 8))
    insert(cache, array(*range(10), 7, 8, 9))
    assert {watch.matched for watch in concerned} == {13} and touched == []
    cache.evict(1000)
    assert {watch.matched for watch in bystanders + concerned} == {0}
    assert len(touched) == 50 and {*touched} == {*bystanders}, "they join the larger group"


@pytest.mark.parametrize("order", ["rising", "falling", "random"])
def test_growing_contexts_are_touched_as_often_as_halving_allows(cache: RadixCache, touched: list[Watch], order: str):
    """Each watch ends at another place of one path, which is inserted piece by piece, and is evicted so too."""
    document, lengths = np.arange(300, dtype=np.int32), [*range(1, 301, 3)]
    if order != "rising":
        lengths.sort(key=lambda length: -length if order == "falling" else length * 7919 % 300)
    watches = [cache.watch(document[:length]) for length in lengths]
    touched.clear()
    for length in range(5, 301, 5):
        insert(cache, document[:length])
        assert all(watch.matched == min(len(watch.tokens), length) for watch in watches)
    assert len(touched) <= 2 * len(watches), "each leaves the others once, where it ends"
    touched.clear()
    while cache.evict(1):
        check_cache(cache)
    assert {watch.matched for watch in watches} == {0}
    assert len(touched) <= len(watches) * math.log2(len(watches))


def test_in_an_eviction_each_watch_is_touched_once(cache: RadixCache, touched: list[Watch]):
    document = np.arange(200, dtype=np.int32)
    insert(cache, document)
    watches = [cache.watch(np.append(document[:length], np.int32(500 + length))) for length in range(1, 200)]
    touched.clear()
    assert cache.reset()
    assert len(touched) < len(watches) and {watch.matched for watch in watches} == {0}
    check_cache(cache)


def test_watches_split_no_edges(cache: RadixCache):
    insert(cache, np.arange(100, dtype=np.int32))
    for length in range(1, 100):
        cache.watch(np.arange(length, dtype=np.int32))
    assert cache.num_nodes == 1
    check_cache(cache)
    cache.match(np.arange(50, dtype=np.int32))
    cache.match(np.arange(25, dtype=np.int32))
    cache.match(np.arange(75, dtype=np.int32))
    check_cache(cache)


def test_ended_watches_are_dropped(cache: RadixCache):
    """They stay among the others for a while, but not more of them than there are others."""
    watches = [cache.watch(array(1, *divmod(number * 7919 % 1000, 30))) for number in range(1000)]
    for watch in watches[100:]:
        cache.unwatch(watch)
        assert watches[0].group is not None
        assert len(watches[0].group.watches) <= 2 * watches[0].group.size + SPARE + 1
    check_cache(cache)


@pytest.mark.parametrize("page_size", [1, 2])
def test_groups_in_random_traffic(page_size: int):
    """Many watches with much in common, at all times as exact as if each were looked up anew."""
    for seed in range(6):
        rng = random.Random(seed)
        cache = RadixCache(page_size, PageAllocator(80))
        watches: list[Watch] = []
        for step in range(150):
            tokens = np.repeat(np.array(rng.choices((0, 1), (4, 1), k=rng.randrange(1, 14)), np.int32), page_size)
            match rng.randrange(9):
                case 0 | 1 | 2 | 3:
                    watches.append(cache.watch(tokens, tier=rng.randrange(2), turn=rng.randrange(50)))
                case 4 if watches:
                    cache.unwatch(watches.pop(rng.randrange(len(watches))))
                case 5 if watches:
                    watch = rng.choice(watches)
                    cache.unlock(cache.lock(cache.match_watched(watch)))
                case 6:
                    cache.evict(rng.choice((1, 1, 4, 80)))
                case 7:
                    cache.match(tokens)
                case _:
                    if cache._allocator.num_free * page_size < len(tokens):
                        cache.evict(len(tokens))
                    pages = cache._allocator.allocate(len(tokens) // page_size)
                    result = cache.insert(tokens, pages)
                    cache._allocator.free(pages[: result.num_existing])
            if step % 3 == 0:
                check_cache(cache)
