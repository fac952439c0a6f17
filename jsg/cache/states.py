"""States of recurrent layers in the cache: after which prefixes one is kept, and which goes first.

A recurrent layer has one state of a request in place of keys and values of each token. All layers of a model have it in
the same *slot*. The state after a prefix is found by the last page of that prefix, so the tree need not know of it.
States are never copied: a slot of a running request becomes that of a prefix, and the request goes on in another.
"""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import final

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.cache.kinds import PrefixMatch

SLOT_TERMS = ("free", "running", "evictable", "locked")
"""What slots are, each exactly one of these. A running request writes its own, and may read locked ones."""
SEARCHED_AT_ONCE = 1024
"""Pages of a prefix in which the last state is looked for at a time, from its end."""
PASSED, USUAL, SHARED = range(3)
"""What a state is worth (`State.worth`)."""
SEVERAL = 2
"""After so many returns to a page whose state is gone, several requests are known to share it."""
PENDING, READY = 1, 2
"""Whether the step that is planned makes the state after a page, or an earlier one has."""


@final
@dataclasses.dataclass(slots=True, eq=False)
class State:
    """A state that no step writes any more.

    Attributes:
        slot: Where it is.
        num_tokens: How many tokens it has.
        above: The state with which the request that made this one went on; None at the beginning of a prompt.
        num_expected: How many requests are expected to go on from it, of which 2 stands for any number.
        page: The last page of its prefix; 0 if no further request can go on from it.
        num_uses: How many requests went on from it.
        num_users: How many rows need it now.
        num_holds: How many holds keep it.
        turn: When it was used last, as a count of uses.
    """

    slot: int
    num_tokens: int
    above: "State | None" = None
    num_expected: int = 1
    page: int = 0
    num_uses: int = 0
    num_users: int = 0
    num_holds: int = 0
    turn: int = 0

    @property
    def worth(self) -> int:
        """States of a smaller worth go first, and none takes the place of one of a larger worth."""
        return SHARED if self.num_holds or self.num_uses > 1 else min(self.num_expected, USUAL)

    @property
    def line(self) -> Iterator["State"]:
        """It and the states above that are not forgotten, from the last to the first."""
        state: State | None = self
        while state is not None:
            yield state
            while state.above is not None and not state.above.page:
                state.above = state.above.above
            state = state.above


@final
class StateSlots:
    """The slots of states: one for each running request, and some for states that no step writes any more.

    States of prefixes stay until others need their slots. Those of the smallest `State.worth` go first, and of these
    the least recently used one. At most half of all are `SHARED`; more of these count as `USUAL`. So a flood of ends to
    which nobody comes back takes the place of no shared one, and those to which nobody comes back any more leave half.

    Invariants: free + running + evictable + locked == total. At most `most_cached` are evictable or locked, so there is
    always one for a request.

    Attributes:
        num_total: Slots, without slot 0, which is that of padding.
        most_cached: The most states beside those of running requests.
        num_running: Slots that running requests write.
        num_kept: How many states of prefixes were ever kept.
        orders: See `StateKind`, as for `num_needed`.
    """

    orders, num_needed = False, 1

    def __init__(self, num_pages: int, max_running: int, most_cached: int, page_size: int):
        """Starts without states. The pages are those of tokens, page 0 included."""
        self.most_cached = most_cached
        self.num_total = max_running + most_cached
        self.num_running = self.num_kept = self._num_cached = 0
        self._page_size = page_size
        self._numbers = PageAllocator(1 + self.num_total)
        self._states: dict[int, State] = {}
        self._ends = np.zeros(num_pages, np.int8)  # by page, PENDING or READY if there is a state
        self._gone = np.zeros(num_pages, np.int64)  # by page, the turn of the state that it had before another went
        self._returns = np.zeros(num_pages, np.int8)  # by page, how often requests came back to it, up to SEVERAL
        self._pending: list[State] = []
        self._idle: tuple[OrderedDict[State, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())  # by worth
        self._turns = itertools.count(1)
        self._told: Callable[[np.ndarray, int], None] | None = None

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The slots of each of `SLOT_TERMS`, which together are all."""
        num_idle = sum(map(len, self._idle))
        return self._numbers.num_free, self.num_running, num_idle, self._num_cached - num_idle

    @property
    def num_forgotten(self) -> int:
        """How many of the states that were kept are gone: for another one, with their tokens, or by a flush."""
        return self.num_kept - len(self._states)

    def take(self) -> int:
        """A slot that a request writes from now on."""
        slots = self._numbers.allocate(1)
        assert slots is not None, "there is a slot for each row"
        self.num_running += 1
        return int(slots[0])

    def give(self, slot: int) -> None:
        """Takes back the slot of a request that stops."""
        self.num_running -= 1
        self._numbers.free(np.array([slot], np.int32))

    def keep(self, worth: int, pages: np.ndarray) -> bool:
        """Makes the slot of a running request that of a state, if another one of at most this worth can go for it.

        If one of these pages has had a state that is gone, only one that is passed, or was not used since then, goes
        for it. Otherwise, if more conversations than there are states take turns, none would find its own. But where
        several requests come back to the same page, it is no conversation, which moves on, but what they share. Then
        one goes too from which no request has gone on.
        """
        last, since = pages[-1], self._gone[pages].max()
        self._returns[last] = min(self._returns[last] + (self._gone[last] > 0), SEVERAL)
        is_shared = self._returns[last] == SEVERAL

        def yields(first: State) -> bool:
            return not since or first.turn <= since or not first.worth or (is_shared and not first.num_uses)

        return self._set_aside(worth, yields)

    def set_aside(self) -> bool:
        """As `keep`, of a state that only this request needs: the one that goes first yields, whatever it is worth."""
        return self._set_aside(SHARED, lambda _: True)

    def _set_aside(self, worth: int, yields: Callable[[State], bool]) -> bool:
        if self._num_cached == self.most_cached:
            first = next((next(iter(queue)) for queue in self._idle[: worth + 1] if queue), None)
            if first is None or not yields(first):
                return False
            self.forget(first)
        self.num_running -= 1
        self._num_cached += 1
        return True

    def miss(self, pages: np.ndarray) -> None:
        """Notes that a request has passed these pages and found no room, so that the next ones get it sooner or later.

        It comes nearer to now by half. So states that are not used any more yield after a few requests, and those of
        conversations that take turns do not.
        """
        missed = pages[self._gone[pages] > 0]
        self._gone[missed] = (self._gone[missed] + next(self._turns)) // 2

    def find(self, page: int) -> State | None:
        """The state after the prefix that ends with this page, even if a step has yet to make it."""
        return self._states.get(page)

    def publish(self, state: State, page: int, *, is_pending: bool = False) -> None:
        """Lets requests go on from a state that is kept, after a page that has none.

        With `is_pending` the step that is planned now makes it, so that only later ones may read it.
        """
        if self._gone[page] and self._returns[page] < SEVERAL:  # who came back is not known to be another one
            state.num_expected = min(state.num_expected, 1)
        self._gone[page], state.page = 0, page
        self.num_kept += 1
        self._states[page] = state
        self._ends[page] = PENDING if is_pending else READY
        self._pending += [state] * is_pending
        self._queue(state)
        self._tell(page)

    def note(self, state: State, num_expected: int) -> None:
        """Notes that another request has come to where there is a state, and how many it expects to go on there."""
        state.num_expected = max(state.num_expected, num_expected)
        self._queue(state)

    def cover(self, state: State) -> None:
        """Notes that a conversation has passed this state, and so those above, where no others are expected."""
        for above in state.line:
            if above.num_expected == 1:
                above.num_expected = 0
                self._queue(above)

    def hold(self, state: State, change: int) -> None:
        """Notes that one more hold keeps a state, or with -1 that one ends."""
        state.num_holds += change
        self._queue(state)

    def use(self, state: State) -> None:
        """Notes that one more row needs a state."""
        state.num_users += 1
        self._queue(state)

    def leave(self, state: State) -> None:
        """Notes that it no longer does."""
        state.num_users -= 1
        self._queue(state)
        self._free_if_unused(state)

    def _queue(self, state: State) -> None:
        """Puts a state that no row needs after all others of its worth."""
        state.turn = next(self._turns)
        for queue in self._idle:
            queue.pop(state, None)
        if state.page and not state.num_users:
            self._idle[state.worth][state] = None
        if 2 * len(self._idle[SHARED]) > self.most_cached:
            self._idle[USUAL][self._idle[SHARED].popitem(last=False)[0]] = None

    def forget(self, state: State) -> None:
        """Lets no further request go on from a state. Its slot is free as soon as no row needs it."""
        if not state.page:
            return
        page, state.page = state.page, 0
        self._gone[page] = state.turn
        del self._states[page]
        self._ends[page] = 0
        self._queue(state)
        self._free_if_unused(state)
        self._tell(page)

    def _free_if_unused(self, state: State) -> None:
        if not state.page and not state.num_users:
            self._num_cached -= 1
            self._numbers.free(np.array([state.slot], np.int32))

    def drop(self, pages: np.ndarray) -> None:
        """Forgets the states after pages that are freed."""
        for page in pages[self._ends[pages] > 0].tolist():
            self.forget(self._states[page])
        self._gone[pages] = self._returns[pages] = 0

    def begin_step(self) -> None:
        """Lets requests read from now on what the step that was planned before makes."""
        pending, self._pending = self._pending, []
        for state in pending:
            if state.page:
                self._ends[state.page] = READY
                self._tell(state.page)

    def _tell(self, page: int) -> None:
        if self._told is not None:
            self._told(np.array([page], np.int32), 0)

    # What a kind of state says.

    def is_whole(self, pages: np.ndarray, num_pages: int) -> bool:
        """See `StateKind`."""
        return self._ends[pages[-1]] == READY

    def num_usable(self, match: PrefixMatch, num_tokens: int) -> int:
        """See `StateKind`."""
        return self._last(match.pages[: num_tokens // self._page_size], READY)

    def awaits(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether the step that is planned makes a state with which later ones can use at least so many tokens."""
        return bool(self._pending) and self._last(match.pages, PENDING) >= num_tokens

    def _last(self, pages: np.ndarray, least: int) -> int:
        """How many tokens end with the last page that has a state which is at least PENDING or READY."""
        for end in range(len(pages), 0, -SEARCHED_AT_ONCE):
            first = max(end - SEARCHED_AT_ONCE, 0)
            if len(found := np.flatnonzero(self._ends[pages[first:end]] >= least)):
                return (first + int(found[-1]) + 1) * self._page_size
        return 0

    def observe(self, told: Callable[[np.ndarray, int], None]) -> None:
        """See `StateKind`."""
        self._told = told

    def check(self, *, is_idle: bool) -> None:
        """Asserts that the slots of each account add up to all, and that none is in use when nothing runs."""
        assert sum(self.counts) == self.num_total and self._num_cached <= self.most_cached, (
            f"{' + '.join(SLOT_TERMS)} = {self.counts} must add up to {self.num_total} slots"
        )
        assert not is_idle or not (self.num_running or self.counts[-1]), "a state was not left"
