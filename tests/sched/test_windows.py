"""Layers with a window: which cached prefixes can still be used, and what is decided by that."""

import numpy as np
import pytest

from jsg.types import Request
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.test_scheduler import make_request

WINDOW = 4


def make_engine(num_parts: int, **knobs: object) -> SimulatedEngine:
    """An engine that runs one request after another, and has parts for some of its pages."""
    shape = EngineShape(
        **{"num_pages": 100, "max_running": 1, "windows": (WINDOW,), "part_rate": num_parts / 100} | knobs
    )  # pyright: ignore[reportArgumentType]
    engine = SimulatedEngine(shape)
    (group,) = engine.scheduler.table.windows
    assert group.num_total == num_parts
    return engine


def prompt(rid: str, first: int, length: int, *more: int, **fields: object) -> Request:
    """A prompt that begins like no other with another `first`, and has `length` tokens and then more."""
    tokens = np.random.default_rng(first).integers(2, 7, length - 1)
    return make_request(rid, (first, *tokens.tolist(), *more), **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_waiting_request_needs_goes_last(waits: bool):
    engine = make_engine(30)
    engine.add(prompt("first", 2, 12, max_new=1))
    engine.run_until_idle()
    later = prompt("later", 2, 12, 3, max_new=1)
    for index in range(4):
        engine.add(prompt(f"other {index}", 3 + index, 12, max_new=1, priority=1))
    if waits:
        engine.add(later)
    engine.run_until_idle()
    if not waits:
        engine.add(later)
    engine.run_until_idle()
    assert engine.answers["later"].cached_tokens == (12 if waits else 0)
    engine.check_answers()


def with_a_gone_beginning() -> SimulatedEngine:
    """The cache has 20 tokens of a prompt that begins with 2, whose first 14 have no parts, and 18 of one with 3."""
    engine = make_engine(24)
    for first, length in ((2, 20), (3, 18)):
        engine.add(prompt(f"cached {first}", first, length, max_new=0))
        engine.run_until_idle()
    (group,) = engine.scheduler.table.windows
    assert (engine.cache.stats().num_cached_tokens, group.counts) == (38, (0, 24, 0))
    return engine


def test_the_order_of_the_queue_goes_by_what_can_be_used():
    engine = with_a_gone_beginning()
    for first, length in ((2, 10), (3, 8)):
        engine.add(prompt(f"{first}", first, length, 6, max_new=1))
    engine.run_until_idle()
    order = dict.fromkeys(entry.running.request.rid for batch in engine.batches for entry in batch.entries)
    assert [*order][-2:] == ["3", "2"], "the longer prefix cannot be used"
    assert engine.answers["3"].cached_tokens == 8
    engine.check_answers()


def test_a_report_says_how_much_is_cached_in_vain():
    engine = with_a_gone_beginning()
    engine.add(prompt("asked", 2, 4, 6, 6, max_new=1, return_cache_info=True))
    engine.run_until_idle()
    report = engine.answers["asked"].cache_report
    assert report is not None and report.first_difference is None
    assert (report.matched_tokens, report.unusable_tokens, report.matchable_tokens) == (0, 4, 5)
    engine.check_answers()
