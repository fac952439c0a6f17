"""Slots of states: which states of prefixes there are, which goes first, and that no slot has two owners."""

import numpy as np
import pytest

from jsg.cache import radix
from jsg.cache.kinds import PrefixMatch
from jsg.cache.node import Root
from jsg.cache.radix import RadixCache
from jsg.cache.states import State, StateSlots
from jsg.cache.windows import make_allocator
from tests.cache.integrity import check_states


def make(most_cached: int = 3, max_running: int = 2, page_size: int = 1) -> StateSlots:
    return StateSlots(40, max_running, most_cached, page_size)


def put(
    slots: StateSlots, page: int, *, above: State | None = None, num_expected: int = 1, is_pending: bool = False
) -> State:
    """A state after `page`, whose number is that of the tokens, made by a request that begins and stops here."""
    state = State(slots.take(), page, above, num_expected)
    if slots.keep(state.worth, np.array([page])):
        slots.publish(state, page, is_pending=is_pending)
    else:
        slots.give(state.slot)
    check_states(slots)
    return state


def kept(slots: StateSlots) -> list[int]:
    return [page for page in range(40) if slots.find(page)]


def match(*pages: int) -> PrefixMatch:
    return PrefixMatch(np.array(pages, np.int32), Root(""), len(pages))


def test_the_least_recently_used_state_goes_first():
    slots = make()
    first, second, _ = (put(slots, page) for page in (1, 2, 3))
    slots.use(first)
    slots.leave(first)
    put(slots, 4)
    assert kept(slots) == [1, 3, 4] and second.page == 0
    assert slots.counts == (2, 0, 3, 0)


def test_what_a_conversation_has_passed_goes_before_all_others():
    slots = make()
    old, message = put(slots, 1), put(slots, 2)
    answer = put(slots, 3, above=message)
    slots.cover(message)
    put(slots, 4, above=answer)
    assert kept(slots) == [1, 3, 4], "although another one was used less recently"
    slots.cover(answer)
    put(slots, 5)
    assert kept(slots) == [1, 4, 5] and old.page == 1


def test_a_branch_and_a_state_with_two_users_are_not_passed():
    slots = make(most_cached=4)
    branch, shared, passed = put(slots, 1, num_expected=2), put(slots, 2), put(slots, 3)
    shared.num_uses = 2
    for state in (branch, shared, passed):
        slots.cover(state)
    put(slots, 4)
    put(slots, 5)
    assert kept(slots) == [1, 2, 4, 5]


def test_what_several_requests_went_on_from_goes_last_up_to_half_of_all():
    slots = make(most_cached=4)
    for page in (1, 2, 3):
        state = put(slots, page)
        state.num_uses = 2
        slots.use(state)
        slots.leave(state)
        check_states(slots)
    for page in (4, 5):
        put(slots, page)
    assert kept(slots) == [2, 3, 4, 5], "one more than half is like any other"
    for page in (6, 7, 8):
        put(slots, page)
    assert kept(slots) == [2, 3, 7, 8]


def test_a_spare_state_takes_no_place_of_another():
    slots = make()
    first = put(slots, 1, num_expected=0)
    for page in (2, 3):
        put(slots, page)
    put(slots, 4, num_expected=0)
    assert kept(slots) == [2, 3, 4] and not first.page
    put(slots, 5)
    put(slots, 6, num_expected=0)
    assert kept(slots) == [2, 3, 5]
    slots.note(slots.find(3) or first, 0)
    put(slots, 7)
    assert kept(slots) == [3, 5, 7], "it was used last"


def test_a_state_that_is_needed_stays_until_its_last_user_leaves():
    slots = make(most_cached=1)
    state = put(slots, 1)
    slots.use(state)
    slots.use(state)
    put(slots, 2)
    assert kept(slots) == [1], "there is no room for another one"
    slots.leave(state)
    slots.forget(state)
    assert not kept(slots) and slots.counts == (2, 0, 0, 1), "nobody goes on from it, but a row may still read it"
    slots.leave(state)
    check_states(slots)
    assert slots.counts == (3, 0, 0, 0)


def test_states_go_with_their_pages():
    slots = make()
    for page in (1, 2, 3):
        put(slots, page)
    slots.drop(np.array([2, 3, 9], np.int32))
    check_states(slots)
    assert kept(slots) == [1] and slots.counts == (4, 0, 1, 0)


def test_a_prefix_is_usable_up_to_its_last_state_that_is_there():
    slots = make()
    put(slots, 12)
    put(slots, 14, is_pending=True)
    prefix = match(11, 12, 13, 14, 15)
    assert [slots.num_usable(prefix, count) for count in range(6)] == [0, 0, 2, 2, 2, 2]
    assert slots.awaits(prefix, 4) and not slots.awaits(prefix, 5)
    slots.begin_step()
    assert not slots.awaits(prefix, 4) and slots.num_usable(prefix, 5) == 4
    assert make(page_size=4).num_usable(prefix, 20) == 0


def test_what_a_request_has_before_drafts_takes_the_place_of_one_that_nobody_needs_now():
    slots = make(most_cached=2)
    slots.use(put(slots, 1))
    shared = put(slots, 2)
    shared.num_uses = 2
    slots.note(shared, 0)
    before = State(slots.take(), 5)
    assert slots.set_aside() and kept(slots) == [1]
    slots.use(before)
    check_states(slots)
    slots.take()
    assert not slots.set_aside()
    slots.publish(before, 9)
    slots.leave(before)
    check_states(slots)
    assert kept(slots) == [1, 9] and slots.counts == (1, 1, 1, 1)


def test_states_are_told_of_when_they_can_be_read():
    slots, told = make(), []
    slots.observe(lambda pages, _: told.append((pages.tolist(), slots.num_usable(match(7), 1))))
    state = put(slots, 7, is_pending=True)
    slots.begin_step()
    slots.forget(state)
    assert told == [([7], 0), ([7], 1), ([7], 0)]


def test_holds_keep_half_of_the_states_at_most():
    slots = make(most_cached=4)
    held = [put(slots, page) for page in (1, 2, 3)]
    for state in held:
        slots.hold(state, 1)
        check_states(slots)
    for page in (4, 5, 6, 7):
        put(slots, page)
    assert kept(slots) == [2, 3, 6, 7], "the one that was held last stays"
    slots.hold(held[1], -1)
    put(slots, 8)
    put(slots, 9)
    put(slots, 10)
    assert kept(slots) == [3, 8, 9, 10]


def test_whether_a_node_can_be_used_is_seen_without_its_path(monkeypatch: pytest.MonkeyPatch):
    allocator = make_allocator({None: 2000}, 1, has_layers=True, num_slots=(2, 4))
    cache = RadixCache(1, allocator)
    stem = np.arange(1000, dtype=np.int32)
    for end in range(100):
        tokens = np.append(stem, np.int32(1000 + end))
        there = cache.match(tokens)
        cache.insert(tokens, np.concatenate([there.pages, allocator.allocate(len(tokens) - there.num_tokens)]))
    joined, join = [], radix._join_pages
    monkeypatch.setattr(radix, "_join_pages", lambda path: joined.append(pages := join(path)) or pages)
    assert not any(map(cache.is_usable, cache._nodes()))
    assert sum(map(len, joined)) <= allocator.num_total, "each page is looked at once at most"


def test_who_comes_back_to_a_state_that_is_gone_takes_the_place_of_none_that_was_used_since():
    """Five conversations take turns. Two find their state each time, where the least recently used would always go."""
    slots, found = make(most_cached=2), []
    for turn in range(20):
        page = turn % 5 + 1
        if (there := slots.find(page)) is None:
            put(slots, page)
        else:
            found.append(page)
            there.num_uses = 1
            slots.note(there, 0)
    assert len(found) >= 5 and len({*found}) == 2
    for page in (11, 12, 13):
        put(slots, page)
    assert kept(slots) == [12, 13], "others come as ever"


def test_those_that_are_not_used_any_more_make_room():
    slots = make(most_cached=2)
    for _ in range(3):
        for page in (1, 2, 3):
            if slots.find(page) is None:
                put(slots, page)
    assert {*kept(slots)} & {1, 2, 3} == {*kept(slots)}
    for _ in range(3):
        for page in (4, 5):
            if slots.find(page) is None:
                put(slots, page)
    assert kept(slots) == [4, 5]
