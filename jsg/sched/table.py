"""The request table on the host: which pages each running request's positions are in."""

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.sched.records import Placement, RunningRequest
from jsg.types import CacheReport


class RequestTable:
    """Rows of pages, and the one place where pages change hands between allocator, rows and radix tree.

    A row's leading `num_tree_pages` belong to the tree and are locked; the rest, up to the last dispatched position,
    are its own. The device holds a copy; `dirty_rows` are those whose copy there is behind in something that the
    forward pass does not write itself.

    Invariant: free + evictable + protected + uncached == total, in pages.
    """

    def __init__(self, max_running: int, max_context: int, allocator: PageAllocator, cache: RadixCache):
        self.page_size = cache.page_size
        self.pages = np.zeros((max_running + 1, -(-max_context // self.page_size)), np.int32)
        self.dirty_rows: set[int] = set()
        self.num_uncached_pages = 0
        self._allocator = allocator
        self._cache = cache
        self._free_rows = list(range(max_running, 0, -1))

    @property
    def num_free_rows(self) -> int:
        """Requests that could be admitted before one finishes."""
        return len(self._free_rows)

    @property
    def num_available_pages(self) -> int:
        """Pages that are free or could be."""
        return self._allocator.num_free + self._cache.num_evictable

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_size)

    def needs_page(self, place: Placement) -> bool:
        """Whether the row's next token needs a page of its own."""
        return place.num_dispatched % self.page_size == 0

    def room(self, place: Placement) -> int:
        """New tokens that the row's last page and the available pages hold."""
        return self.num_available_pages * self.page_size + -place.num_dispatched % self.page_size

    def admit(self, running: RunningRequest) -> Placement:
        """Gives a request a row and locks its longest cached prefix. There must be a free row."""
        tokens = running.tokens[: running.match_limit]
        match = self._cache.match(tokens, running.request.namespace)
        row = self._free_rows.pop()
        self.pages[row, : len(match.pages)] = match.pages
        if len(match.pages):
            self.dirty_rows.add(row)
        return Placement(row, self._cache.lock(match), len(match.pages), match.num_tokens)

    def explain(self, running: RunningRequest, place: Placement) -> CacheReport:
        """Why the cached prefix of a request that was admitted just now ended where it did."""
        tokens = running.tokens[: running.match_limit]
        return self._cache.explain(place.lock.node, tokens, running.request.namespace)

    def release(self, place: Placement, *, forgets: bool = False) -> None:
        """Takes a request's row, lock and own pages back.

        Args:
            place: Where it lived.
            forgets: Evict its cached prefix too, as far as it is nobody else's.
        """
        own = self.pages[place.row, place.num_tree_pages : self.pages_for(place.num_dispatched)]
        self._allocator.free(own)
        self.num_uncached_pages -= len(own)
        self._cache.unlock(place.lock)
        if forgets:
            self._cache.forget(place.lock)
        self._free_rows.append(place.row)
        self.dirty_rows.discard(place.row)

    def grow(self, place: Placement, num_tokens: int) -> None:
        """Gives a row pages for so many new tokens, at most `room`, evicting where it must."""
        held = self.pages_for(place.num_dispatched)
        needed = self.pages_for(place.num_dispatched + num_tokens) - held
        self.pages[place.row, held : held + needed] = self._allocate(needed)
        self.num_uncached_pages += needed
        place.num_dispatched += num_tokens

    def grow_by_one(self, places: list[Placement]) -> None:
        """Room for one new token in each row. The pages must be available."""
        needing = [place for place in places if self.needs_page(place)]
        pages = self._allocate(len(needing))
        rows = [place.row for place in needing]
        self.pages[rows, [place.num_dispatched // self.page_size for place in needing]] = pages
        self.num_uncached_pages += len(pages)
        for place in places:
            place.num_dispatched += 1

    def shrink(self, place: Placement, num_tokens: int) -> None:
        """Takes the last new tokens of a row back, and pages that hold nothing else. None of them may be shared."""
        left = place.num_dispatched - num_tokens
        held, kept = self.pages_for(place.num_dispatched), self.pages_for(left)
        assert kept >= place.num_tree_pages, "tokens that are taken back lie in the radix tree"
        self._allocator.free(self.pages[place.row, kept:held])
        self.num_uncached_pages -= held - kept
        place.num_dispatched = left

    def _allocate(self, num_pages: int) -> np.ndarray:
        if num_pages > self._allocator.num_free:
            self._cache.evict(num_pages - self._allocator.num_free)
        pages = self._allocator.allocate(num_pages)
        assert pages is not None, "the plan asks only for pages that are available"
        return pages

    def share(self, running: RunningRequest, place: Placement, num_tokens: int) -> int:
        """Puts the first `num_tokens` of a row, as far as they fill pages, into the radix tree.

        Where the tree already had them the row's duplicates are freed and the row points to the tree's.

        Returns:
            Tokens that were in the tree before: the row must not write them.
        """
        count = num_tokens // self.page_size
        if not self._cache.enabled or count <= place.num_tree_pages:
            return place.num_tree_pages * self.page_size
        own = self.pages[place.row, :count].copy()
        result = self._cache.insert(running.tokens[: count * self.page_size], own, running.request.namespace)
        lock = self._cache.lock(result)
        self._cache.unlock(place.lock)
        duplicates = own[place.num_tree_pages : result.num_existing]
        if len(duplicates):
            self._allocator.free(duplicates)
            self.pages[place.row, :count] = result.pages
            self.dirty_rows.add(place.row)
        self.num_uncached_pages -= count - place.num_tree_pages
        place.lock, place.num_tree_pages = lock, count
        return result.num_existing * self.page_size

    def check_integrity(self) -> None:
        """Asserts the slot equation, and that nothing is locked when nothing runs. Costs less than a microsecond."""
        parts = (
            self._allocator.num_free,
            self._cache.num_evictable,
            self._cache.num_protected,
            self.num_uncached_pages,
        )
        assert sum(parts) == self._allocator.num_total, (
            f"free + evictable + protected + uncached = {parts} must add up to {self._allocator.num_total} pages"
        )
        if self.num_free_rows == len(self.pages) - 1:
            assert not self._cache.num_protected, "a prefix is locked, but no request runs"
            assert not self.num_uncached_pages, "a row holds pages, but no request runs"
