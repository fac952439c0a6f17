"""Why no more of a prompt came from the cache, in a word."""

from typing import Any

import pytest

from jsg.cache_report import CacheReport, EvictionCause, MissReason
from jsg.types import Request
from jsg.window import Window
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.test_image_keys import SHAPE, image
from tests.sched.test_image_keys import request as with_images
from tests.sched.test_scheduler import make_request

PROMPT = (1, 2, 3, 4, 5, 6, 1, 2)


def engine_of(**knobs: Any) -> SimulatedEngine:
    return SimulatedEngine(EngineShape(**knobs))


def run(engine: SimulatedEngine, *requests: Request) -> None:
    """Runs one request after another."""
    for request in requests:
        engine.add(request)
        engine.run_until_idle()


def why(engine: SimulatedEngine, request: Request) -> CacheReport:
    """The report of a request, which runs now."""
    run(engine, request)
    report = engine.answers[request.rid].cache_report
    assert report is not None
    return report


def asked(rid: str = "asked", tokens: tuple[int, ...] = PROMPT, **fields: Any) -> Request:
    return make_request(rid, tokens, max_new=1, return_cache_info=True, **fields)


def test_what_was_never_seen_is_new_and_what_is_cached_has_no_reason():
    engine = engine_of()
    assert why(engine, asked("first")).why is MissReason.NEW and why(engine, asked("again")).why is None
    assert why(engine, asked("longer", (*PROMPT, 3, 4))).why is MissReason.NEW
    assert why(engine_of(has_cache=False), asked()).why is MissReason.OFF


@pytest.mark.parametrize("namespace", ["", "theirs"])
def test_it_is_known_for_whose_prompt_it_was_evicted(namespace: str):
    engine = engine_of(num_pages=16, context_length=16)
    run(engine, asked("mine"))
    run(engine, make_request("other", (6, 5, 4, 3) * 3, max_new=1, namespace=namespace))
    report = why(engine, asked())
    assert (report.why, report.evicted_for) == (MissReason.EVICTED, EvictionCause.PROMPT)
    assert report.evicted_for_own == (namespace == "")


def test_it_is_known_that_it_was_evicted_for_answers():
    engine = engine_of(num_pages=16, context_length=16)
    run(engine, asked("mine"), make_request("other", (6, 5), max_new=13))
    report = why(engine, asked())
    assert (report.why, report.evicted_for, report.evicted_for_own) == (MissReason.EVICTED, EvictionCause.ANSWERS, None)


def test_it_is_known_that_everything_was_flushed():
    engine = engine_of()
    run(engine, asked("mine"))
    assert engine.cache.reset()
    report = why(engine, asked())
    assert (report.why, report.evicted_for, report.evicted_for_own) == (MissReason.EVICTED, EvictionCause.FLUSH, None)


def test_only_who_sees_all_is_told_that_another_namespace_has_it():
    engine = engine_of()
    run(engine, make_request("theirs", max_new=1, namespace="theirs"))
    tokens = engine.answers["theirs"].request.input_ids.array.tolist()
    assert why(engine, asked("blind", tuple(tokens))).why is MissReason.NEW
    engine.cache.reset()
    run(engine, make_request("back", max_new=1, namespace="theirs"))
    assert why(engine, asked("sees", tuple(tokens), namespace="mine", sees_all=True)).why is MissReason.NAMESPACE
    assert why(engine, asked("other", (6, 6, 6, 6), namespace="more", sees_all=True)).why is MissReason.NEW


def test_another_picture_is_another_picture_and_another_text_is_not():
    engine = SimulatedEngine(SHAPE)
    run(engine, with_images("a", (1,), image(0, 5), (3,)))
    asks = {"return_cache_info": True}
    assert why(engine, with_images("picture", (1,), image(0, 6), (3,), **asks)).why is MissReason.PICTURE
    assert why(engine, with_images("text", (1,), image(0, 5), (4, 4), **asks)).why is MissReason.NEW


def test_a_state_or_a_window_that_is_gone_is_told():
    engine = engine_of(num_states=8, num_pages=100)
    run(engine, make_request("first", PROMPT, max_new=1))
    report = why(engine, asked("shorter", PROMPT[:6]))
    assert (report.why, report.unusable_tokens > 0) == (MissReason.STATE, True)
    engine = engine_of(num_pages=100, windows=(Window(4),), part_rate=0.24, max_running=1)
    run(engine, *(make_request(f"cached {n}", (n, *(1, 2, 3, 4, 5, 6) * 3), max_new=0) for n in (2, 3)))
    report = why(engine, asked("shorter", (2, 1, 2, 6, 6)))
    assert (report.why, report.unusable_tokens > 0) == (MissReason.WINDOW, True)
