"""Page groups of layers with a window: which pages have keys and values there, and which lose these first.

A layer with a window sees the last tokens only, so it need not keep what lies further back. The layers of one window
are a group with numbers and memory of its own. A page of tokens that has keys and values in them has a *part* in the
group. Tree, rows and requests know pages; what parts these have is known here, and nowhere else on the host.
"""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.cache.kinds import PrefixMatch
from jsg.cache.states import StateSlots
from jsg.window import Window

SPARE_ENTRIES = 1024
"""How many stale entries the queue of a group may have, beside one for each of its parts."""
WINDOW_TERMS = ("free", "evictable", "in use")
"""What the parts of pages are in a group of layers with a window, each exactly one of these."""
STRIDES = 8
"""While a group has room, the window of a request moves on by this part of itself at a time."""


@final
class WindowGroup:
    """The parts of pages in the layers of one window.

    A page is *in use* while the window of a request, or of a held prompt, reaches it. Outside of all windows its part
    stays until another page needs it, whether the radix tree or a row owns the page. The part that has been outside for
    longest goes first. So the end of a prefix that is matched again and again stays.

    Invariants: free + evictable + in use == total, in parts. A page in use has a part. A page that has a part and is
    not in use is in the queue once with the turn that `_turns` names. Entries with other turns are stale.

    Attributes:
        window: Which tokens a token sees.
        num_needed: See `StateKind`, and `first_needed`.
        parts: int32, by page the number of its part; 0 for none.
        num_evictable: Parts outside of all windows.
        num_in_use: Parts that a window reaches.
        num_yielding: Parts in use that only holds reach.
        orders: See `StateKind`.
    """

    orders = True

    def __init__(self, window: Window, num_pages: int, num_parts: int, page_size: int):
        """Starts without parts. The pages are those of tokens, page 0 included, and the parts include part 0."""
        assert window.length >= 1, f"a window has its own position at least, but got {window}"
        self.window = window
        self.num_needed = -(-(window.length - 1) // page_size)
        self.parts = np.zeros(num_pages, np.int32)
        self.num_evictable = self.num_in_use = self.num_yielding = 0
        self._page_size = page_size
        self._numbers = PageAllocator(num_parts)
        self._users = np.zeros(num_pages, np.int32)
        self._holds = np.zeros(num_pages, np.int32)
        self._turns = np.zeros(num_pages, np.int64)
        self._turn = itertools.count(1)
        self._queue: deque[tuple[int, np.ndarray]] = deque()
        self._num_entries = 0
        self._told: Callable[[np.ndarray, int], None] | None = None

    @property
    def stride(self) -> int:
        """Pages that a window moves on by while there is room."""
        return self.num_needed // STRIDES

    @property
    def num_total(self) -> int:
        """Parts that there are, without part 0, which takes the writes of padding."""
        return self._numbers.num_total

    @property
    def num_available(self) -> int:
        """Pages that can get a part."""
        return self._numbers.num_free + self.num_evictable

    @property
    def counts(self) -> tuple[int, int, int]:
        """Parts that are free, evictable and in use. Together they are all."""
        return self._numbers.num_free, self.num_evictable, self.num_in_use

    def first_seen(self, position: int) -> int:
        """The first page that a request may still read whose next token is at `position`, or at the one before."""
        return max(self.window.first(position - 1), 0) // self._page_size

    def first_needed(self, num_pages: Any) -> Any:
        """The first page of a cached prefix of so many that must have a part, so that the prefix can go on.

        All after it must, too. It is one number of pages, or an array of them.
        """
        return np.maximum(self.window.first(num_pages * self._page_size), 0) // self._page_size

    def growth(self, num_there: int, num_more: int, num_next: int) -> int:
        """Parts that a row of some tokens is expected to take for more tokens, `num_next` of them in the next step.

        A window grows up to its size, and reaches all tokens of a step beside.
        """
        most = self.num_needed + 1
        before, after = (min(-(-count // self._page_size), most) for count in (num_there, num_there + num_more))
        if self.window.is_aligned:  # it begins anew with few pages
            before = -(-num_there // self._page_size) - self.first_seen(num_there)
            if (first := self.first_seen(num_there + num_more)) == self.first_seen(num_there):
                after = -(-(num_there + num_more) // self._page_size) - first
        return max(after - before, 0) + -(-num_next // self._page_size)

    def is_whole(self, pages: np.ndarray, num_pages: int) -> bool:
        """See `StateKind`."""
        return bool((self.parts[pages[len(pages) - num_pages + self.first_needed(num_pages) :]] > 0).all())

    def num_usable(self, match: PrefixMatch, num_tokens: int) -> int:
        """See `StateKind`."""
        return self._num_usable(match.pages[: num_tokens // self._page_size]) * self._page_size

    def _num_usable(self, pages: np.ndarray) -> int:
        """How many leading pages of a cached prefix can be used: the most of which those that are needed have parts."""
        count = len(pages)
        if self.is_whole(pages, count):
            return count
        ends = np.arange(count + 1)
        behind_missing = np.maximum.accumulate(np.append(0, np.where(self.parts[pages] == 0, ends[1:], 0)))
        return int(np.flatnonzero(self.first_needed(ends) >= behind_missing)[-1])

    def observe(self, told: Callable[[np.ndarray, int], None]) -> None:
        """See `StateKind`."""
        self._told = told

    def check(self, *, is_idle: bool) -> None:
        """Asserts that the parts of each account add up to all, and that none is in use when nothing runs."""
        assert sum(self.counts) == self.num_total, (
            f"{' + '.join(WINDOW_TERMS)} = {self.counts} must add up to {self.num_total} parts"
        )
        assert not is_idle or not self.num_in_use, "a window was not left"

    # Pages come into windows and leave them.

    def add(self, pages: np.ndarray) -> None:
        """Gives new pages a part each. They are in use. So many must be available."""
        assert len(pages) <= self.num_available, "the plan asks only for parts that are available"
        self._evict(len(pages) - self._numbers.num_free)
        if (parts := self._numbers.allocate(len(pages))) is not None:
            self.parts[pages] = parts
        self._users[pages] = 1
        self.num_in_use += len(pages)

    def use(self, pages: np.ndarray, *, yields: bool = False) -> None:
        """Notes that one more window reaches these pages, which differ and have parts; with `yields` that of a hold."""
        assert (self.parts[pages] > 0).all(), "a window reaches a page whose keys and values are gone"
        new = pages[self._users[pages] == 0]
        self._turns[new] = 0
        self.num_evictable -= len(new)
        self.num_in_use += len(new)
        self._count(pages, 1, yields=yields)

    def leave(self, pages: np.ndarray, *, yields: bool = False) -> None:
        """Notes that windows no longer reach these pages. A page is given once for each window that has reached it."""
        distinct, first, counts = np.unique(pages, return_index=True, return_counts=True)
        self._count(distinct, -counts, yields=yields)
        pages = distinct[np.argsort(first)]  # in their order, so that the end of a prefix goes last
        self._put(pages[self._users[pages] == 0])

    def keep_longest(self, matches: Iterable[PrefixMatch], num_next: int) -> None:
        """Lets go last what it takes to use these prefixes, which waiting requests match, if few parts are free."""
        if self._numbers.num_free >= num_next:
            return
        ends = [np.empty(0, np.int32)]
        for match in matches:
            count = self._num_usable(match.pages)
            ends.append(match.pages[self.first_needed(count) : count])
        pages = np.unique(np.concatenate(ends))
        pages = pages[self._users[pages] == 0]
        self.use(pages)
        self.leave(pages)

    def _put(self, pages: np.ndarray) -> None:
        """Makes pages evictable that were in use."""
        if not len(pages):
            return
        self.num_in_use -= len(pages)
        self.num_evictable += len(pages)
        self._queue.append((turn := next(self._turn), pages))
        self._turns[pages] = turn
        self._num_entries += len(pages)
        if self._num_entries > 2 * self.num_total + SPARE_ENTRIES:
            valid = ((turn, pages[self._turns[pages] == turn]) for turn, pages in self._queue)
            self._queue = deque(entry for entry in valid if len(entry[1]))
            self._num_entries = self.num_evictable

    def _count(self, pages: np.ndarray, change: int | np.ndarray, *, yields: bool) -> None:
        before = self._yielding(pages)
        self._users[pages] += change
        if yields:
            self._holds[pages] += change
        self.num_yielding += self._yielding(pages) - before

    def _yielding(self, pages: np.ndarray) -> int:
        holds = self._holds[pages]
        return int(((holds > 0) & (holds == self._users[pages])).sum())

    def _evict(self, count: int) -> None:
        """Frees so many parts outside of all windows, those that were left first."""
        while count > 0:
            turn, pages = self._queue.popleft()
            self._num_entries -= len(pages)
            pages = pages[self._turns[pages] == turn]
            if len(pages) > count:
                self._queue.appendleft((turn, pages[count:]))
                self._num_entries += len(pages) - count
                pages = pages[:count]
            self._turns[pages] = 0
            self.num_evictable -= len(pages)
            self._take_parts(pages)
            count -= len(pages)
            if self._told is not None:
                self._told(pages, self.num_needed)

    def _take_parts(self, pages: np.ndarray) -> None:
        self._numbers.free(self.parts[pages])
        self.parts[pages] = 0

    # Pages go, or others take their place.

    def drop(self, pages: np.ndarray) -> None:
        """Frees the parts of pages that are freed. At most one window reaches each of them, that of its row."""
        pages = pages[self.parts[pages] > 0]
        users = self._users[pages]
        assert (users <= 1).all() and not self._holds[pages].any(), "a page is freed that a window reaches"
        num_in_use = int(users.sum())
        self.num_in_use -= num_in_use
        self.num_evictable -= len(pages) - num_in_use
        self._users[pages] = self._turns[pages] = 0
        self._take_parts(pages)

    def hand_over(self, own: np.ndarray, others: np.ndarray) -> np.ndarray:
        """Lets pages of the tree take the place of those of a row, which hold the same tokens and are freed next.

        A page of the tree that has no part gets that of the row.

        Returns:
            Which of the tree's pages did: bool [n]. What the row computes of them is written.
        """
        is_new = (self.parts[others] == 0) & (self.parts[own] > 0)
        is_used = self._users[own] > 0
        self.use(others[is_used & ~is_new])
        givers, takers = own[is_new], others[is_new]
        for numbers in (self.parts, self._users):
            numbers[takers], numbers[givers] = numbers[givers], 0
        self._turns[givers] = 0
        idle = takers[self._users[takers] == 0]
        self.num_evictable -= len(idle)
        self.num_in_use += len(idle)
        self._put(idle)
        if self._told is not None and len(takers):
            self._told(takers, self.num_needed)
        return is_new


@final
class GroupedAllocator(PageAllocator):
    """Hands out pages with a part in each group of layers with a window. What all kinds have of them goes with them."""

    def __init__(self, num_pages: int, kinds: Sequence[WindowGroup | StateSlots], *, has_layers: bool):
        """With `has_layers` some layers see all tokens, so each page has keys and values under its own number too."""
        super().__init__(num_pages)
        self.kinds = self._each = tuple(kinds)
        self._windows = [kind for kind in kinds if isinstance(kind, WindowGroup)]
        self.maps = (*([None] if has_layers else []), *(group.parts for group in self._windows))

    def allocate(self, n: int) -> np.ndarray | None:
        """See `PageAllocator`. If there are pages, there must be parts."""
        pages = super().allocate(n)
        if pages is not None:
            for group in self._windows:
                group.add(pages)
        return pages

    def free(self, pages: np.ndarray) -> None:
        """See `PageAllocator`."""
        super().free(pages)
        for kind in self._each:
            kind.drop(pages)


def make_allocator(
    num_pages: Mapping[Window | None, int],
    page_size: int,
    *,
    has_layers: bool,
    num_slots: tuple[int, int] | None = None,
) -> PageAllocator:
    """What hands out pages.

    Args:
        num_pages: By window those of its group, and for None all pages, with the dump page each.
        page_size: Tokens in a page.
        has_layers: Whether layers see all tokens.
        num_slots: Slots of states, for running requests and for prefixes; None for a model without states.
    """
    total = num_pages[None]
    kinds: list[WindowGroup | StateSlots] = [
        WindowGroup(window, total, count, page_size) for window, count in num_pages.items() if window is not None
    ]
    if num_slots is not None:
        kinds.append(StateSlots(total, *num_slots, page_size))
    return GroupedAllocator(total, kinds, has_layers=has_layers)
