"""What rows have of further kinds of state (`jsg/cache/kinds.py`), beside their pages."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, final

import numpy as np

from jsg.cache.kinds import PrefixMatch
from jsg.cache.windows import WindowGroup
from jsg.sched.request import Placement


class RowStates(Protocol):
    """What rows have of one kind of state, or of several. `RequestTable` tells it of each row."""

    def admit(self, place: Placement, match: PrefixMatch) -> None:
        """Notes that a row goes on behind a cached prefix, all of which can be used.

        That of a joined request begins behind the branches, whose states are kept for it (`Placement.before`).
        """
        ...

    def move(self, places: Sequence[Placement], num_next: int) -> None:
        """Gives up what rows no longer read, before a step is planned that may take `num_next` units at most."""
        ...

    def keep(self, place: Placement, *, yields: bool) -> Callable[[], None]:
        """Keeps what goes on behind the cached prefix of a row, until the function is called that it returns.

        With `yields` the state counts as yielding. The row is released next.
        """
        ...

    def release(self, place: Placement) -> None:
        """Gives back what a row has. What it has cached is in the tree already."""
        ...

    def check(self, *, is_idle: bool) -> None:
        """Asserts that the units of each account add up to all, and that nothing is in use when nothing runs."""
        ...


@final
class WindowRows:
    """Which pages the windows of rows reach, in each group of layers with a window.

    Args:
        groups: The groups. `Placement.seen_from` is in their order.
        pages: The pages of rows (see `RequestTable`).
    """

    def __init__(self, groups: Sequence[WindowGroup], pages: np.ndarray):
        self._groups = groups
        self._pages = pages

    def admit(self, place: Placement, match: PrefixMatch) -> None:
        """See `RowStates`."""
        firsts = [int(group.first_needed(len(match.pages))) for group in self._groups]
        for group, first in zip(self._groups, firsts, strict=True):
            group.use(match.pages[first:])
        place.seen_from = [place.first_page + first for first in firsts]

    def move(self, places: Sequence[Placement], num_next: int) -> None:
        """See `RowStates`. Other pages can get the parts behind the windows.

        What the step before reads may be written by the next one only. As long as there is room for the step, a window
        moves by several pages at a time.
        """
        for index, group in enumerate(self._groups):
            stride = group.stride if group.num_available >= num_next else 0
            left = []
            for place in places:
                begin, end = place.seen_from[index], group.first_seen(place.num_dispatched)
                if end > begin + stride:
                    left.append(self._pages[place.row, begin:end])
                    place.seen_from[index] = end
            if left:
                group.leave(np.concatenate(left))

    def keep(self, place: Placement, *, yields: bool) -> Callable[[], None]:
        """See `RowStates`."""
        row = self._pages[place.row, : place.num_tree_pages]
        firsts = (max(first, group.first_seen(place.num_dispatched)) for group, first in self._seen(place))
        seen = [row[first:].copy() for first in firsts]
        for group, pages in zip(self._groups, seen, strict=True):
            group.use(pages, yields=yields)

        def drop() -> None:
            for group, pages in zip(self._groups, seen, strict=True):
                group.leave(pages, yields=yields)

        return drop

    def release(self, place: Placement) -> None:
        """See `RowStates`."""
        row = self._pages[place.row, : place.num_tree_pages]
        for group, first in self._seen(place):
            group.leave(row[first:])

    def check(self, *, is_idle: bool) -> None:
        """See `RowStates`."""
        for group in self._groups:
            group.check(is_idle=is_idle)

    def _seen(self, place: Placement) -> Iterable[tuple[WindowGroup, int]]:
        """Each group with the first page that counts as in the window of a row."""
        return zip(self._groups, place.seen_from, strict=True)
