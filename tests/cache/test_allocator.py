"""The page allocator: no page has two owners, and equal calls give equal pages."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.cache.allocator import PageAllocator
from tests.cache.integrity import check_allocator


def _pages(*pages: int) -> np.ndarray:
    return np.array(pages, np.int32)


def test_all_but_page_0_are_handed_out_once():
    allocator = PageAllocator(10)
    assert (allocator.num_total, allocator.num_free) == (9, 9)
    pages = allocator.allocate(9)
    assert pages is not None and pages.dtype == np.int32
    assert pages.tolist() == list(range(1, 10))
    assert allocator.num_free == 0
    check_allocator(allocator)


def test_asking_for_too_many_takes_nothing():
    allocator = PageAllocator(4)
    assert allocator.allocate(4) is None and allocator.num_free == 3
    assert len(allocator.allocate(3)) == 3


def test_nothing_can_be_asked_for_and_freed():
    allocator = PageAllocator(1)
    assert allocator.allocate(0).tolist() == [] and allocator.allocate(1) is None
    allocator.free(_pages())
    check_allocator(allocator)


def test_pages_freed_last_come_back_first_in_their_order():
    allocator = PageAllocator(10)
    allocator.allocate(9)
    allocator.free(_pages(3, 4))
    allocator.free(_pages(7, 5))
    assert allocator.allocate(4).tolist() == [7, 5, 3, 4]


def test_an_allocation_is_a_copy():
    allocator = PageAllocator(4)
    allocator.allocate(3)[:] = 0
    allocator.free(_pages(1, 2, 3))
    check_allocator(allocator)
    assert allocator.allocate(3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "pages",
    [_pages(0), _pages(-1), _pages(10), _pages(2), _pages(1, 2), _pages(1, 1), _pages(1, 3, 1)],
    ids=["dump", "negative", "too large", "free", "partly free", "twice", "twice apart"],
)
def test_a_wrong_free_is_refused_and_changes_nothing(pages: np.ndarray):
    allocator = PageAllocator(10)
    allocator.allocate(9)
    allocator.free(_pages(2))
    with pytest.raises(AssertionError, match="pages to free must"):
        allocator.free(pages)
    assert allocator.num_free == 1
    check_allocator(allocator)


def test_is_free():
    allocator = PageAllocator(5)
    allocator.allocate(2)
    assert allocator.is_free(_pages(0, 1, 2, 3, 4)).tolist() == [False, False, False, True, True]


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.integers(-8, 8), max_size=40))
def test_random_traffic_matches_a_set(steps: list[int]):
    """A positive step allocates as many pages, a negative one frees as many, oldest first."""
    allocator, twin = PageAllocator(20), PageAllocator(20)
    owned: list[int] = []
    for step in steps:
        if step >= 0:
            pages = allocator.allocate(step)
            again = twin.allocate(step)
            assert (pages is None) == (step > 19 - len(owned))
            if pages is not None:
                assert pages.tolist() == again.tolist() and not set(pages.tolist()) & {0, *owned}
                owned += pages.tolist()
        else:
            allocator.free(_pages(*owned[:-step]))
            twin.free(_pages(*owned[:-step]))
            owned = owned[-step:]
        assert allocator.num_free == 19 - len(owned)
        check_allocator(allocator)
