"""The decisions of the scheduler in cases so small that they are known beforehand."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jsg.config import POLICIES
from jsg.errors import ContextLengthError, QueueFullError, RequestError
from jsg.sched.batch import Batch, StepResult
from jsg.sched.buckets import Phase
from jsg.types import FinishType, Request, SamplingParams
from tests.cache.integrity import check_cache
from tests.sched.integrity import check_scheduler
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.token_model import VOCAB, TokenModel

PREFIX = (1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4)


ROOMY = EngineShape(num_pages=200, max_running=8, chunk=64)


def make_engine(**changes: Any) -> SimulatedEngine:
    return SimulatedEngine(dataclasses.replace(ROOMY, **changes), TokenModel(broken_every=10**9))


def make_request(rid: str, tokens: tuple[int, ...] = PREFIX, max_new: int = 3, **fields: Any) -> Request:
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    return Request(rid=rid, input_ids=tokens, sampling=sampling, **fields)


def prefill_only(engine: SimulatedEngine, tokens: tuple[int, ...], namespace: str = "") -> None:
    """Fills the cache, and forgets that it did."""
    rid = f"filled {len(engine.answers)}"
    engine.add(make_request(rid, tokens, max_new=0, namespace=namespace))
    engine.run_until_idle()
    del engine.answers[rid]
    engine.batches.clear()


def planned(batch: Batch) -> dict[str, int]:
    return {entry.running.request.rid: entry.num_new for entry in batch.entries}


# Sharing.


@pytest.mark.parametrize("page_size", [1, 4])
def test_eight_requests_with_one_uncached_prefix_compute_it_once(page_size: int):
    engine = make_engine(page_size=page_size)
    for number in range(8):
        engine.add(make_request(f"r{number}", (*PREFIX, number % VOCAB, 7)))
    engine.step()
    assert planned(engine.batches[0]) == {"r0": 18} | {f"r{n}": 2 for n in range(1, 8)}
    engine.run_until_idle()
    engine.check_answers()
    assert [answer.cached_tokens for answer in engine.answers.values()] == [0] + [16] * 7


def test_eight_equal_requests_compute_the_last_token_each():
    engine = make_engine()
    for number in range(8):
        engine.add(make_request(f"r{number}"))
    engine.step()
    assert sum(entry.num_new for entry in engine.batches[0].entries) == len(PREFIX) + 7
    assert [entry.num_new for entry in engine.batches[0].entries] == [1] * 7 + [16], "one-token entries come first"
    assert engine.batches[0].num_singles == 7
    assert all(entry.write_start == 16 for entry in engine.batches[0].entries[:7]), "the leader writes it"
    engine.run_until_idle()
    engine.check_answers()


def test_followers_of_a_prompt_longer_than_a_chunk_wait_for_it():
    engine = make_engine(chunk=8)
    for number in range(3):
        engine.add(make_request(f"r{number}", (*PREFIX, number)))
    for _ in range(3):
        engine.step()
    assert [planned(batch) for batch in engine.batches] == [{"r0": 8}, {"r0": 8}, {"r0": 1, "r1": 1, "r2": 1}]


def test_outputs_are_cached_but_for_the_last_token():
    """The last token was never an input, so no keys exist of it."""
    engine = make_engine()
    engine.add(make_request("first", max_new=5))
    engine.run_until_idle()
    output = tuple(engine.answers["first"].tokens)
    engine.add(make_request("second", (*PREFIX, *output, 0)))
    engine.run_until_idle()
    assert engine.answers["second"].cached_tokens == 16 + 4
    engine.check_answers()


def test_a_prefill_only_request_that_is_cached_needs_no_step():
    engine = make_engine()
    prefill_only(engine, PREFIX)
    engine.add(make_request("again", max_new=0))
    engine.step()
    assert not engine.batches and engine.answers["again"].cached_tokens == 16
    assert not engine.has_work
    engine.check_answers()


# Order.


def test_lpm_admits_the_longest_cached_prefix_first():
    engine = make_engine(max_running=2, chunk=4)
    prefill_only(engine, PREFIX)
    for rid, tokens in (("none", (7,) * 6), ("short", (*PREFIX[:4], 7, 7)), ("long", (*PREFIX, 7, 7))):
        engine.add(make_request(rid, tokens))
    engine.step()
    assert planned(engine.batches[0]) == {"long": 2, "short": 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_priority_goes_before_the_policy(policy: str):
    engine = make_engine(policy=policy, max_running=1, chunk=16)
    prefill_only(engine, PREFIX)
    engine.add(make_request("cached", (*PREFIX, 7, 7)))
    engine.add(make_request("low", (6,) * 3, priority=-1))
    engine.add(make_request("high", (7,) * 6, priority=1))
    order = []
    while engine.has_work:
        engine.step()
        order += [r for r in planned(engine.batches[-1]) if r not in order]
    assert order == ["high", "cached", "low"]


def test_fcfs_does_not():
    engine = make_engine(policy="fcfs", max_running=2, chunk=8)
    prefill_only(engine, PREFIX)
    engine.add(make_request("none", (7,) * 6))
    engine.add(make_request("long", (*PREFIX, 7, 7)))
    engine.step()
    assert planned(engine.batches[0]) == {"none": 6, "long": 2}


def test_decode_goes_before_prefill_and_both_share_a_step():
    engine = make_engine(chunk=8, overlaps=False)
    engine.add(make_request("decodes", (0,), max_new=5))
    engine.step()
    engine.add(make_request("prefills"))
    engine.step()
    assert planned(engine.batches[1]) == {"decodes": 1, "prefills": 7}
    assert engine.batches[1].key.phase is Phase.EXTEND
    engine.run_until_idle()
    assert engine.batches[-1].key.phase is Phase.DECODE


def test_max_prefill_tokens_limits_what_is_admitted_in_a_step():
    engine = make_engine(max_prefill_tokens=4)
    for number in range(4):
        engine.add(make_request(f"r{number}", (number,) * 3))
    engine.step()
    assert planned(engine.batches[0]) == {"r0": 3, "r1": 3}


def test_without_decode_shapes_every_token_is_in_a_tile():
    engine = make_engine(has_decode=False)
    engine.add(make_request("r"))
    engine.run_until_idle()
    assert all(batch.num_singles == 0 and batch.key.phase is Phase.EXTEND for batch in engine.batches)


def test_a_prompt_of_many_query_tiles():
    engine = make_engine(num_pages=1000, context_length=500, chunk=300)
    engine.add(make_request("a", PREFIX * 12))
    engine.add(make_request("b", (7, *PREFIX * 8)))
    engine.run_until_idle()
    engine.check_answers()
    assert planned(engine.batches[0]) == {"a": 192, "b": 108}


# Memory.


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_latest_arrival_is_retracted_and_loses_nothing(overlaps: bool):
    engine = make_engine(num_pages=30, overlaps=overlaps, conservativeness=0.01, context_length=30)
    for number in range(3):
        engine.add(make_request(f"r{number}", (number,) * 3, max_new=20))
    while not engine.scheduler.totals.num_retracts:
        engine.step()
    assert {r.request.rid for r in engine.scheduler.running} == {"r0", "r1"}
    engine.run_until_idle()
    engine.check_answers()


def test_a_request_of_exactly_the_pool_runs_alone():
    engine = make_engine(num_pages=19, context_length=19)
    engine.add(make_request("all", max_new=3))
    engine.add(make_request("also all", PREFIX[::-1], max_new=3))
    engine.run_until_idle()
    engine.check_answers()


def test_the_last_page_is_used_before_anybody_is_retracted():
    engine = make_engine(num_pages=5, page_size=4, context_length=20, conservativeness=0.01)
    engine.add(make_request("three pages", PREFIX[:8], max_new=5))
    engine.add(make_request("two pages", (7,) * 5, max_new=4))
    engine.run_until_idle()
    assert engine.scheduler.totals.num_retracts == 0
    assert max(len(batch.entries) for batch in engine.batches) == 2
    engine.check_answers()


def test_a_chunk_fills_the_last_page_of_the_one_before():
    engine = make_engine(num_pages=2, page_size=4, max_running=1, chunk=5)
    engine.add(make_request("all", PREFIX[:7], max_new=1))
    engine.run_until_idle()
    assert [planned(batch) for batch in engine.batches] == [{"all": 5}, {"all": 2}]
    assert engine.scheduler.totals.num_retracts == 0


def test_nothing_is_evicted_while_there_is_room():
    engine = make_engine(num_pages=40, context_length=20)
    for number in range(2):
        prefill_only(engine, (number,) * 19)
    assert engine.cache.stats().evicted_tokens == 0
    prefill_only(engine, (2,) * 19)
    assert engine.cache.stats().evicted_tokens == 19, "whole leaves are evicted"


# Ends.


def test_logits_that_are_not_finite_end_their_request_only():
    engine = make_engine()
    engine.model = engine.device._model = TokenModel(broken_every=3)
    for number in range(20):
        engine.add(make_request(f"r{number}", (number % VOCAB, number // VOCAB), max_new=8))
    engine.run_until_idle()
    engine.check_answers()
    ends = [answer.finish.type for answer in engine.answers.values() if answer.finish]
    assert FinishType.ERROR in ends and FinishType.LENGTH in ends


@pytest.mark.parametrize("overlaps", [True, False])
def test_what_gave_logits_that_are_not_finite_is_cached_for_nobody(overlaps: bool):
    engine = make_engine(overlaps=overlaps)
    prefill_only(engine, PREFIX[:4])
    engine.add(make_request("good", (*PREFIX[:4], 1, 2)))
    engine.run_until_idle()
    cached_len = engine.cache.stats().num_cached_tokens
    engine.model = engine.device._model = TokenModel(broken_every=1)
    engine.add(make_request("bad", (*PREFIX[:4], 3, 4, 5)))
    engine.run_until_idle()
    assert engine.answers["bad"].finish.type is FinishType.ERROR
    assert engine.cache.matched_len(np.array([*PREFIX[:4], 3, 4, 5], np.int32)) == 4
    assert engine.cache.stats().num_cached_tokens == cached_len
    check_scheduler(engine.scheduler)
    check_cache(engine.cache)


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("overlaps", [True, False])
def test_an_abort_frees_everything_in_any_phase(num_steps: int, overlaps: bool):
    engine = make_engine(chunk=8, overlaps=overlaps)
    engine.add(make_request("gone", max_new=10))
    for _ in range(num_steps):
        engine.step()
    engine.abort("gone")
    engine.abort("gone")
    engine.scheduler.abort("never heard of")
    engine.step()
    assert not engine.has_work and engine.answers["gone"].finish
    engine.check_answers()


def test_a_rid_may_be_used_again_once_its_request_has_ended():
    engine = make_engine()
    engine.add(make_request("r"))
    engine.run_until_idle()
    engine.add(make_request("r"))
    engine.run_until_idle()
    engine.check_answers()


def test_the_wait_is_measured_until_the_first_admission():
    engine = make_engine(max_running=1, overlaps=False)
    for rid, now_s in (("a", 1.0), ("b", 2.0)):
        engine.scheduler.add(make_request(rid, max_new=1), now_s)
    waits = {}
    for now_s in (10.0, 20.0):
        batch = engine.scheduler.plan(now_s)
        assert batch is not None
        for output in engine.scheduler.commit(batch, StepResult([0] * batch.key.num_rows)):
            waits[output.rid] = output.queue_s
    assert waits == {"a": 9.0, "b": 18.0}


# Time-outs.


def test_those_that_waited_too_long_are_taken_out_and_those_that_ran_are_not():
    engine = make_engine(max_running=1)
    for number in range(5):
        engine.scheduler.add(make_request(f"r{number}", (number,) * 3, max_new=50), now_s=float(number))
    assert engine.scheduler.plan() is not None and engine.scheduler.expire(arrived_before_s=0.0) == []
    assert engine.scheduler.expire(arrived_before_s=3.0) == ["r1", "r2"], "r0 runs, r3 arrived at that very time"
    assert engine.scheduler.expire(arrived_before_s=3.0) == []
    assert [len(engine.scheduler.running), len(engine.scheduler.waiting)] == [1, 2]
    engine.scheduler.abort("r3")
    assert engine.scheduler.expire(arrived_before_s=99.0) == ["r4"]
    assert engine.scheduler.totals.num_expired == 3
    assert [output.rid for output in engine.scheduler.take_finished()] == ["r3"], "a refusal is no output"
    engine.scheduler.add(make_request("r1"), now_s=100.0)
    engine.check_integrity()


def test_a_retracted_request_does_not_expire():
    engine = make_engine(num_pages=30, conservativeness=0.01, context_length=30)
    for number in range(3):
        engine.add(make_request(f"r{number}", (number,) * 3, max_new=20))
    while not engine.scheduler.totals.num_retracts:
        engine.step()
    assert len(engine.scheduler.waiting) == 1 and engine.scheduler.expire(arrived_before_s=1e9) == []
    engine.run_until_idle()
    engine.check_answers()


# Refusals.


def test_refusals_name_the_rule_and_change_nothing():
    engine = make_engine(num_pages=10, page_size=4, context_length=30)
    engine.add(make_request("r"))
    with pytest.raises(RequestError, match="'r' is in use") as refused:
        engine.add(make_request("r"))
    assert refused.value.param == "rid"
    with pytest.raises(ContextLengthError, match=r"at most 30, but got 16 \+ 15"):
        engine.add(make_request("long", max_new=15))
    engine.add(make_request("just right", max_new=14))
    with pytest.raises(RequestError, match=r"token ids must be in \[0, 8\)") as refused:
        engine.add(make_request("odd", (1, VOCAB)))
    assert refused.value.param == "input_ids"
    with pytest.raises(RequestError, match="input_ids"):
        engine.add(make_request("negative", (-1,)))
    with pytest.raises(RequestError) as refused:
        engine.add(make_request("odd alternative", return_logprob=True, token_ids_logprob=(VOCAB,)))
    assert refused.value.param == "token_ids_logprob"
    assert len(engine.scheduler.waiting) == 2
    engine.run_until_idle()
    engine.check_answers()


def test_a_pool_smaller_than_the_context_is_the_limit():
    engine = make_engine(num_pages=10, page_size=2, context_length=64)
    with pytest.raises(ContextLengthError, match=r"at most 20, but got 16 \+ 5"):
        engine.add(make_request("r", max_new=5))


def test_a_full_queue_refuses():
    engine = make_engine(max_queued=2)
    for number in range(2):
        engine.add(make_request(f"r{number}"))
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        engine.add(make_request("r2"))
    engine.step()
    engine.add(make_request("r2"))
