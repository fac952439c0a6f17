"""What rows have of further kinds of state (`jsg/cache/kinds.py`), beside their pages."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, final

import numpy as np

from jsg.cache.kinds import PrefixMatch
from jsg.cache.states import State, StateSlots
from jsg.cache.windows import WindowGroup
from jsg.sched.request import Placement


class RowStates(Protocol):
    """What rows have of one kind of state, or of several. `RequestTable` tells it of each row."""

    def admit(self, place: Placement, match: PrefixMatch) -> None:
        """Notes that a row goes on behind a cached prefix, all of which can be used.

        That of a joined request begins behind the branches, whose states are kept for it (`Placement.before`).
        """
        ...

    def snapshot(self, place: Placement, *, is_last: bool) -> None:
        """Keeps, if there is room, what goes on after the tokens that its state has, which end a cached page.

        Args:
            place: The row.
            is_last: Whether the row is released next. Otherwise the step that is planned runs the token.
        """
        ...

    def double(self, place: Placement, num_new: int) -> bool:
        """Keeps what the next step of a row reads until drafts among its so many tokens are verified.

        Returns:
            False if there is no room for that.
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

    def release(self, place: Placement, *, distrusts: bool = False) -> None:
        """Gives back what a row has. What it has cached is in the tree already; with `distrusts` it may be wrong."""
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

    def snapshot(self, place: Placement, *, is_last: bool) -> None:
        """See `RowStates`. Pages keep their parts anyway."""

    def double(self, place: Placement, num_new: int) -> bool:
        """See `RowStates`. Wrong tokens are written over."""
        return True

    def move(self, places: Sequence[Placement], num_next: int) -> None:
        """See `RowStates`. Other pages can get the parts behind the windows.

        What the step before reads may be written by the next one only. As long as there is room for the step, a window
        moves by several pages at a time.
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

    def release(self, place: Placement, *, distrusts: bool = False) -> None:
        """See `RowStates`."""
        row = self._pages[place.row, : place.num_tree_pages]
        for group, first in self._seen(place):
            group.leave(row[first:])

    def _seen(self, place: Placement) -> Iterable[tuple[WindowGroup, int]]:
        """Each group with the first page that counts as in the window of a row."""
        return zip(self._groups, place.seen_from, strict=True)


@final
class StateRows:
    """In which slots the rows have their states, and which states of prefixes they go on from.

    A step reads the state of a row in its `Placement.state_source` and writes it to its `Placement.state_slot`. These
    differ in the first step after a state of a prefix, which no step writes any more, and in steps with drafts: if one
    of these is wrong, the next step reads the old state again.

    Args:
        slots: The slots.
        pages: The pages of rows (see `RequestTable`).
        page_size: Tokens in a page.
    """

    def __init__(self, slots: StateSlots, pages: np.ndarray, page_size: int):
        self._slots = slots
        self._pages = pages
        self._page_size = page_size
        self._reading: dict[int, Placement] = {}
        self._made: dict[int, list[State]] = {}
        self._left: list[State] = []
        self._second: dict[int, tuple[Placement, int]] = {}

    def admit(self, place: Placement, match: PrefixMatch) -> None:
        """See `RowStates`."""
        place.state_source = place.state_slot = self._slots.take()
        self._made[place.row] = []
        if place.num_applied:
            state = self._slots.find(self._last_page(place))
            assert state is not None and state.num_tokens == match.num_tokens, "a row goes on where there is a state"
            self._read(place, state)

    def _last_page(self, place: Placement) -> int:
        """The page that ends with the last token that its state has."""
        return int(self._pages[place.row, place.num_applied // self._page_size - 1])

    def _read(self, place: Placement, state: State) -> None:
        """Lets the next step of a row read the state of a prefix, which stays so long."""
        self._slots.use(state)
        place.state_above, place.state_source = state, state.slot
        self._reading[place.row] = place

    def _end_reading(self, place: Placement) -> State | None:
        """Lets the row read its own slot. Returns the state that it has read until now."""
        place.state_source = place.state_slot
        if self._reading.pop(place.row, None) is None:
            return None
        state = place.state_above
        assert state is not None
        if state.num_tokens < place.num_applied and state not in self._made[place.row]:
            state.num_uses += 1
        return state

    def snapshot(self, place: Placement, *, is_last: bool) -> None:
        """See `RowStates`."""
        page, above, made = self._last_page(place), place.state_above, self._made[place.row]
        is_branch = place.points.get(place.num_applied, False)
        is_spare = not is_last and place.num_applied not in place.points
        if (there := self._slots.find(page)) is not None:
            self._slots.note(there, is_branch=is_branch, is_spare=is_spare)
        elif above is None or above.num_tokens < place.num_applied:  # otherwise the row has read a state only
            if place.num_again and place.row in self._second:  # its state is the one that the last step has read
                _, old = self._second[place.row]
                self._second[place.row] = place, place.state_slot
                place.state_source = place.state_slot = old
            state = State(place.state_slot, page, place.num_applied, above, is_branch=is_branch, is_covered=is_spare)
            if self._slots.put(state, is_pending=not is_last):
                if not is_spare:
                    self._slots.cover(next((other for other in state.line if not (is_last and other in made)), None))
                self._left += filter(None, [self._end_reading(place)])
                made.append(state)
                if is_last:
                    place.state_slot = 0
                else:
                    place.state_slot = self._slots.take()
                    self._read(place, state)

    def move(self, places: Sequence[Placement], num_next: int) -> None:
        """See `RowStates`. A step has read the states of prefixes from which rows have gone on."""
        self._slots.begin_step()
        for place, slot in [*self._second.values()]:
            if not place.num_again:
                self._drop_second(place, slot)
        for place in [*self._reading.values()]:
            if place.state_above is not None and place.num_applied > place.state_above.num_tokens:
                self._left += filter(None, [self._end_reading(place)])
        self._leave()

    def _leave(self) -> None:
        for state in self._left:
            self._slots.leave(state)
        self._left.clear()

    def double(self, place: Placement, num_new: int) -> bool:
        """See `RowStates`. The step writes to another slot than it reads, which may be a second one of the row."""
        if place.state_source == place.state_slot:
            if (slot := self._slots.take_second()) is None:
                return False
            self._second[place.row] = place, place.state_slot
            place.state_slot = slot
        place.num_again = num_new
        return True

    def _drop_second(self, place: Placement, slot: int) -> None:
        del self._second[place.row]
        self._slots.give(slot, is_second=True)
        if place.row not in self._reading:
            place.state_source = place.state_slot

    def keep(self, place: Placement, *, yields: bool) -> Callable[[], None]:
        """See `RowStates`. Without a state, or if holds keep many, it may be evicted as others may."""
        there = self._slots.find(self._last_page(place)) if place.num_applied % self._page_size == 0 else None
        state = there or place.state_above
        if state is None or not state.page or (yields and not self._slots.can_hold):
            return lambda: None
        self._slots.use(state, yields=yields)
        return functools.partial(self._slots.leave, state, yields=yields)

    def release(self, place: Placement, *, distrusts: bool = False) -> None:
        """See `RowStates`. With `distrusts` the state that it has gone on from may be what is wrong."""
        self._left += filter(None, [self._end_reading(place)])
        made, above = self._made.pop(place.row), place.state_above
        if distrusts:
            for state in (*made, *(() if above is None else (above, *above.line))):
                self._slots.forget(state)
        if place.row in self._second:
            self._drop_second(*self._second[place.row])
        if place.state_slot:
            self._slots.give(place.state_slot)
        if not self._made:  # there may be no further step
            self._slots.begin_step()
            self._leave()
