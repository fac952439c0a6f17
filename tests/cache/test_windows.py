"""Page groups of layers with a window: what has a part, what loses it first, and that no part has two owners."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.cache.kinds import PrefixMatch
from jsg.cache.node import Root
from jsg.cache.windows import GroupedAllocator, WindowGroup
from jsg.window import Window
from tests.cache.integrity import check_allocator


def _pages(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def make(window: int = 3, num_pages: int = 20, num_parts: int = 8, page_size: int = 1, *, is_aligned: bool = False):
    group = WindowGroup(Window(window, is_aligned), num_pages, num_parts, page_size)
    return group, GroupedAllocator(num_pages, (group,), has_layers=True)


def match(pages: np.ndarray, page_size: int = 1) -> PrefixMatch:
    """A cached prefix of these pages."""
    return PrefixMatch(pages, Root(""), len(pages) * page_size)


def test_each_new_page_has_a_part_in_use():
    group, allocator = make()
    pages = allocator.allocate(5)
    assert pages is not None and sorted(group.parts[pages]) == [1, 2, 3, 4, 5]
    assert group.counts == (2, 0, 5) and group.num_available == 2
    allocator.free(pages[:2])
    assert group.counts == (4, 0, 3)
    check_allocator(allocator)


def test_the_part_that_is_outside_of_windows_for_longest_goes_first():
    group, allocator = make()
    pages = allocator.allocate(7)
    group.leave(pages[[4, 1]])
    group.leave(pages[:1])
    group.use(pages[4:5])
    group.leave(pages[4:5])
    assert group.counts == (0, 3, 4)
    for gone in ([1], [1, 0], [1, 0, 4]):
        allocator.allocate(1)
        assert np.flatnonzero(group.parts[pages] == 0).tolist() == sorted(gone)
        check_allocator(allocator)
    assert group.num_available == 0


def test_the_ends_of_awaited_prefixes_go_last():
    group, allocator = make()
    pages = allocator.allocate(7)
    group.leave(pages)
    group.keep_longest(
        [match(pages[:3]), match(pages[:5])], 1
    )  # a token sees two before it: of pages 1 and 2, and of 3 and 4
    allocator.allocate(3)
    assert np.flatnonzero(group.parts[pages] == 0).tolist() == [0, 5, 6]
    group.keep_longest([match(pages[:6])], 1)  # what is left of it ends earlier
    assert group.num_usable(match(pages[:6]), 6) == 5
    allocator.allocate(2)
    assert group.num_usable(match(pages[:6]), 6) == 5
    check_allocator(allocator)


def test_a_page_is_in_use_until_the_last_window_leaves_it():
    group, allocator = make()
    pages = allocator.allocate(3)
    group.use(pages)
    group.use(pages[1:], yields=True)
    group.leave(np.concatenate([pages, pages[:2]]))
    assert (group.num_in_use, group.num_evictable, group.num_yielding) == (2, 1, 1)
    group.leave(pages[2:])
    assert group.num_yielding == 2
    group.leave(pages[1:], yields=True)
    assert (group.num_in_use, group.num_yielding) == (0, 0)
    check_allocator(allocator)


@pytest.mark.parametrize(
    ("window", "page_size", "gone", "usable"),
    [
        (3, 1, [], 10),
        (3, 1, [0, 1, 2, 3, 4, 5, 6, 7], 10),  # a token sees two before it
        (3, 1, [8], 8),
        (3, 1, [9, 7], 7),
        (3, 1, [9, 7, 5], 5),
        (3, 1, [9, 7, 5, 3, 1], 1),  # at the beginning there are no more tokens to see
        (3, 1, [9, 7, 5, 3, 1, 0], 0),
        (1, 1, list(range(10)), 10),
        (5, 4, [8], 10),
        (6, 4, [8], 8),
        (100, 1, [9], 9),
        (100, 1, [0], 0),
    ],
)
def test_a_prefix_can_be_used_as_far_as_its_last_window_is_there(window: int, page_size: int, gone: list, usable: int):
    group, allocator = make(window, num_pages=30, num_parts=11, page_size=page_size)
    pages = allocator.allocate(10)
    group.leave(pages)
    group.use(np.delete(pages, gone))
    allocator.allocate(len(gone))
    assert np.flatnonzero(group.parts[pages] == 0).tolist() == sorted(gone)
    assert group.num_usable(match(pages, page_size), 10 * page_size) == usable * page_size


@pytest.mark.parametrize(
    ("window", "page_size", "gone", "usable"),
    [
        (4, 1, [0, 1, 2, 3, 4, 5, 6, 7], 10),  # the last window began at 8
        (4, 1, [8], 8),  # where a window begins, nothing before is seen
        (4, 1, [8, 7], 8),
        (4, 1, [8, 4, 3, 2], 8),
        (5, 1, list(range(10)), 10),
        (7, 4, [7], 10),  # a window begins at token 35, inside of page 8, and the one before it at 28, with page 7
        (7, 4, [9, 7], 9),
        (7, 4, [8], 8),
        (7, 4, [8, 7, 6], 7),
        (100, 1, [9], 9),
        (100, 1, [0], 0),
    ],
)
def test_of_a_window_that_is_aligned_only_what_is_in_it_is_needed(window: int, page_size: int, gone: list, usable: int):
    group, allocator = make(window, num_pages=30, num_parts=11, page_size=page_size, is_aligned=True)
    pages = allocator.allocate(10)
    group.leave(pages)
    group.use(np.delete(pages, gone))
    allocator.allocate(len(gone))
    assert group.num_usable(match(pages, page_size), 10 * page_size) == usable * page_size
    assert [group.first_seen(position) for position in (0, window, window + 1)] == [0, 0, window // page_size]


def test_pages_of_the_tree_get_the_parts_that_they_lack():
    group, allocator = make()
    tree, own = allocator.allocate(3), allocator.allocate(3)
    group.leave(tree)
    group.use(tree[1:])
    allocator.allocate(2)  # evicts the part of the first page of the tree
    part = group.parts[own[0]]
    assert group.hand_over(own, tree).tolist() == [True, False, False]
    allocator.free(own)
    assert group.parts[tree[0]] == part and (group.parts[tree] > 0).all()
    assert group.counts == (2, 0, 5)
    check_allocator(allocator)


def test_a_part_that_no_window_reaches_is_handed_over_too():
    group, allocator = make()
    tree, own = allocator.allocate(2), allocator.allocate(3)
    group.leave(tree)
    allocator.allocate(4)  # evicts both
    group.leave(own)
    assert group.hand_over(own[:2], tree).all()
    allocator.free(own)
    assert (group.num_evictable, group.num_in_use) == (2, 4)
    check_allocator(allocator)


def test_first_seen_and_growth():
    group, _ = make(window=10, page_size=4)
    assert [group.first_seen(position) for position in (0, 10, 13, 14, 30)] == [0, 0, 0, 1, 5]
    growths = [group.growth(*counts, 0) for counts in ((0, 1000), (8, 1000), (40, 8), (0, 5))]
    assert growths == [4, 2, 0, 2] and group.growth(40, 8, 5) == 2


def test_an_aligned_window_grows_again_behind_its_border():
    group, _ = make(16, page_size=4, is_aligned=True)
    counts = ((0, 1000), (16, 1000), (17, 7), (17, 100), (31, 1))
    assert [group.growth(*each, 0) for each in counts] == [5, 1, 1, 4, 0]


def test_the_queue_forgets_stale_entries():
    group, allocator = make()
    pages = allocator.allocate(7)
    group.leave(pages)
    for _ in range(2000):
        group.use(pages)
        group.leave(pages)
    assert group._num_entries < 1200
    check_allocator(allocator)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_random_traffic_matches_a_model(data: st.DataObject):
    """Rows that get pages, move on and end, and windows that reach pages of others again."""
    group, allocator = make(num_pages=16, num_parts=9)
    users: dict[int, int] = {}
    left: list[int] = []  # pages with parts that no window reaches, in the order in which they were left

    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "use", "leave", "free"]))
        if action == "allocate":
            count = data.draw(st.integers(1, 3))
            if count <= min(allocator.num_free, group.num_available):
                gone = max(count - group.counts[0], 0)
                pages = allocator.allocate(count)
                del left[:gone]
                users |= dict.fromkeys(pages.tolist(), 1)
        elif action == "use" and left:
            page = data.draw(st.sampled_from(left))
            group.use(_pages(page))
            left.remove(page)
            users[page] = 1
        elif action == "leave" and users:
            pages = data.draw(st.lists(st.sampled_from(sorted(users)), min_size=1, unique=True))
            group.leave(_pages(*pages))
            left += [page for page in pages if users[page] == 1]
            users = {page: count - (page in pages) for page, count in users.items() if count > (page in pages)}
        elif action == "free":
            pages = [p for p in range(1, 16) if not allocator.is_free(_pages(p))[0] and data.draw(st.booleans())]
            allocator.free(_pages(*pages))
            users = {page: count for page, count in users.items() if page not in pages}
            left = [page for page in left if page not in pages]
        assert set(np.flatnonzero(group.parts).tolist()) == {*users, *left}
        assert (group.num_evictable, group.num_in_use) == (len(left), len(users))
        check_allocator(allocator)
