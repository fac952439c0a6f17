"""What rows have of further kinds of state (`jsg/cache/kinds.py`), beside their pages."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import final

import numpy as np

from jsg.cache.kinds import PrefixMatch
from jsg.cache.states import State, StateSlots
from jsg.cache.windows import WindowGroup
from jsg.sched.request import Placement, RowState


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
        """Notes that a row continues a cached prefix, all of which can be used.

        The prefix of a joined request begins after the branches, whose windows are kept for it (`Placement.before`).
        """
        firsts = [int(group.first_needed(len(match.pages))) for group in self._groups]
        for group, first in zip(self._groups, firsts, strict=True):
            group.use(match.pages[first:])
        place.seen_from = [place.first_page + first for first in firsts]

    def move(self, places: Sequence[Placement], num_next: int) -> None:
        """Gives up what rows no longer read, before a step is planned that may take `num_next` parts at most.

        The step before may still read it, so no earlier step than the planned one may write there. As long as there is
        room for the step, a window moves by several pages at a time.
        """
        for index, group in enumerate(self._groups):
            stride = group.stride if group.num_available >= num_next else 0
            left = []
            for place in places:
                begin, end = place.seen_from[index], group.first_seen(place.num_applied)
                if end > begin + stride:
                    left.append(self._pages[place.row, begin:end])
                    place.seen_from[index] = end
            if left:
                group.leave(np.concatenate(left))

    def keep(self, place: Placement, *, yields: bool) -> Callable[[], None]:
        """Keeps what the cached prefix of a row needs, until the function is called that it returns.

        With `yields` it counts as yielding. The row is released next.
        """
        row = self._pages[place.row, : place.num_tree_pages]
        firsts = (max(first, group.first_seen(place.num_dispatched)) for group, first in self._seen(place))
        seen = [row[first:].copy() for first in firsts]
        for group, pages in zip(self._groups, seen, strict=True):
            group.use(pages, yields=yields)

        def drop() -> None:
            for group, pages in zip(self._groups, seen, strict=True):
                group.leave(pages, yields=yields)

        return drop

    def release(self, place: Placement, *, distrusts: bool = False) -> None:
        """Gives back what a row has. What it has cached is in the tree already."""
        row = self._pages[place.row, : place.num_tree_pages]
        for group, first in self._seen(place):
            group.leave(row[first:])

    def _seen(self, place: Placement) -> Iterable[tuple[WindowGroup, int]]:
        """Each group with the first page that counts as in the window of a row."""
        return zip(self._groups, place.seen_from, strict=True)


@final
class StateRows:
    """In which slots the rows have their states (`RowState`), and which of them are kept.

    Nothing is copied to keep a state: the next step reads it where it is, and writes to another slot. Snapshots are
    kept so, and the state before drafts: if a draft is wrong, the next step reads the old state again.

    Args:
        slots: The slots.
        pages: The pages of rows (see `RequestTable`).
        page_size: Tokens in a page.
    """

    def __init__(self, slots: StateSlots, pages: np.ndarray, page_size: int):
        self._slots = slots
        self._pages = pages
        self._page_size = page_size

    def admit(self, place: Placement, match: PrefixMatch) -> None:
        """Gives a row a slot, and the state of the cached prefix that it continues."""
        own = place.state = RowState(self._slots.take())
        if place.num_applied:
            own.origin = own.above = state = self._slots.find(self._last_page(place))
            assert state is not None and state.num_tokens == match.num_tokens, "a row goes on where there is a state"
            self._read(own, state)

    def _last_page(self, place: Placement) -> int:
        """The page that ends with the last token that its state has."""
        return int(self._pages[place.row, place.num_applied // self._page_size - 1])

    def _read(self, own: RowState, state: State) -> None:
        """Lets the next step of a row read a state, which stays until then."""
        self._slots.use(state)
        own.read.append(state)

    def snapshot(self, place: Placement, *, is_last: bool) -> None:
        """Keeps, if there is room, the state that a row has, whose tokens end a cached page.

        Args:
            place: The row.
            is_last: Whether the row is released next. Otherwise the step that is planned makes the state.
        """
        own, page = place.state, self._last_page(place)
        num_expected = own.points.get(place.num_applied, int(is_last))
        if (there := self._slots.find(page)) is not None:
            self._slots.note(there, num_expected)
            return
        above = own.above
        if above is not None and above.num_tokens == place.num_applied:  # the row has read a state only
            return
        if own.read and own.read[-1].num_tokens == place.num_applied:  # it has one from before its drafts
            state = own.read[-1]
            state.above, state.num_expected = above, num_expected
        else:
            state = State(own.slot, place.num_applied, above, num_expected)
            first = 0 if above is None else above.num_tokens // self._page_size
            pages = self._pages[place.row, first : place.num_applied // self._page_size]
            if not self._slots.keep(state.worth, pages):
                own.missed = pages
                return
            own.slot = 0
        self._slots.publish(state, page, is_pending=not is_last)
        passed, own.above = own.origin if is_last else above, state
        if num_expected and passed is not None:
            self._slots.cover(passed)
        if not is_last:
            own.slot = self._slots.take()
            self._read(own, state)

    def double(self, place: Placement, start: int) -> bool:
        """Keeps what a row has after `start` tokens until the drafts of a step that begins there are verified.

        Returns:
            False if there is no room for that.
        """
        own = place.state
        if not own.read:
            if not self._slots.set_aside():
                return False
            state = State(own.slot, start)
            own.slot = self._slots.take()
            self._read(own, state)
        return True

    def move(self, places: Sequence[Placement], num_next: int) -> None:
        """Gives up what rows have read and gone on from, before a step is planned."""
        self._slots.begin_step()
        for place in places:
            while place.state.read and place.state.read[0].num_tokens < place.num_applied:
                self._leave(place)

    def _leave(self, place: Placement) -> None:
        """Gives up the first state that a row reads."""
        state = place.state.read.pop(0)
        state.num_uses += state is place.state.origin and state.num_tokens < place.num_applied
        self._slots.leave(state)

    def keep(self, place: Placement, *, yields: bool) -> Callable[[], None]:
        """Lets a hold keep the last state of a row, until the function is called that it returns."""
        there = self._slots.find(self._last_page(place)) if place.num_applied % self._page_size == 0 else None
        state = there or place.state.above
        if state is None:
            return lambda: None
        self._slots.hold(state, 1)
        return functools.partial(self._slots.hold, state, -1)

    def release(self, place: Placement, *, distrusts: bool = False) -> None:
        """Gives back what a row has. With `distrusts` that may be wrong, and so may be what it has gone on from."""
        own = place.state
        while own.read:
            self._leave(place)
        if distrusts and own.above is not None:
            for state in own.above.line:
                self._slots.forget(state)
        if own.missed is not None:
            self._slots.miss(own.missed)
        if own.slot:
            self._slots.give(own.slot)
        if not self._slots.num_running:  # there may be no further step
            self._slots.begin_step()
