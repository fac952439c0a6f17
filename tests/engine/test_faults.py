"""What goes wrong with one request stays with it: aborts, time-outs, and code that raises, in a real engine."""

from collections.abc import Callable
from typing import Any

import pytest

from jsg.cache.radix import RadixCache
from jsg.engine.child.protocol import CORE_STATS, Call, Progress
from jsg.engine.core import EngineCore
from jsg.engine.device import packing, results
from jsg.errors import QueueTimeoutError
from jsg.sched import lifecycle, outputs
from jsg.sched.request import RunningRequest
from jsg.types import FinishType, Request, SamplingParams
from tests.engine import small
from tests.engine.fake_core import FakeCore
from tests.engine.small import DETERMINISTIC, check_core

PROMPT = tuple(range(2, 40))
BAD_SEED = 666


@pytest.fixture
def core(core_of) -> EngineCore:
    return core_of(**DETERMINISTIC)


def request(rid: str, ids: tuple[int, ...] = PROMPT, *, fields: dict[str, Any] | None = None, **sampling) -> Request:
    values = {"temperature": 0, "ignore_eos": True, "max_new_tokens": 12} | sampling
    return Request(rid=rid, input_ids=ids, sampling=SamplingParams.from_dict(values), **(fields or {}))


# Aborts.


@pytest.mark.parametrize("num_steps", range(6))
@pytest.mark.parametrize("overlaps", [True, False])
def test_an_abort_frees_everything_by_the_end_of_the_step_that_reads_it(core_of, num_steps: int, overlaps: bool):
    """Requests that wait, prefill in chunks, decode and are in flight: after the next step nobody holds anything."""
    core: EngineCore = core_of(**DETERMINISTIC, chunked_prefill_size=16, disable_overlap_schedule=not overlaps)
    prompts = [(2 + number,) * 20 + PROMPT for number in range(6)]
    for number, ids in enumerate(prompts):
        scored = {"return_logprob": True, "logprob_start_len": 0} if number == 1 else {}
        core.add(request(f"r{number}", ids, fields=scored, max_new_tokens=40))
    for _ in range(num_steps):
        core.step()
    before = core.stats()
    for number in range(6):
        core.abort(f"r{number}")
    ends = {output.rid: output.finish for output in core.step()}
    assert {rid: end.type for rid, end in ends.items() if end} == dict.fromkeys(ends, FinishType.ABORT)
    assert len(ends) == 6
    stats = core.stats()
    assert stats["num_aborted"] == before["num_aborted"] + 6
    for gauge in ("num_running", "num_waiting", "num_protected_tokens", "num_uncached_tokens", "kv_usage"):
        assert stats[gauge] == 0, gauge
    check_core(core)
    while core.has_work:  # the step that was in flight
        assert core.step() == []
    follower = small.run(core, [(0, request("next", prompts[0]))])["next"]
    assert follower.token_ids == small.alone(core, request("again", prompts[0])).token_ids


# Time-outs.


def test_those_that_wait_too_long_are_refused_while_others_run(core_of, monkeypatch: pytest.MonkeyPatch):
    core: EngineCore = core_of(**DETERMINISTIC, queue_timeout=5.0)
    now, before = 100.0, core.stats()["num_expired"]
    monkeypatch.setattr("jsg.engine.core.time.monotonic", lambda: now)
    running = {f"runs {row}" for row in range(4)}  # as many as there are rows
    for number, rid in enumerate(sorted(running)):
        core.add(request(rid, (80 + number,), max_new_tokens=30))
    core.add(request("waits"))
    core.step()
    now += 4
    core.add(request("waits too"))
    assert core.refuse_overdue() == []
    now += 2
    (refusal,) = core.refuse_overdue()
    assert refusal.rid == "waits"
    error = refusal.failure.to_error()
    assert type(error) is QueueTimeoutError and "--queue-timeout" in str(error)
    assert core.stats()["num_expired"] == before + 1
    ended = set()
    while core.has_work:
        ended |= {output.rid for output in core.step() if output.finish}
    assert ended == running | {"waits too"}


def test_without_a_limit_nobody_is_refused(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr("jsg.engine.core.time.monotonic", lambda: now)
    core.add(request("waits"))
    now += 1e9
    assert core.refuse_overdue() == []
    core.abort("waits")
    core.step()


# Code that raises.


def raising_for_the_bad(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which raises instead if a request with `BAD_SEED` is anywhere in its arguments."""

    def is_bad(argument: object) -> bool:
        argument = getattr(argument, "running", argument)
        argument = getattr(argument, "request", argument)
        argument = getattr(argument, "sampling", argument)
        return isinstance(argument, SamplingParams) and argument.sampling_seed == BAD_SEED

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        if any(map(is_bad, arguments)):
            raise ZeroDivisionError("a bug that only this request meets")
        return function(*arguments, **keywords)

    return wrapped


SCORED = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}

PLACES = {
    "the constants of its sampling": (packing, "sampling_row", {}),
    "its bias at admission": (packing, "bias_of", {"logit_bias": {5: 1.0}}),
    "the log-probabilities of its tokens": (results, "_token_logprob", {}),
    "the log-probabilities of its prompt": (results, "_prompt_parts", {}),
    "its output": (outputs, "make_output", {}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("overlaps", [True, False])
def test_what_raises_for_one_request_fails_that_request_only(
    core_of, place: str, overlaps: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    core: EngineCore = core_of(**DETERMINISTIC, disable_overlap_schedule=not overlaps)
    neighbours = [request(f"good {n}", (*PROMPT[n:], 7 + n), fields=SCORED) for n in range(3)]
    alone = {each.rid: small.alone(core, each) for each in neighbours}
    assert core.flush_cache()
    module, name, sampling = PLACES[place]
    failing = raising_for_the_bad(getattr(module, name))
    monkeypatch.setattr(module, name, failing)
    bad = request("bad", (90, *PROMPT), fields=SCORED, sampling_seed=BAD_SEED, **sampling)
    outcomes = small.run(core, [(0, neighbours[0]), (0, bad), (0, neighbours[1]), (2, neighbours[2])])
    finish = outcomes["bad"].finish
    assert finish is not None and finish.type is FinishType.ERROR
    assert "only this request" not in (finish.message or ""), "the trace belongs in the log"
    assert "a bug that only this request meets" in caplog.text
    for each in neighbours:
        assert outcomes[each.rid].token_ids == alone[each.rid].token_ids
        assert outcomes[each.rid].finish == alone[each.rid].finish
    assert core.stats()["num_protected_tokens"] == 0
    monkeypatch.undo()
    assert small.run(core, [(0, bad)])["bad"].finish != finish, "the row is as good as before"


def test_a_bias_that_raises_at_the_end_of_the_minimum_fails_alone(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    original = packing.bias_of

    def bias_of(running: RunningRequest, eos: frozenset[int], output_index: int) -> dict[int, float]:
        if output_index == 3 and running.request.rid == "bad":
            raise ZeroDivisionError
        return original(running, eos, output_index)

    monkeypatch.setattr(packing, "bias_of", bias_of)
    wanted = [request(rid, (token, *PROMPT), min_new_tokens=3) for rid, token in (("bad", 80), ("good", 81))]
    outcomes = small.run(core, [(0, each) for each in wanted])
    assert outcomes["bad"].finish is not None and outcomes["bad"].finish.type is FinishType.ERROR
    assert len(outcomes["bad"].token_ids) == 3 and len(outcomes["good"].token_ids) == 12


@pytest.mark.parametrize("place", ["new_running_request", "watch"])
def test_nothing_is_kept_of_a_request_that_could_not_be_added(
    core: EngineCore, place: str, monkeypatch: pytest.MonkeyPatch
):
    def fail(*arguments: object, **keywords: object) -> None:
        raise ZeroDivisionError

    target = (lifecycle, "new_running_request") if place == "new_running_request" else (RadixCache, "watch")
    with monkeypatch.context() as patch:
        patch.setattr(*target, fail)
        with pytest.raises(ZeroDivisionError):
            core.add(request("r"))
    assert not core.has_work
    check_core(core)
    assert len(small.run(core, [(0, request("r"))])["r"].token_ids) == 12


def test_a_broken_invariant_ends_the_engine(new_core_of, monkeypatch: pytest.MonkeyPatch):
    core = new_core_of(**DETERMINISTIC)
    core.add(request("r"))
    core.step()

    def broken(*arguments: object) -> None:
        raise AssertionError("two requests share a page")

    monkeypatch.setattr(outputs, "stop_reason", broken)
    with pytest.raises(AssertionError, match="share a page"):
        core.step()


# What is told.


def test_the_counters_are_those_of_the_list_in_both_cores(core: EngineCore):
    assert core.stats().keys() == CORE_STATS.keys()
    seen: list[Progress] = []
    fake = FakeCore(small.EngineConfig(), report=seen.append)
    assert fake.stats().keys() >= CORE_STATS.keys()
    assert {type(value) for value in core.stats().values()} <= {int, float}


def test_the_counters_are_what_the_clients_saw(core_of):
    core: EngineCore = core_of(**DETERMINISTIC, max_total_tokens=256)
    before = core.stats()
    outcomes = small.run(core, small.traffic(3, count=20))
    after = core.stats()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("generated_tokens") == sum(len(outcome.token_ids) for outcome in outcomes.values())
    assert grown("prompt_tokens") == sum(outcome.prompt_tokens for outcome in outcomes.values())
    assert grown("cached_tokens") == sum(outcome.cached_tokens for outcome in outcomes.values())
    assert grown("num_evicted_tokens") > 0
    assert grown("num_inserted_tokens") - grown("num_evicted_tokens") == after["num_cached_tokens"]
    assert after["num_free_tokens"] + after["num_evictable_tokens"] == 256
    for gauge in ("num_running", "num_waiting", "num_protected_tokens", "num_uncached_tokens", "kv_usage"):
        assert after[gauge] == 0


def test_the_gauges_tell_who_holds_the_pool(core: EngineCore):
    core.add(request("r"))
    core.step()
    stats = core.stats()
    assert stats["num_protected_tokens"] == len(PROMPT)
    assert stats["kv_usage"] == pytest.approx((len(PROMPT) + stats["num_uncached_tokens"]) / 1024)
    core.abort("r")
    while core.has_work:
        core.step()


def test_a_miss_is_explained(core: EngineCore):
    wants = {"return_cache_info": True}
    small.run(core, [(0, request("first", max_new_tokens=0))])
    outputs = []
    core.add(request("second", (*PROMPT[:10], 90, 91), fields=wants))
    while core.has_work:
        outputs += core.step()
    assert [output.cache_report is not None for output in outputs] == [True] + [False] * (len(outputs) - 1)
    report = outputs[0].cache_report
    assert (report.matched_tokens, report.matchable_tokens, report.first_difference) == (10, 11, 10)
    assert report.cached_continuations == (PROMPT[10],) and report.evicted_at is None
    assert core.answer(Call(1, "flush_cache"))
    core.add(request("third", fields=wants, max_new_tokens=1))
    report = next(output.cache_report for output in iter(core.step, None) for output in output)
    assert (report.matched_tokens, report.first_difference) == (0, 0)
    assert report.evicted_tokens == 10, "the trunk; the rest of the prompt was another edge"
    assert report.evicted_at is not None


def test_the_tree_and_the_pool_are_told(core: EngineCore):
    small.run(core, [(0, request("r", fields={"namespace": "salt"}))])
    news = core.answer(Call(1, "watch_cache"))
    assert isinstance(news, dict)
    stats = core.stats()
    assert sum(node[2] for node in news["nodes"]) == stats["num_cached_tokens"] > 0
    pool = news["pool"]
    assert {term: pool[term] for term in pool["terms"]} == {
        term: stats[f"num_{term}_tokens"] for term in ("free", "evictable", "protected", "uncached")
    }
    assert pool["total"] == sum(pool[term] for term in pool["terms"])
