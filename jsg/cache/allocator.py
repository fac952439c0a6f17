"""Which pages of the KV pool are free. What is in a page does not matter here."""

import numpy as np

from jsg.cache.kinds import StateKind

_USED = -1


class PageAllocator:
    """A stack of free page numbers. Page 0, which padding tokens are written to, is never on it.

    The page that was freed last is handed out first, so equal calls give equal pages.

    Invariants: `_stack[:num_free]` has each free page once. `_index[page]` is its index there, or `_USED`.

    Attributes:
        num_total: Pages of the pool, without page 0.
        num_free: Pages that are free.
        kinds: What is kept of prefixes beside their pages.
        maps: For each page group of the device, what says by page its number there; None for the page itself.
    """

    def __init__(self, num_pages: int):
        """Args: num_pages: Pages of the pool, page 0 included."""
        assert num_pages >= 1, f"a pool has page 0 at least, but got num_pages={num_pages}"
        self.num_total = num_pages - 1
        self.num_free = self.num_total
        self.kinds: tuple[StateKind, ...] = ()
        self.maps: tuple[np.ndarray | None, ...] = (None,)
        self._stack = np.arange(self.num_total, 0, -1, dtype=np.int32)
        self._index = np.full(num_pages, _USED, dtype=np.int32)
        self._index[self._stack] = np.arange(self.num_total, dtype=np.int32)

    def allocate(self, n: int) -> np.ndarray | None:
        """Takes `n` pages, int32 [n]. If fewer are free, it takes none and returns None."""
        assert n >= 0, f"the number of pages must be at least 0, but got {n}"
        if n > self.num_free:
            return None
        rest = self.num_free - n
        pages = self._stack[rest : self.num_free][::-1].copy()
        self._index[pages] = _USED
        self.num_free = rest
        return pages

    def free(self, pages: np.ndarray) -> None:
        """Gives int32 [n] pages back.

        Raises:
            AssertionError: A page is free already, is given twice, or is no page of the pool. `python -O` checks it
                too, since a page with two owners would show one request's keys to another.
        """
        if len(pages) == 0:
            return
        if pages.min() < 1 or pages.max() > self.num_total:
            raise AssertionError(f"pages to free must be in [1, {self.num_total}], but got {pages}")
        if (self._index[pages] != _USED).any():
            raise AssertionError(f"pages to free must be in use, but of {pages} some are free already")
        indices = np.arange(self.num_free, self.num_free + len(pages), dtype=np.int32)
        self._index[pages] = indices
        if (self._index[pages] != indices).any():
            self._index[pages] = _USED
            raise AssertionError(f"pages to free must differ, but got {pages}")
        # They are reversed, so that pages that are freed together come back in the order that they had.
        self._stack[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self._index[pages] = indices[::-1]
        self.num_free += len(pages)

    def is_free(self, pages: np.ndarray) -> np.ndarray:
        """Whether each of int32 [n] pages is free: bool [n]."""
        return self._index[pages] != _USED
