"""Holds: prompts that stay cached until they are ended, or until somebody who computes needs their memory."""

from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jsg.cache.radix import RadixCache
from jsg.config import POLICIES
from jsg.errors import QueueFullError, RequestError
from jsg.types import FinishReason, FinishType, Request, SamplingParams
from jsg.window import Window
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.test_scheduler import PREFIX, make_engine, make_request, planned
from tests.sched.token_model import TokenModel


def hold(rid: str, tokens: tuple[int, ...] = PREFIX, **fields: Any) -> Request:
    return make_request(rid, tokens, max_new=0, hold=True, **fields)


def end_all(engine: SimulatedEngine) -> None:
    """Ends what is held, so that `check_answers` finds nothing left behind."""
    engine.scheduler.break_holds(len(engine.scheduler.holds))
    engine.run_until_idle()
    engine.check_answers()


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("chunk", [8, 64])
def test_a_hold_computes_its_prompt_reports_once_and_stays(page_size: int, chunk: int):
    engine = make_engine(page_size=page_size, chunk=chunk)
    engine.add(hold("held", (*PREFIX, 3)))
    engine.run_until_idle()
    answer = engine.answers["held"]
    assert answer.is_held and answer.finish is None and answer.cached_tokens == 0
    assert len(engine.scheduler.holds) == 1 and engine.cache.num_protected == 17 // page_size
    assert engine.scheduler.table.num_uncached_pages == 0, "a part of a page is nothing that others can use"
    assert engine.scheduler.table.num_free_rows == engine.shape.max_running, "a hold takes no row"
    assert not engine.has_work, "a hold alone needs no steps"
    engine.abort("held")
    engine.run_until_idle()
    assert answer.finish is not None and answer.finish.type is FinishType.ABORT
    assert engine.cache.num_protected == 0
    assert engine.scheduler.totals.num_aborted == 0, "its client released it: the normal end of a hold"
    engine.check_answers()


def test_what_is_cached_already_is_held_without_a_step():
    engine = make_engine()
    engine.add(make_request("first", max_new=0))
    engine.run_until_idle()
    engine.batches.clear()
    engine.add(hold("held"))
    engine.step()
    assert not engine.batches and engine.answers["held"].is_held and engine.answers["held"].cached_tokens == 16
    assert engine.cache.num_protected == 16
    end_all(engine)


def test_a_held_prefix_outlives_traffic_that_would_evict_it():
    """The very traffic evicts it where it is not held: the pool holds three prompts."""
    for is_held in (True, False):
        engine = make_engine(num_pages=60, max_running=1)
        engine.add(hold("held") if is_held else make_request("held", max_new=0))
        engine.run_until_idle()
        for number in range(6):
            engine.add(make_request(f"other {number}", (number, *PREFIX[1:]) if number != 1 else (7, 7), max_new=4))
            engine.run_until_idle()
        engine.add(make_request("branch", (*PREFIX, 7)))
        engine.run_until_idle()
        assert engine.answers["branch"].cached_tokens == (16 if is_held else 0)
        end_all(engine)


def test_the_oldest_hold_gives_way_to_a_request_and_the_others_stay():
    engine = make_engine(num_pages=40, max_running=2)
    engine.add(hold("old", (1,) * 16))
    engine.run_until_idle()
    engine.add(hold("new", (2,) * 16))
    engine.run_until_idle()
    engine.add(make_request("runs", (3,) * 16, max_new=3))
    engine.run_until_idle()
    assert engine.answers["old"].finish == FinishReason(FinishType.STOP)
    assert engine.answers["new"].finish is None
    assert engine.scheduler.totals.num_holds_broken == 1 and engine.scheduler.totals.num_retracts == 0
    end_all(engine)


def test_holds_end_before_a_request_is_retracted():
    """Both decode until the pool is full: the hold's pages come first, and they are enough."""
    engine = make_engine(num_pages=40, max_running=2, conservativeness=0.01)
    engine.add(hold("held", (1,) * 16))
    engine.run_until_idle()
    for number in (2, 3):
        engine.add(make_request(f"r{number}", (number,) * 4, max_new=14))
    engine.run_until_idle()
    assert engine.answers["held"].finish == FinishReason(FinishType.STOP)
    assert engine.scheduler.totals.num_retracts == 0
    engine.check_answers()


def test_a_hold_gives_way_to_a_request_that_another_runs_beside():
    """It would have to wait for the other's end else."""
    engine = make_engine(num_pages=40, max_running=2)
    engine.add(hold("held", (1,) * 16))
    engine.run_until_idle()
    engine.add(make_request("first", (2,) * 8, max_new=4))
    engine.step()
    engine.add(make_request("second", (3,) * 20, max_new=2))
    engine.step()
    assert planned(engine.batches[-1]) == {"first": 1, "second": 20}
    assert engine.scheduler.totals.num_holds_broken == 1
    engine.run_until_idle()
    engine.check_answers()


def test_a_prompt_is_not_cut_because_of_a_hold():
    engine = make_engine(num_pages=24)
    engine.add(hold("held"))
    engine.run_until_idle()
    engine.add(make_request("runs", (7,) * 20, max_new=2))
    engine.step()
    assert planned(engine.batches[-1]) == {"runs": 20}
    engine.run_until_idle()
    engine.check_answers()


def test_a_hold_as_large_as_the_pool_stops_nobody():
    engine = make_engine(num_pages=16)
    engine.add(hold("held"))
    engine.run_until_idle()
    assert engine.allocator.num_free == 0
    engine.add(make_request("runs", (7,) * 4))
    engine.run_until_idle()
    assert engine.answers["held"].finish == FinishReason(FinishType.STOP)
    engine.check_answers()


def test_a_hold_whose_end_would_not_help_stays():
    """Both requests have the held prefix, so ending the hold gives no page to the one that waits for the other."""
    engine = make_engine(num_pages=40, max_running=2)
    engine.add(hold("held"))
    engine.run_until_idle()
    engine.add(make_request("runs", (*PREFIX, 1), max_new=20))
    engine.step()
    engine.add(make_request("waits", (*PREFIX, 2), max_new=20))
    for _ in range(5):
        engine.step()
    assert engine.scheduler.totals.num_holds_broken == 0 and len(engine.scheduler.waiting) == 1
    engine.run_until_idle()
    assert engine.answers["held"].finish is None
    end_all(engine)


def test_holds_of_one_prefix_free_it_only_together():
    engine = make_engine(num_pages=20)
    for number in range(3):
        engine.add(hold(f"held {number}"))
    engine.run_until_idle()
    assert engine.scheduler.table.num_yielding == 16
    engine.abort("held 1")
    assert engine.scheduler.table.num_yielding == 16
    engine.add(make_request("runs", (7,) * 10))
    engine.run_until_idle()
    assert engine.scheduler.totals.num_holds_broken == 2
    engine.check_answers()


def test_a_step_that_lacks_pages_looks_at_no_hold_in_vain(monkeypatch: pytest.MonkeyPatch):
    """Nested holds, in front of which a request waits whose memory even all of them have not."""
    engine = make_engine(num_pages=48, max_running=2, context_length=64)
    for length in range(4, 17):
        engine.add(hold(f"held {length}", PREFIX[:length]))
        engine.run_until_idle()
    engine.add(make_request("runs", (*PREFIX, 1), max_new=24))
    engine.step()
    engine.add(make_request("waits", (7,) * 20, max_new=24))
    climbs = []
    count_lock = RadixCache._count_lock
    monkeypatch.setattr(RadixCache, "_count_lock", lambda *given: climbs.append(1) or count_lock(*given))
    for _ in range(5):
        climbs.clear()
        engine.step()
        assert len(climbs) == 2, "the attempt to admit what waits locks a prefix and unlocks it"
    assert len(engine.scheduler.holds) == 13 and len(engine.scheduler.waiting) == 1
    engine.run_until_idle()
    end_all(engine)


def test_no_more_holds_than_the_limit():
    engine = make_engine(max_holds=2)
    engine.add(hold("a"))
    engine.run_until_idle()
    engine.add(hold("b"))
    with pytest.raises(QueueFullError, match="at most 2 prompts may be held"):
        engine.add(hold("c"))
    engine.abort("a")
    engine.add(hold("c"))
    engine.abort("b")
    engine.add(hold("d"))
    engine.run_until_idle()
    with pytest.raises(RequestError, match="rid must be unique"):
        engine.add(hold("c"))
    end_all(engine)


def test_a_hold_that_waits_or_computes_can_be_aborted():
    engine = make_engine(chunk=4, max_running=1)
    engine.add(hold("computes"))
    engine.add(hold("waits", (7,) * 6))
    engine.step()
    assert planned(engine.batches[0]) == {"computes": 4}
    engine.abort("computes")
    engine.abort("waits")
    engine.run_until_idle()
    assert engine.scheduler.totals.num_aborted == 2, "they were not held yet"
    assert engine.scheduler._requests.num_holds == 0
    engine.check_answers()


@pytest.mark.parametrize("page_size", [1, 4])
def test_without_a_cache_a_hold_keeps_nothing(page_size: int):
    engine = make_engine(has_cache=False, page_size=page_size)
    engine.add(hold("held"))
    engine.run_until_idle()
    assert engine.answers["held"].is_held and engine.scheduler.table.num_uncached_pages == 0
    end_all(engine)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sampling": SamplingParams(max_new_tokens=1)}, "max_new_tokens"),
        ({"return_logprob": True}, "return_logprob"),
        ({"joined": (0, 1)}, "joined"),
        ({"hold": 1}, "hold"),
    ],
)
def test_a_hold_that_asks_for_more_is_refused(fields: dict[str, Any], param: str):
    given = {"hold": True, "sampling": SamplingParams(max_new_tokens=0)} | fields
    with pytest.raises(RequestError) as error:
        Request(rid="r", input_ids=(1, 2), **given)
    assert error.value.param == param


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(tuple)


def test_random_traffic_with_holds():
    """Holds come and go among requests on a pool that is too small: nothing changes but what stays cached."""
    hypothesis.settings(max_examples=20)(play)()


@pytest.mark.slow
def test_random_traffic_with_holds_at_length():
    hypothesis.settings(max_examples=500)(play)()


@hypothesis.given(st.data())
def play(data: st.DataObject) -> None:
    shape = EngineShape(
        num_pages=data.draw(st.integers(4, 12)) * 4,
        page_size=data.draw(st.sampled_from([1, 4])),
        max_running=data.draw(st.integers(1, 4)),
        overlaps=data.draw(st.booleans()),
        max_holds=data.draw(st.sampled_from([2, 1000])),
        conservativeness=data.draw(st.sampled_from([0.01, 1.0])),
        policy=data.draw(st.sampled_from(POLICIES)),
        windows=data.draw(st.sampled_from([(), (), (Window(3),), (Window(2), Window(6, is_aligned=True))])),
        part_rate=data.draw(st.sampled_from([0.0, 0.5])),
        has_full_layers=data.draw(st.booleans()),
    )
    engine = SimulatedEngine(shape, TokenModel(broken_every=10**9))
    for number in range(data.draw(st.integers(1, 14))):
        kind = data.draw(st.sampled_from(["hold", "run", "abort", "step"]))
        tokens = data.draw(prompts)
        try:
            if kind == "hold":
                engine.add(hold(f"h{number}", tokens))
            elif kind == "run":
                max_new = data.draw(st.integers(0, min(12, shape.num_pages * shape.page_size - len(tokens))))
                engine.add(make_request(f"r{number}", tokens, max_new))
            elif kind == "abort" and engine.answers:
                rid = data.draw(st.sampled_from(sorted(engine.answers)))
                if engine.answers[rid].finish is None:
                    engine.abort(rid)
        except QueueFullError:
            assert shape.max_holds == 2
        if engine.has_work:
            engine.step()
    engine.run_until_idle()
    held = [answer for answer in engine.answers.values() if answer.finish is None]
    assert len(held) == len(engine.scheduler.holds) <= shape.max_holds
    assert all(answer.is_held for answer in held)
    end_all(engine)
