"""States of recurrent layers in the cache: after which prefixes one is kept, and which goes first.

A recurrent layer has one state of a request in place of keys and values of each token. All layers of a model have it in
the same *slot*. The state after a prefix is found by the last page of that prefix, so the tree need not know of it.
States are never copied: a slot of a running request becomes that of a prefix, and the request goes on in another.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator
from typing import final

import numpy as np

from jsg.cache.allocator import PageAllocator
from jsg.cache.kinds import PrefixMatch

SLOT_TERMS = ("free", "running", "evictable", "locked")
"""What slots are, each exactly one of these."""
SEARCHED_AT_ONCE = 1024
"""Pages of a prefix in which the last state is looked for at a time, from its end."""


@final
class State:
    """The state after a cached prefix.

    Attributes:
        slot: Where it is.
        page: The last page of the prefix; 0 once the prefix is gone.
        num_tokens: Tokens of the prefix.
        above: The state with which the request that made this one went on; None at the beginning of a prompt.
        is_branch: Whether other prompts are known to branch here.
        is_covered: Whether a request that went on from it has left a state further down, or another prompt that goes on
            here is not expected.
        num_uses: How many requests went on from it.
        num_users: How many rows and holds need it now.
        num_holds: How many of them are holds.
    """

    __slots__ = (
        "above",
        "is_branch",
        "is_covered",
        "num_holds",
        "num_tokens",
        "num_users",
        "num_uses",
        "page",
        "slot",
    )

    def __init__(
        self,
        slot: int,
        page: int,
        num_tokens: int,
        above: "State | None" = None,
        *,
        is_branch: bool = False,
        is_covered: bool = False,
    ):
        self.slot = slot
        self.page = page
        self.num_tokens = num_tokens
        self.above = above
        self.is_branch = is_branch
        self.is_covered = is_covered
        self.num_uses = self.num_users = self.num_holds = 0

    @property
    def line(self) -> Iterator["State"]:
        """The states above, from the last to the first."""
        above = self.above
        while above is not None:
            yield above
            above = above.above

    @property
    def goes_first(self) -> bool:
        """Whether it is evicted before all others: at most one request came back, and has left another state below."""
        return self.is_covered and not self.is_branch and self.num_uses <= 1


@final
class StateSlots:
    """The slots of states: one for each running request, and some for prefixes.

    Without users, states of prefixes stay until others need their slots. Those that `State.goes_first` names go first.
    Then the least recently used one goes, but those from which several requests have gone on go last, as long as they
    are no more than half of all: a flood of ends to which nobody comes back takes the place of none of them.

    Invariants: free + running + evictable + locked == total. Prefixes and requests with a second slot have at most
    `most_cached` of them, so there is always one for a request.

    Attributes:
        slots: int32, by page the slot with the state after it; 0 for none.
        most_cached: The most states of prefixes.
        num_running: Slots of running requests.
        num_yielding: Locked states that only holds need.
        num_kept: How many states of prefixes were ever kept.
        orders: See `StateKind`.
    """

    orders = False

    def __init__(self, num_pages: int, max_running: int, most_cached: int, page_size: int):
        """Starts without states. The pages are those of tokens, page 0 included."""
        self.slots = np.zeros(num_pages, np.int32)
        self.most_cached = most_cached
        self.num_running = self.num_yielding = self.num_kept = 0
        self._page_size = page_size
        self._numbers = PageAllocator(1 + max_running + most_cached)
        self._states: dict[int, State] = {}
        self._idle: tuple[OrderedDict[State, None], ...] = (OrderedDict(), OrderedDict(), OrderedDict())
        self._num_cached = self._num_second = 0
        self._pending: set[int] = set()
        self._told: Callable[[np.ndarray, int], None] | None = None

    @property
    def num_total(self) -> int:
        """Slots, without slot 0, which is that of padding."""
        return self._numbers.num_total

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """The slots of each of `SLOT_TERMS`, which together are all."""
        num_idle = sum(map(len, self._idle))
        return self._numbers.num_free, self.num_running, num_idle, self._num_cached - num_idle

    @property
    def can_hold(self) -> bool:
        """Whether a hold may keep one more state from being evicted: all together may half of them."""
        return 2 * self.num_yielding < self.most_cached

    @property
    def num_forgotten(self) -> int:
        """How many of the states that were kept are gone: for another one, with their tokens, or by a flush."""
        return self.num_kept - len(self._states)

    @property
    def num_available(self) -> int:
        """See `StateKind`: states that can be kept of prefixes."""
        return self.most_cached - self._num_cached - self._num_second + sum(map(len, self._idle))

    # Slots of requests.

    def take(self) -> int:
        """The slot of a request that begins to run."""
        slots = self._numbers.allocate(1)
        assert slots is not None, "there is a slot for each row"
        self.num_running += 1
        return int(slots[0])

    def take_second(self) -> int | None:
        """A second slot of a request, if there is one that no row and no hold needs."""
        if not self._make_room(is_spare=False):
            return None
        self._num_second += 1
        return self.take()

    def give(self, slot: int, *, is_second: bool = False) -> None:
        """Takes back a slot of a request: its only one when it stops, or either of two."""
        self._num_second -= is_second
        self.num_running -= 1
        self._numbers.free(np.array([slot], np.int32))

    # States of prefixes.

    def find(self, page: int) -> State | None:
        """The state after the prefix that ends with this page, even if a step has yet to make it."""
        return self._states.get(page)

    def put(self, state: State, *, is_pending: bool = False) -> bool:
        """Makes the slot of a running request that of a prefix, if there is room and the prefix has no state.

        Args:
            state: The new state. The request has its slot no more.
            is_pending: Whether the step that is planned now makes the state, so that only later ones may read it.
        """
        if state.page in self._states or not self._make_room(is_spare=state.goes_first):
            return False
        self.num_running -= 1
        self._num_cached += 1
        self.num_kept += 1
        self._states[state.page] = state
        self.slots[state.page] = state.slot
        if is_pending:
            self._pending.add(state.page)
        self._queue(state)
        self._tell(state.page)
        return True

    def _make_room(self, *, is_spare: bool) -> bool:
        """Evicts a state if no other one may be kept. False if all have users, or are worth more than a spare one."""
        if self._num_cached + self._num_second < self.most_cached:
            return True
        queue = next(filter(None, self._idle[:1] if is_spare else self._idle), None)
        if queue is None:
            return False
        self.forget(next(iter(queue)))
        return True

    def cover(self, state: State | None) -> None:
        """Notes that a conversation has gone on from this state, and so from those above."""
        for above in () if state is None else (state, *state.line):
            if not above.is_covered:
                above.is_covered = True
                self._queue(above)

    def note(self, state: State, *, is_branch: bool, is_spare: bool) -> None:
        """Notes that another request has come to where there is a state, whose own would be worth so much."""
        state.is_branch |= is_branch
        state.is_covered &= is_spare
        self._queue(state)

    def _queue(self, state: State) -> None:
        """Puts a state that nobody needs behind those of its kind, which go before it."""
        for queue in self._idle:
            queue.pop(state, None)
        first, usual, shared = self._idle
        if state.page and not state.num_users:
            (first if state.goes_first else shared if state.num_uses > 1 else usual)[state] = None
        if 2 * len(shared) > self.most_cached:
            usual[shared.popitem(last=False)[0]] = None

    def _tell(self, page: int) -> None:
        if self._told is not None:
            self._told(np.array([page], np.int32), 0)

    def begin_step(self) -> None:
        """Lets requests read from now on what the step that was planned before makes."""
        pending, self._pending = self._pending, set()
        for page in pending:
            self._tell(page)

    def use(self, state: State, *, yields: bool = False) -> None:
        """Notes that one more row needs a state; with `yields`, that a hold does."""
        self._count(state, 1, yields=yields)

    def leave(self, state: State, *, yields: bool = False) -> None:
        """Notes that it no longer does."""
        self._count(state, -1, yields=yields)
        if not state.page and not state.num_users:
            self._free(state)

    def _count(self, state: State, change: int, *, yields: bool) -> None:
        self.num_yielding -= 0 < state.num_users == state.num_holds
        state.num_users += change
        state.num_holds += change * yields
        self.num_yielding += 0 < state.num_users == state.num_holds
        self._queue(state)

    def forget(self, state: State) -> None:
        """Lets no further request go on from a state. Its slot is free as soon as nobody needs it."""
        if not state.page:
            return
        page, state.page, state.above = state.page, 0, None
        del self._states[page]
        self._pending.discard(page)
        self.slots[page] = 0
        self._queue(state)
        if not state.num_users:
            self._free(state)
        self._tell(page)

    def _free(self, state: State) -> None:
        self._num_cached -= 1
        self._numbers.free(np.array([state.slot], np.int32))

    def drop(self, pages: np.ndarray) -> None:
        """Forgets the states after pages that are freed."""
        for page in pages[self.slots[pages] > 0].tolist():
            self.forget(self._states[page])

    # What a kind of state says.

    def num_usable(self, match: PrefixMatch, num_tokens: int) -> int:
        """See `StateKind`."""
        return self._last(match, num_tokens // self._page_size, self._pending) * self._page_size

    def awaits(self, match: PrefixMatch, num_tokens: int) -> bool:
        """Whether the step that is planned makes a state with which later ones can use at least so many tokens."""
        return bool(self._pending) and self._last(match, len(match.pages), ()) * self._page_size >= num_tokens

    def _last(self, match: PrefixMatch, num_pages: int, without: Container[int]) -> int:
        """How many of so many leading pages end with the last one that has a state, but for these."""
        for end in range(num_pages, 0, -SEARCHED_AT_ONCE):
            first = max(end - SEARCHED_AT_ONCE, 0)
            pages = match.pages[first:end]
            for index in np.flatnonzero(self.slots[pages])[::-1].tolist():
                if int(pages[index]) not in without:
                    return first + index + 1
        return 0

    def keep_longest(self, matches: Iterable[PrefixMatch], num_next: int) -> None:
        """See `StateKind`. A step takes no slots but those that are kept for requests."""

    def growth(self, num_there: int, num_more: int, num_next: int) -> int:
        """See `StateKind`: a request has its slot."""
        return 0

    def observe(self, told: Callable[[np.ndarray, int], None]) -> None:
        """See `StateKind`."""
        self._told = told

    def check(self, *, is_idle: bool) -> None:
        """Asserts that the slots of each account add up to all, and that none is in use when nothing runs."""
        assert sum(self.counts) == self.num_total and self._num_cached + self._num_second <= self.most_cached, (
            f"{' + '.join(SLOT_TERMS)} = {self.counts} must add up to {self.num_total} slots"
        )
        assert not is_idle or not (self.num_running or self.counts[-1]), "a state was not left"
