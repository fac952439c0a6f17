"""The invariants of the cache and of its allocator, which their docstrings state."""

from collections.abc import Sequence

import numpy as np

from jsg.cache.allocator import _USED, PageAllocator
from jsg.cache.node import Node, path_up
from jsg.cache.radix import RadixCache, _join_pages
from jsg.cache.states import PASSED, PENDING, SHARED, USUAL, StateSlots
from jsg.cache.watch import Watch, WatchGroup, num_common
from jsg.cache.watch_index import WatchIndex
from jsg.cache.windows import WindowGroup


def check_cache(cache: RadixCache) -> None:
    """Asserts the invariants. Walks the whole tree."""
    nodes = list(cache._nodes())
    for node in nodes:
        _check_node(cache, node)
    assert cache.num_nodes == len(nodes), f"{cache.num_nodes} nodes are counted, but {len(nodes)} are there"
    protected = sum(node.num_pages for node in nodes if node.num_locks)
    evictable = sum(node.num_pages for node in nodes if not node.num_locks)
    assert (cache.num_protected, cache.num_evictable) == (protected, evictable), "pages are counted wrongly"
    yielding = sum(node.num_pages for node in nodes if node.num_locks == node.num_yielding > 0)
    assert cache.num_yielding == yielding, "pages of yielding locks are counted wrongly"
    pages = _join_pages(nodes)
    assert len(np.unique(pages)) == len(pages), "two nodes own one page"
    assert not cache._allocator.is_free(pages).any(), "a cached page is free"
    assert not (pages == 0).any(), "page 0 is cached"
    for node in nodes if cache.kinds else ():
        depth = sum(above.num_tokens for above in path_up(node))
        assert cache.is_usable(node) == (cache.usable_at(node) == depth), "a node can be used otherwise than it says"
    _check_queue(cache, nodes)
    _check_watches(cache, nodes)


def _check_node(cache: RadixCache, node: Node) -> None:
    parent = node.parent
    assert parent is not None and parent.children.get(node.tokens[: cache._page_bytes]) is node, "a node is misfiled"
    assert len(node.tokens) == node.num_pages * cache._page_bytes > 0, "an edge must have whole pages, at least one"
    assert sum(child.num_locks for child in node.children.values()) <= node.num_locks, "a lock skips a node"
    assert sum(child.num_yielding for child in node.children.values()) <= node.num_yielding <= node.num_locks
    assert node.num_locks or node.last_used <= parent.last_used or parent.num_locks, (
        "a child is younger than its parent"
    )


def _check_queue(cache: RadixCache, nodes: Sequence[Node]) -> None:
    entries = [(queued_at, node) for queued_at, node in cache._leaves if node.parent is not None]  # not forgotten
    queued = {node: queued_at for queued_at, node in entries}
    assert len(queued) == len(entries), "a leaf is queued twice"
    assert set(queued) == {node for node in nodes if node.is_queued}, "the queue and the tree differ"
    assert all(queued_at <= node.last_used for node, queued_at in queued.items()), "an entry is too young"
    assert all(node.is_queued for node in nodes if node.is_evictable_leaf), "an evictable leaf is not queued"


def _check_watches(cache: RadixCache, nodes: Sequence[Node]) -> None:
    _check_places(cache._watches)
    live = {*nodes, *cache._roots.values()}
    for watch in cache._watches:
        assert watch.node in live, "a watch ends on the edge of an evicted node"
        expected = cache.matched_len(watch.tokens, watch.namespace)
        assert watch.matched == expected, f"a watch says {watch.matched} tokens match, but {expected} do"
    for namespace, root in cache._roots.items():
        assert root.namespace == namespace and (root.children or root in cache._watches), "an idle root is kept"


def _check_places(watches: WatchIndex) -> None:
    """Asserts that every group is where it says, and that its watches are in order with what neighbours share."""
    size = watches._page_size
    for node, edge in watches._edges.items():
        assert edge.node is node and edge.places, "an edge is misfiled, or kept without places"
        assert edge.start == sum(above.num_tokens for above in path_up(node)) - node.num_tokens
        depths = [place.matched for place in edge.places]
        assert depths == sorted(set(depths)), "places are in disorder"
        assert not node.num_tokens or (edge.start < depths[0] and depths[-1] <= edge.start + node.num_tokens)
        for place in edge.places:
            assert place.edge is edge and place.groups, "a place is misfiled, or kept without groups"
            for page, group in place.groups.items():
                assert group.place is place and group.next_page(size) == page, "a group is at a wrong place or page"
                _check_group(group, size)
    live = {watch.group for watch in watches}
    assert all(group in live or not group.size for group in watches._changed), "a group is lost"


def _check_group(group: WatchGroup, page_size: int) -> None:
    assert group.size == sum(watch.group is group for watch in group.watches) > 0
    assert group.watches[0].group is group.watches[-1].group is group, "an ended watch is at an end"
    assert all(watch.group in (group, None) for watch in group.watches)
    page = group.next_page(page_size)
    for watch in group.watches:
        tokens = watch.tokens[group.matched : group.matched + page_size]
        assert tokens.tobytes() == page, "a watch needs another page"
    for before, after, shared in zip(group.watches, group.watches[1:], group._shared[1:], strict=False):
        assert before.tokens.tobytes() <= after.tokens.tobytes(), "watches are in disorder"
        count = num_common(before.tokens, after.tokens, 0) // page_size * page_size
        is_equal = count == len(before.tokens) == len(after.tokens)
        assert shared == count + page_size * is_equal, "watches share another number of tokens"
    one, *others = sorted(group, key=lambda watch: watch.serial % 7)
    counts = [group.matched]
    for other in others:
        count = num_common(one.tokens, other.tokens, 0) // page_size * page_size
        counts.append(count + page_size * (count == len(one.tokens) == len(other.tokens)))
    assert group.common(one, page_size) == max(counts), "a watch has more or fewer tokens in common with others"
    for tier in {watch.tier for watch in group}:
        expected = min((watch for watch in group if watch.tier == tier), key=lambda watch: (watch.turn, watch.serial))
        assert group.first(tier) is expected, "another watch has the smallest turn"


def changed_watches(cache: RadixCache) -> list[Watch]:
    """The watches of the groups that have changed, the oldest first."""
    groups = cache.drain_changed()
    return sorted((watch for group in groups for watch in group), key=lambda watch: watch.serial)


def check_allocator(allocator: PageAllocator) -> None:
    """Asserts the invariants. Walks the whole pool."""
    free = allocator._stack[: allocator.num_free]
    assert 0 <= allocator.num_free <= allocator.num_total, (
        f"{allocator.num_free} of {allocator.num_total} pages are free"
    )
    assert (allocator._index[free] == np.arange(allocator.num_free)).all(), "a free page is misplaced"
    assert (allocator._index != _USED).sum() == allocator.num_free, "a page in use has an index among the free ones"
    assert allocator._index[0] == _USED, "page 0 is free"
    for kind in allocator.kinds:
        if isinstance(kind, StateSlots):
            check_states(kind)
            assert not kind._ends[free].any(), "a free page has a state"
        elif isinstance(kind, WindowGroup):
            check_window_group(kind)
            assert not kind.parts[free].any(), "a free page has a part"


def check_states(slots: StateSlots) -> None:
    """Asserts the invariants. Walks all pages."""
    check_allocator(slots._numbers)
    assert np.flatnonzero(slots._ends).tolist() == sorted(slots._states), "a state is misfiled"
    assert all(state.page == page for page, state in slots._states.items())
    used = [state.slot for state in slots._states.values()]
    assert len(used) == len(set(used)) and not slots._numbers.is_free(np.array(used, np.int32)).any()
    assert sum(slots.counts) == slots.num_total and len(used) <= slots._num_cached <= slots.most_cached
    idle = [state for state in slots._states.values() if not state.num_users]
    assert sorted(map(id, idle)) == sorted(id(state) for queue in slots._idle for state in queue), "a state is lost"
    pending = {state.page for state in slots._pending if state.page}
    assert pending == set(np.flatnonzero(slots._ends == PENDING).tolist())
    passed, usual, shared = slots._idle
    assert all(state.worth == PASSED for state in passed) and all(state.worth >= USUAL for state in usual)
    assert all(state.worth == SHARED for state in shared) and 2 * len(shared) <= slots.most_cached


def check_window_group(group: WindowGroup) -> None:
    """Asserts the invariants. Walks all pages and the queue."""
    check_allocator(group._numbers)
    there = np.flatnonzero(group.parts)
    parts = group.parts[there]
    assert len(np.unique(parts)) == len(parts), "two pages have one part"
    assert not group._numbers.is_free(parts).any() and not group.parts[0], "a part in use is free, or page 0 has one"
    in_use = group._users > 0
    assert (group.parts[in_use] > 0).all() and (group._users >= group._holds).all() and (group._holds >= 0).all()
    counts = len(there) - in_use.sum(), in_use.sum(), (in_use & (group._users == group._holds)).sum()
    assert (group.num_evictable, group.num_in_use, group.num_yielding) == counts, "parts are counted wrongly"
    assert sum(group.counts) == group.num_total
    entries = [page for turn, pages in group._queue for page in pages[group._turns[pages] == turn].tolist()]
    assert sorted(entries) == np.flatnonzero((group.parts > 0) & ~in_use).tolist(), "the queue and the pages differ"
    assert group._num_entries == sum(len(pages) for _, pages in group._queue)
