"""The radix cache, rule by rule. `test_radix_model.py` tests all of them together on random traffic."""

import tracemalloc

import numpy as np
import pytest

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import InsertResult, RadixCache
from tests.cache.integrity import check_allocator, check_cache


class Bench:
    """A cache and its allocator, spoken to in plain lists."""

    def __init__(self, page_size: int = 1, num_pages: int = 1000, *, enabled: bool = True):
        self.allocator = PageAllocator(num_pages)
        self.cache = RadixCache(page_size, self.allocator, enabled=enabled)

    def insert(self, tokens: list[int], namespace: str = "") -> InsertResult:
        """Inserts with fresh pages and frees the duplicates, as a scheduler does."""
        pages = self.allocator.allocate(len(tokens) // self.cache.page_size)
        result = self.cache.insert(array(tokens), pages, namespace)
        self.allocator.free(pages[: result.num_existing])
        self.check()
        return result

    def matched(self, tokens: list[int], namespace: str = "") -> int:
        return self.cache.matched_len(array(tokens), namespace)

    def check(self) -> None:
        check_allocator(self.allocator)
        check_cache(self.cache)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_what_was_inserted_matches():
    bench = Bench()
    result = bench.insert([5, 6, 7])
    assert (result.num_existing, bench.cache.num_evictable) == (0, 3)
    match = bench.cache.match(array([5, 6, 7, 8]))
    assert match.num_tokens == 3 and match.pages.dtype == np.int32
    assert match.pages.tolist() == result.pages.tolist() == [1, 2, 3]
    assert bench.cache.match(array([6, 7])).num_tokens == 0 and bench.cache.match(array([])).num_tokens == 0


def test_an_insert_takes_only_what_is_missing():
    bench = Bench()
    bench.insert([5, 6, 7, 8])
    result = bench.insert([5, 6, 9])
    assert (result.num_existing, bench.cache.num_evictable) == (2, 5) and result.pages.tolist() == [1, 2, 7]
    assert bench.allocator.num_free == 999 - 5
    again = bench.insert([5, 6, 9])
    assert again.num_existing == 3 and again.pages.tolist() == [1, 2, 7]
    assert bench.cache.num_evictable == 5


def test_an_insert_of_nothing_changes_nothing():
    bench = Bench()
    result = bench.insert([])
    assert (result.num_existing, result.pages.tolist()) == (0, [])
    assert bench.cache.stats().num_namespaces == 0


@pytest.mark.parametrize("page_size", [2, 16])
def test_only_whole_pages_match(page_size: int):
    bench = Bench(page_size)
    prompt = list(range(5 * page_size))
    bench.insert(prompt)
    for length in range(len(prompt) + 1):
        assert bench.matched(prompt[:length]) == length // page_size * page_size
    for differs_at in range(len(prompt)):
        other = list(prompt)
        other[differs_at] = -1
        assert bench.cache.match(array(other)).num_tokens == differs_at // page_size * page_size
        bench.check()


def test_an_insert_needs_a_page_for_every_page_of_tokens():
    bench = Bench(page_size=2)
    with pytest.raises(AssertionError, match="2 pages of 2 tokens cannot hold 3 tokens"):
        bench.cache.insert(array([1, 2, 3]), array([1, 2]))


def test_tokens_of_another_width_are_refused():
    with pytest.raises(AssertionError, match="tokens must be one row of int32, but got int64"):
        Bench().cache.match(np.array([1, 2, 3], np.int64))


def test_namespaces_share_nothing_and_leave_nothing():
    bench = Bench()
    bench.insert([5, 6], "a")
    bench.insert([5, 6], "b")
    assert bench.cache.num_evictable == 4 and bench.matched([5, 6]) == 0
    assert bench.matched([5, 6], "a") == 2 and bench.cache.match(array([5, 6]), "c").num_tokens == 0
    assert bench.cache.stats().num_namespaces == 2
    bench.cache.evict(2)
    bench.check()
    assert (bench.matched([5, 6], "a"), bench.matched([5, 6], "b")) == (0, 2)
    assert bench.cache.stats().num_namespaces == 1


def test_locked_prefixes_are_not_evicted():
    bench = Bench()
    bench.insert([1, 2, 3])
    bench.insert([1, 2, 4])
    lock = bench.cache.lock(bench.cache.match(array([1, 2, 3])))
    assert (bench.cache.num_protected, bench.cache.num_evictable) == (3, 1) and bench.cache.evict(100) == 1
    assert bench.matched([1, 2, 3]) == 3
    bench.cache.unlock(lock)
    assert (bench.cache.num_protected, bench.cache.num_evictable) == (0, 3) and bench.cache.evict(100) == 3
    bench.check()
    assert bench.allocator.num_free == bench.allocator.num_total


def test_a_lock_must_be_unlocked_once():
    bench = Bench()
    lock = bench.cache.lock(bench.insert([1, 2]))
    bench.cache.unlock(lock)
    with pytest.raises(AssertionError, match="unlocked only once"):
        bench.cache.unlock(lock)
    bench.check()


def test_an_evicted_prefix_cannot_be_locked():
    bench = Bench()
    match = bench.cache.match(array([1, 2])) if bench.insert([1, 2]) else None
    bench.cache.evict(2)
    with pytest.raises(AssertionError, match="locked before it is evicted"):
        bench.cache.lock(match)


def test_an_empty_match_can_be_locked_whatever_happens_to_its_namespace():
    bench = Bench()
    lock = bench.cache.lock(bench.cache.match(array([1, 2]), "a"))
    bench.insert([1, 2], "a")
    assert (bench.cache.num_protected, bench.cache.evict(2)) == (0, 2)
    bench.cache.unlock(lock)
    bench.check()


def test_a_split_below_a_lock_leaves_it_right():
    bench = Bench()
    lock = bench.cache.lock(bench.insert([1, 2, 3, 4]))
    assert bench.cache.match(array([1, 2])).num_tokens == 2
    bench.check()
    assert (bench.cache.num_nodes, bench.cache.num_protected) == (2, 4)
    shorter = bench.cache.lock(bench.cache.match(array([1, 2])))
    bench.cache.unlock(lock)
    assert (bench.cache.num_protected, bench.cache.num_evictable) == (2, 2)
    bench.cache.unlock(shorter)
    bench.check()
    assert bench.cache.num_evictable == 4


def test_an_old_match_still_means_its_whole_path_after_splits():
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    old = bench.cache.match(array([1, 2, 3]))
    bench.insert([1, 2, 9])
    bench.insert([1, 8])
    lock = bench.cache.lock(old)
    assert bench.cache.num_protected == 3
    bench.cache.evict(100)
    assert bench.matched([1, 2, 3, 4]) == 3
    bench.cache.unlock(lock)
    bench.check()


def test_the_least_recently_used_leaf_goes_first():
    bench = Bench()
    for prompt in ([1, 1], [2, 2], [3, 3], [4, 4]):
        bench.insert(prompt)
    bench.cache.match(array([1, 1]))
    bench.insert([3, 3])
    bench.matched([2, 2])  # Does not count as a use.
    order = []
    while bench.cache.evict(1):
        bench.check()
        order.append([first for first in (1, 2, 3, 4) if bench.matched([first, first])])
    assert order == [[1, 3, 4], [1, 3], [3], []]


def test_a_match_in_the_middle_of_an_edge_saves_only_what_it_used():
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    bench.insert([5, 6])
    bench.cache.match(array([1, 2]))
    assert bench.cache.evict(1) == 2 and bench.matched([1, 2, 3, 4]) == 2
    assert bench.cache.evict(1) == 2 and (bench.matched([5, 6]), bench.matched([1, 2])) == (0, 2)


def test_parents_go_after_their_children():
    bench = Bench()
    bench.insert([1, 2, 3])
    bench.insert([1, 2, 4])
    bench.insert([1, 2])
    assert [bench.cache.evict(1) for _ in range(4)] == [1, 1, 2, 0]


def test_many_uses_keep_the_queue_small():
    bench = Bench()
    for first in range(20):
        bench.insert([first, 0])
    for step in range(500):
        bench.cache.match(array([step % 20, 0]))
        bench.cache.unlock(bench.cache.lock(bench.cache.match(array([step * 7 % 20, 0]))))
    assert len(list(bench.cache._leaves)) == 20
    bench.check()


def test_what_is_forgotten_is_what_nobody_else_has():
    bench = Bench()
    bench.insert([1, 2, 3, 4])
    bench.insert([1, 2, 5, 6])
    end = bench.insert([1, 2, 5, 6, 7, 8])
    lock = bench.cache.lock(end)
    other = bench.cache.lock(bench.cache.match(array([1, 2, 5])))
    bench.cache.unlock(lock)
    bench.cache.forget(lock)
    bench.check()
    assert bench.matched([1, 2, 5, 6, 7, 8]) == 3, "from where somebody holds it, it stays"
    assert bench.matched([1, 2, 3, 4]) == 4
    bench.cache.unlock(other)
    bench.cache.forget(other)
    bench.check()
    assert bench.matched([1, 2, 5]) == 2, "where another prefix goes on, it stays"
    bench.cache.evict(100)
    bench.check()
    assert bench.allocator.num_free == 999


def test_reset_drops_everything_or_nothing():
    bench = Bench()
    lock = bench.cache.lock(bench.insert([1, 2]))
    bench.insert([3, 4], "a")
    assert not bench.cache.reset() and (bench.matched([1, 2]), bench.matched([3, 4], "a")) == (2, 2)
    bench.cache.unlock(lock)
    assert bench.cache.reset()
    bench.check()
    assert bench.allocator.num_free == bench.allocator.num_total and bench.cache.num_nodes == 0


def test_a_cache_that_is_off_takes_nothing():
    bench = Bench(enabled=False)
    pages = bench.allocator.allocate(2)
    watch = bench.cache.watch(array([1, 2]))
    result = bench.cache.insert(array([1, 2]), pages)
    assert (result.num_existing, result.pages.tolist()) == (0, pages.tolist())
    bench.cache.unlock(bench.cache.lock(result))
    assert bench.cache.match(array([1, 2])).num_tokens == 0
    assert watch.matched == 0
    assert (bench.cache.num_evictable, bench.cache.evict(5)) == (0, 0)
    bench.allocator.free(pages)
    bench.check()


def test_stats_count_tokens():
    bench = Bench(page_size=2)
    bench.insert([1, 2, 3, 4])
    bench.insert([1, 2, 5, 6])
    bench.cache.evict(1)
    stats = bench.cache.stats()
    assert (stats.num_cached_tokens, stats.inserted_tokens, stats.evicted_tokens) == (4, 6, 2)
    assert (stats.num_nodes, stats.num_namespaces) == (2, 1)


def test_a_path_of_thousands_of_nodes_needs_no_recursion():
    bench = Bench(num_pages=5001)
    prompt = np.arange(5000, dtype=np.int32)
    bench.insert(prompt.tolist())
    for length in range(4999, 0, -1):  # Each splits the first edge.
        bench.cache.match(prompt[:length])
    assert bench.cache.num_nodes == 5000
    watch = bench.cache.watch(prompt)
    lock = bench.cache.lock(bench.cache.match(prompt))
    assert bench.cache.num_protected == 5000
    bench.check()
    bench.cache.unlock(lock)
    assert bench.cache.evict(4999) == 4999
    assert watch.matched == 1
    bench.check()


def test_the_tree_keeps_no_prompt_alive():
    bench = Bench()
    prompt = array([1, 2, 3])
    bench.cache.insert(prompt, bench.allocator.allocate(3))
    prompt[:] = 9
    assert bench.matched([1, 2, 3]) == 3
    bench.check()


@pytest.mark.parametrize("edge_len", [32, 128])
def test_a_cached_token_costs_at_most_32_bytes(edge_len: int):
    num_edges = 100
    allocator = PageAllocator(2 * num_edges * edge_len + 1)
    cache = RadixCache(1, allocator)
    prompts = np.arange(2 * num_edges * edge_len, dtype=np.int32).reshape(num_edges, 2, edge_len)
    tracemalloc.start()
    try:
        for heads, tails in prompts:
            pages = allocator.allocate(2 * edge_len)
            cache.insert(heads, pages[:edge_len])
            cache.insert(np.concatenate([heads, tails]), pages)
        del pages, heads, tails
        used_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cache.num_nodes == 2 * num_edges
    assert used_bytes / cache.num_evictable <= 32
