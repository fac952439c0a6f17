"""Positions that jump, and the words by which the radix tree tells them apart."""

import pytest

from jsg.errors import QueueFullError, RequestError
from jsg.types import Request
from tests.sched.simulated import SimulatedEngine
from tests.sched.test_scheduler import PREFIX, make_engine, make_request


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_is_behind_a_jump_is_shared_with_the_same_jump_only(page_size: int):
    engine = make_engine(page_size=page_size)
    tokens = (*PREFIX, *PREFIX)
    for rid, jumps in (("plain", ()), ("far", ((16, 20),)), ("again", ((16, 20),)), ("twice", ((16, 20), (24, 1)))):
        engine.add(make_request(rid, tokens, position_jumps=jumps))
        engine.run_until_idle()
    cached = [answer.cached_tokens for answer in engine.answers.values()]
    assert cached == ([0, 16, 31, 24] if page_size == 1 else [0, 16, 28, 24])
    engine.check_answers()


def test_output_behind_a_jump_is_found_by_the_next_request():
    engine = make_engine()
    engine.add(make_request("first", PREFIX, max_new=5, position_jumps=((10, 7),)))
    engine.run_until_idle()
    output = tuple(engine.answers["first"].tokens)
    engine.add(make_request("second", (*PREFIX, *output, 0), position_jumps=((10, 7),)))
    engine.add(make_request("plain", (*PREFIX, *output, 0)))
    engine.run_until_idle()
    assert engine.answers["second"].cached_tokens == 16 + 4 and engine.answers["plain"].cached_tokens == 10
    engine.check_answers()


def test_a_report_shows_tokens_and_not_the_words_of_the_tree():
    engine = make_engine()
    engine.add(make_request("far", (1, 2, 3, 4), position_jumps=((2, 9),)))
    engine.add(make_request("farther", (1, 2, 3, 5), position_jumps=((2, 11),)))
    engine.run_until_idle()
    engine.add(make_request("plain", (1, 2, 6), return_cache_info=True))
    engine.run_until_idle()
    report = engine.answers["plain"].cache_report
    assert report is not None and report.first_difference is None  # the last token always runs
    engine.add(make_request("longer", (1, 2, 6, 6, 6), return_cache_info=True, namespace=""))
    engine.add(make_request("other", (1, 2, 5, 5), return_cache_info=True))
    engine.step()
    admission = engine.scheduler.running[-1].admission
    report = None if admission is None else admission.report
    assert report is not None and report.first_difference == 2
    assert report.cached_continuations in ((3, 6), (6, 3)), "a token once, at whatever position"
    engine.run_until_idle()
    engine.check_answers()


def test_shifts_that_nobody_uses_give_their_words_back():
    """There are words for three shifts: a fourth takes the cache of those that are gone, and never a live one's."""
    engine = make_engine()
    words = engine.scheduler.table.words
    words._limit = 4
    for shift in (1, 2, 3):
        engine.add(make_request(f"r{shift}", PREFIX, position_jumps=((8, shift),)))
        engine.run_until_idle()
    assert engine.cache.num_evictable > 16
    engine.add(make_request("held", PREFIX, max_new=0, hold=True, position_jumps=((8, 2),)))
    engine.run_until_idle()
    engine.add(make_request("r4", PREFIX, position_jumps=((8, 4),)))
    assert engine.cache.num_evictable == 0 and engine.cache.num_protected == 16
    assert set(words._numbers) == {2, 4}
    engine.add(make_request("r5", PREFIX, position_jumps=((8, 5),)))
    with pytest.raises(QueueFullError, match="position jumps"):
        engine.add(make_request("r6", PREFIX, position_jumps=((8, 6),)))
    engine.run_until_idle()
    engine.add(make_request("r6", PREFIX, position_jumps=((8, 6),)))
    engine.add(make_request("held 2", PREFIX, position_jumps=((8, 2),)))
    engine.run_until_idle()
    assert engine.answers["held 2"].cached_tokens == 15
    engine.abort("held")
    engine.run_until_idle()
    assert not words._users
    engine.check_answers()


def engine_out_of_words() -> SimulatedEngine:
    """There are words for three shifts, and 1, 2 and 3 have them, though nobody uses them any more."""
    engine = make_engine()
    engine.scheduler.table.words._limit = 4
    for shift in (1, 2, 3):
        engine.add(make_request(f"r{shift}", PREFIX, position_jumps=((8, shift),)))
        engine.run_until_idle()
    return engine


def test_a_request_with_a_new_shift_and_an_old_one_that_nobody_uses():
    """The old one has a number, which must not be taken back to make room for the new one."""
    engine = engine_out_of_words()
    engine.add(make_request("both", PREFIX, position_jumps=((4, 2), (8, 7))))
    assert set(engine.scheduler.table.words._numbers) == {2, 9}
    engine.run_until_idle()
    engine = engine_out_of_words()
    engine.add(make_request("old and new", PREFIX, position_jumps=((4, 2), (8, 5))))
    engine.run_until_idle()
    engine.check_answers()


def test_a_request_refused_for_want_of_words_evicts_nothing():
    engine = engine_out_of_words()
    engine.add(make_request("held", PREFIX, max_new=0, hold=True, position_jumps=((3, 1), (5, 1), (7, 1))))
    engine.add(make_request("plain", tuple(reversed(PREFIX))))
    engine.run_until_idle()
    words, num_evictable = engine.scheduler.table.words, engine.cache.num_evictable
    numbers, users = dict(words._numbers), dict(words._users)
    with pytest.raises(QueueFullError, match="position jumps"):
        engine.add(make_request("refused", PREFIX, position_jumps=((8, 9),)))
    assert engine.cache.num_evictable == num_evictable > 0
    assert (words._numbers, words._users) == (numbers, users), "nothing is kept of it"
    engine.abort("held")
    engine.run_until_idle()
    engine.check_answers()


@pytest.mark.parametrize(
    "jumps", [((2, 0),), ((2, -1),), ((9, 1),), ((-1, 1),), ((3, 1), (3, 1)), ((3, 1), (2, 1)), ((1, 2**31),)]
)
def test_jumps_that_make_no_sense_are_refused(jumps: tuple[tuple[int, int], ...]):
    with pytest.raises(RequestError, match="position_jumps must be pairs of an ascending index"):
        Request(rid="r", input_ids=(1,) * 8, position_jumps=jumps)
