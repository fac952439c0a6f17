"""Joined prompts on the simulated device, which hashes what every token sees and where it stands."""

import dataclasses
import random
import tracemalloc
from collections.abc import Iterable, Mapping
from typing import Any
from unittest import mock

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from jsg.config import POLICIES
from jsg.errors import ContextLengthError, JsgError, QueueFullError, RequestError
from jsg.sched import joined as joined_requests
from jsg.types import FinishType, Request, SamplingParams
from jsg.window import Window
from tests.sched.integrity import check_scheduler
from tests.sched.simulated import Answer, EngineShape, SimulatedEngine
from tests.sched.test_position_jumps import engine_out_of_words
from tests.sched.test_scheduler import PREFIX, make_engine, make_request, planned
from tests.sched.token_model import VOCAB, TokenModel

BRANCHES = ((1, 2, 3, 4, 5), (1, 2, 7), (6, 6, 6, 6, 6, 6, 6, 6))


def joined(
    rid: str,
    prefix: tuple[int, ...] = PREFIX,
    branches: tuple[tuple[int, ...], ...] = BRANCHES,
    suffix: tuple[int, ...] = (7, 1),
    max_new: int = 3,
    **fields: Any,
) -> Request:
    starts, ids = [len(prefix)], prefix
    for branch in branches:
        ids += branch
        starts.append(len(ids))
    return make_request(rid, ids + suffix, max_new, joined=tuple(starts), **fields)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("chunk", [4, 64])
@pytest.mark.parametrize("has_cache", [True, False])
@pytest.mark.parametrize("has_decode", [True, False])
def test_a_joined_prompt_sees_prefix_and_branches_as_they_are(
    page_size: int, chunk: int, has_cache: bool, has_decode: bool
):
    engine = make_engine(
        page_size=page_size, chunk=chunk, max_running=4, has_cache=has_cache, has_decode=has_decode, context_length=80
    )
    engine.add(joined("whole"))
    engine.add(make_request("other", (*PREFIX, 1, 2)))
    engine.add(joined("jumps", position_jumps=((3, 2), (18, 4), (22, 1), (32, 5))))
    engine.run_until_idle()
    engine.check_answers()


def test_branches_that_are_cached_are_not_computed_again():
    """Three forks have generated; all that is missing of them is what never ran: the last token of each."""
    engine = make_engine(num_pages=400, context_length=200)
    branches = []
    for number in range(3):
        engine.add(make_request(f"fork {number}", (*PREFIX, number), max_new=5))
        engine.run_until_idle()
        branches.append((number, *engine.answers[f"fork {number}"].tokens))
    engine.batches.clear()
    engine.add(joined("whole", branches=tuple(branches)))
    engine.run_until_idle()
    totals = engine.scheduler.totals
    assert (totals.branch_tokens, totals.branch_tokens_computed) == (18, 3)
    assert engine.answers["whole"].cached_tokens == 16 + 3 * 5
    assert [planned(batch) for batch in engine.batches[:2]] == [{"whole": 1}, {"whole": 2}]
    assert len(engine.batches[0].entries) == 3
    engine.batches.clear()
    engine.add(joined("again", branches=tuple(branches)))
    engine.run_until_idle()
    assert (totals.branch_tokens, totals.branch_tokens_computed) == (36, 3)
    assert engine.answers["again"].cached_tokens == 16 + 18 + 1
    assert planned(engine.batches[0]) == {"again": 1}, "no step for what is there"
    engine.check_answers()


def test_a_joined_request_with_a_new_shift_and_an_old_one_that_nobody_uses():
    engine = engine_out_of_words()
    count = len(PREFIX)
    engine.add(joined("whole", branches=((1, 2, 3, 4, 5), (1, 2, 7)), position_jumps=((count + 1, 2), (count + 6, 7))))
    assert set(engine.scheduler.table.words._numbers) == {2, 7}
    engine.run_until_idle()
    engine.check_answers()


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_retracted_joined_request_loses_nothing(page_size: int):
    """Room for the branches, but not for what both generate."""
    engine = make_engine(num_pages=64 // page_size, page_size=page_size, conservativeness=0.01, max_running=3)
    for number in range(2):
        engine.add(joined(f"whole {number}", (number, *PREFIX[:7]), ((1, 2, 3), (4, 5)), max_new=30))
    engine.add(make_request("plain", (7, 7), max_new=20))
    engine.run_until_idle()
    assert engine.scheduler.totals.num_retracts > 0
    engine.check_answers()


def test_joined_requests_that_block_each_other_give_way():
    """Each has computed one branch, and there is no room for the second branch of either."""
    engine = make_engine(num_pages=24, chunk=4, max_running=4, conservativeness=0.01)
    for number in range(3):
        engine.add(joined(f"whole {number}", (), ((number,) * 8, (number + 3,) * 8), max_new=4))
    engine.add(make_request("plain", (7,) * 12, max_new=4))
    engine.run_until_idle()
    engine.check_answers()


def test_a_request_that_passes_a_joined_one_gets_its_memory():
    """One branch is computed; then a request comes that goes before the other, and does not fit beside the first one.

    It arrived later, so it would be retracted for the room that it lacks itself, again and again.
    """
    engine = make_engine(num_pages=24, chunk=16, max_running=1)
    engine.add(joined("whole", (), ((1,) * 16, (2,) * 4), (7,), max_new=2))
    engine.step()
    engine.add(make_request("passes", (3,) * 12, max_new=4, priority=1))
    engine.run_until_idle()
    engine.check_answers()
    assert [batch.entries[0].running.request.rid for batch in engine.batches[:2]] == ["whole", "passes"]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_step_reads_the_common_prefix_of_joined_requests_once(page_size: int):
    """The prefix and no more: what follows it in their rows are not the same pages, or not at the same places."""
    engine = make_engine(
        num_pages=4000 // page_size, page_size=page_size, max_running=8, context_length=400, shares_prefixes=True
    )
    prefix = PREFIX * 17 + (3,)
    for number in range(5):
        engine.add(joined(f"whole {number}", prefix, ((5, 5, 5, 5), (number, 6, 6)), (7,), max_new=8))
    engine.run_until_idle()
    groups = {(len(group.members), group.num_tokens) for batch in engine.batches for group in batch.groups}
    assert groups == {(5, 273 if page_size == 1 else 272)}
    engine.check_answers()


def test_copies_to_a_row_that_is_given_back_are_not_made():
    """Its pages are somebody else's by then."""
    engine = make_engine(page_size=4)
    engine.add(joined("whole", branches=((1, 2, 3), (4, 5))))
    scheduler = engine.scheduler
    while scheduler.joins.first_ready() is None:
        engine.step()
        scheduler.joins.begin_step()
    (join,) = scheduler.joins
    scheduler._plan_prefill(0, 0.0)  # as the beginning of a plan
    assert scheduler._admit(join.whole, 0.0) is None and scheduler.table.copies
    scheduler._requests.retract(join.whole)
    assert not scheduler.table.copies
    engine.run_until_idle()
    engine.check_answers()


def test_slots_are_not_copied_in_the_step_that_writes_them():
    """A neighbour computes the branch in this very step, so that its own request has nothing left to do."""
    engine = make_engine(page_size=4)
    engine.add(make_request("neighbour", (*PREFIX, 1, 2, 3, 4, 5)))
    engine.add(joined("whole", branches=((1, 2, 3, 4), (1, 2, 3, 4))))
    engine.run_until_idle()
    assert engine.scheduler.totals.branch_tokens_computed == 0
    engine.check_answers()


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_bound_on_passing_holds_while_branches_run(page_size: int):
    """None of its branches waits, and it cannot be admitted before the step that computes them has ended."""
    engine = make_engine(num_pages=200, page_size=page_size, chunk=16, max_running=4, max_bypass_tokens=0)
    engine.add(joined("whole", (3,), ((1, 2, 3, 4),)))
    for number in range(12):
        engine.add(make_request(f"passes {number}", (number % VOCAB, number // VOCAB, *PREFIX[:10]), max_new=0))
    engine.run_until_idle()
    assert 0 < engine.answers["whole"].num_bypassed <= 16
    engine.check_answers()


def test_the_bound_on_passing_holds_where_branches_give_way():
    """A request whose branches gave way in this step has none that waits, and must not be passed in the same step."""
    engine = make_engine(num_pages=27, chunk=8, max_running=3, conservativeness=0.01, max_bypass_tokens=4)
    engine.add(joined("first", (), ((3,) * 4, (0,)), max_new=1))
    engine.add(make_request("plain", ((7,) * 11 + (1,)), max_new=4))
    engine.add(joined("second", (), ((1,) * 5, (4,) * 8), max_new=1))
    engine.add(joined("third", (), ((0,) * 6, (3,) * 8), max_new=1))
    engine.run_until_idle()
    engine.check_answers()


@pytest.mark.parametrize("conservativeness", [0.1, 1.0])
def test_branches_are_counted_once_however_often_they_begin(conservativeness: float):
    """What a branch had computed before it gave way is no hit when it comes again."""
    num_again = 0
    for seed in range(10):
        rng = random.Random(seed)
        engine = make_engine(num_pages=24, max_running=3, chunk=8, conservativeness=conservativeness)
        for number in range(5):
            prefix, *branches = (tuple(rng.choices(range(1, 5), k=count)) for count in (3, 4, 4))
            engine.add(joined(f"whole {number}", prefix, tuple(branches), (number % 3 + 1,), return_cache_info=True))
            engine.step()
        engine.run_until_idle()
        totals = engine.scheduler.totals
        assert totals.branch_tokens == 5 * 8 and totals.branch_tokens_computed <= totals.branch_tokens
        assert totals.cached_tokens == sum(answer.cached_tokens for answer in engine.answers.values())
        num_again += totals.num_retracts
        engine.check_answers()
    assert num_again or conservativeness == 1.0, "nothing was given up"


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_branches_are_made_a_few_at_a_time(policy: str, page_size: int, monkeypatch: pytest.MonkeyPatch):
    """Many branches behind a long prefix: there is never a copy of the prefix for each of them."""
    monkeypatch.setattr(joined_requests, "COPIED_AT_ONCE", 0)
    monkeypatch.setattr(joined_requests, "MIN_AT_ONCE", 3)
    engine = make_engine(num_pages=600, context_length=400, max_running=2, page_size=page_size, policy=policy)
    branches = tuple((number % VOCAB, 3, number // VOCAB) for number in range(40))
    engine.add(joined("whole", branches=branches, position_jumps=((18, 2), (25, 3))))
    most, num_listed = 0, 0
    while engine.has_work:
        engine.step()
        for join in engine.scheduler.joins:
            most = max(most, len(join.pending))
            num_listed = max(num_listed, sum(len(branch.kept.pages) for branch in join.computed.values()))
    assert most <= 3 + 2, "those that wait, and those that run"
    assert num_listed * page_size < 16 + 40 * (3 + 2 * page_size), "the pages of the prefix are listed for each branch"
    assert engine.scheduler.totals.branch_tokens == 120
    engine.check_answers()


@pytest.mark.parametrize("policy", POLICIES)
def test_branches_that_are_cached_end_with_every_policy(policy: str, monkeypatch: pytest.MonkeyPatch):
    """A branch that needs no step is done at once; the next must have its turn before the plan gives up."""
    monkeypatch.setattr(joined_requests, "COPIED_AT_ONCE", 0)
    monkeypatch.setattr(joined_requests, "MIN_AT_ONCE", 1)
    engine = make_engine(policy=policy, overlaps=False)
    engine.add(joined("first"))
    engine.run_until_idle()
    engine.batches.clear()
    engine.add(joined("again"))
    engine.run_until_idle(10)
    assert planned(engine.batches[0]) == {"again": 1}
    engine.check_answers()


def test_it_makes_no_difference_when_branches_are_made(monkeypatch: pytest.MonkeyPatch):
    """Others wait that would pass the joined request; a branch that is not made yet must not lose its turn to them."""
    monkeypatch.setattr(joined_requests, "COPIED_AT_ONCE", 0)
    schedules = []
    for at_once in (1, 2, 1000):
        monkeypatch.setattr(joined_requests, "MIN_AT_ONCE", at_once)
        engine = make_engine(num_pages=400, context_length=200, max_running=4, chunk=8, max_bypass_tokens=8)
        engine.add(joined("whole", branches=tuple((number % 6, *PREFIX[:6]) for number in range(12))))
        for number in range(12):
            engine.add(make_request(f"passes {number}", (*PREFIX, number % VOCAB, 7, number // VOCAB), priority=1))
            engine.step()
        engine.run_until_idle()
        assert engine.answers["whole"].num_bypassed > 0
        schedules.append([[(e.running.arrival, e.start, e.num_new) for e in b.entries] for b in engine.batches])
    assert schedules[0] == schedules[1] == schedules[2]


def test_the_branches_of_a_large_joined_request_cost_little():
    """1024 branches behind 10 000 tokens: 10 million tokens, 40 MB, if each branch had a copy."""
    engine = make_engine(num_pages=40_000, context_length=20_000, max_running=16, chunk=2048)
    prefix = tuple(np.random.default_rng(0).integers(0, VOCAB, 10_000).tolist())
    request = joined("whole", prefix, ((1, 2),) * 1024, position_jumps=((500, 3),))
    tracemalloc.start()
    engine.scheduler.add(request)
    engine.scheduler.plan()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20
    engine.scheduler.abort("whole")
    check_scheduler(engine.scheduler)


def test_prefix_times_branches_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joined_requests, "MAX_COPIED_TOKENS", 48)
    engine = make_engine()
    engine.add(joined("most"))
    with pytest.raises(RequestError, match="may be at most 48, but this one has 16 times 4") as error:
        engine.add(joined("too many", branches=(*BRANCHES, (1,))))
    assert error.value.param == "joined"
    engine.add(joined("empty ones are none", branches=(*BRANCHES, ())))
    engine.run_until_idle()
    engine.check_answers()


def test_branches_do_not_fill_the_queue():
    engine = make_engine(max_running=2, num_pages=400, context_length=400, max_queued=3)
    branches = tuple((number % VOCAB, 3, number // VOCAB) for number in range(40))
    for number in range(2):
        engine.add(joined(f"whole {number}", (number, *PREFIX), branches))
        engine.step()
    scheduler = engine.scheduler
    assert len(scheduler.waiting) > 3 and scheduler.num_waiting == 2
    engine.add(make_request("third"))
    with pytest.raises(QueueFullError, match="3 requests wait already"):
        engine.add(make_request("fourth"))
    engine.run_until_idle()
    assert scheduler.num_waiting == 0
    engine.check_answers()


@pytest.mark.parametrize("num_steps", range(6))
def test_a_joined_request_can_be_aborted_at_any_time(num_steps: int):
    engine = make_engine(chunk=8, max_running=2)
    engine.add(joined("whole"))
    engine.add(make_request("other"))
    for _ in range(num_steps):
        engine.step()
    engine.abort("whole")
    engine.run_until_idle()
    assert engine.answers["whole"].finish is not None
    assert engine.answers["whole"].finish.type is FinishType.ABORT
    engine.check_answers()


def test_a_joined_request_may_be_prefill_only_and_have_empty_branches():
    engine = make_engine()
    engine.add(joined("nothing", max_new=0))
    engine.add(joined("empty", branches=((), (1, 2), ())))
    engine.add(joined("all empty", branches=((), ())))
    engine.add(joined("no prefix", (), ((1, 2), (), (3,))))
    engine.run_until_idle()
    engine.check_answers()


def test_more_branches_than_rows():
    engine = make_engine(max_running=2, num_pages=400, context_length=400)
    engine.add(joined("whole", branches=tuple((number % VOCAB, 3, number // VOCAB) for number in range(40))))
    engine.run_until_idle()
    engine.check_answers()


def test_a_cache_report_of_a_joined_prompt_names_the_first_miss():
    engine = make_engine()
    engine.add(make_request("first", (*PREFIX, *BRANCHES[0]), max_new=0))
    engine.add(make_request("second", (*PREFIX, 1, 2, 5), max_new=0))
    engine.run_until_idle()
    engine.add(joined("whole", return_cache_info=True))
    engine.run_until_idle()
    report = engine.answers["whole"].cache_report
    assert report is not None and (report.matched_tokens, report.matchable_tokens) == (16 + 5 + 2, 33)
    assert report.first_difference == 16 + 5 + 2 and set(report.cached_continuations) == {3, 5}
    engine.check_answers()


def test_a_joined_request_that_waits_too_long_is_taken_out_whole():
    engine = make_engine(max_running=1)
    engine.scheduler.add(make_request("runs", max_new=20), 0.0)
    engine.scheduler.plan(0.0)
    engine.scheduler.add(joined("waits"), 1.0)
    engine.scheduler.plan(1.5)
    assert engine.scheduler.expire(2.0) == ["waits"]
    assert engine.scheduler.expire(2.0) == [] and not len(engine.scheduler.joins)
    check_scheduler(engine.scheduler)


def test_a_joined_request_expires_in_its_turn():
    """It has no branch before the next plan, and its branches are then queued behind a request that came later."""
    engine = make_engine(max_running=1)
    engine.scheduler.add(make_request("runs", max_new=20), 0.0)
    engine.scheduler.plan(0.0)
    engine.scheduler.add(joined("no plan"), 1.0)
    assert engine.scheduler.expire(2.0) == ["no plan"]
    engine.scheduler.add(joined("earlier"), 3.0)
    engine.scheduler.add(make_request("later"), 5.0)
    engine.scheduler.plan(5.0)
    assert engine.scheduler.expire(4.0) == ["earlier"]
    check_scheduler(engine.scheduler)


def test_a_joined_request_that_has_begun_does_not_expire():
    engine = make_engine(max_running=1, chunk=4)
    engine.scheduler.add(joined("whole"), 0.0)
    engine.scheduler.plan(0.5)
    assert engine.scheduler.expire(9.0) == []


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((3,), "1 to 1024 branches"),
        ((3, 2), "never descending"),
        ((-1, 2), "branches"),
        ((2, 8), "put at least one token behind the branches"),
        ((0, 0), "tokens must come before"),
        (tuple(range(1026)), "1 to 1024 branches"),
    ],
)
def test_branches_that_make_no_sense_are_refused(starts: tuple[int, ...], message: str):
    with pytest.raises(RequestError, match=message) as error:
        Request(rid="r", input_ids=(1,) * 8, joined=starts)
    assert error.value.param == "joined"


def test_logprobs_of_a_joined_prompt_are_refused():
    with pytest.raises(RequestError, match="joined prompt"):
        joined("r", return_logprob=True, logprob_start_len=0)
    joined("r", return_logprob=True)


def test_what_cannot_fit_is_refused():
    engine = make_engine(context_length=64)
    with pytest.raises(RequestError, match="positions must be below 64") as error:
        engine.add(make_request("far", (1, 2, 3), position_jumps=((1, 60),)))
    assert error.value.param == "position_jumps"
    with pytest.raises(ContextLengthError):
        engine.add(joined("long", max_new=64))
    engine = make_engine(num_pages=12, page_size=4)
    with pytest.raises(RequestError, match="12 pages"):
        engine.add(joined("copies", max_new=3))
    engine = make_engine(num_pages=50, num_states=4)
    with pytest.raises(RequestError, match="state of each request"):
        engine.add(joined("kinds", max_new=3))
    assert engine.scheduler.is_idle


def test_a_joined_prompt_fits_in_all_windows_or_is_refused():
    total = len(joined("", max_new=0).input_ids)
    for windows in ((Window(total + 4),), (Window(total + 4, is_aligned=True), Window(100))):
        engine = make_engine(num_pages=200, windows=windows, part_rate=0.7)
        with pytest.raises(RequestError, match=rf"sliding window of {total + 4} tokens.* have {total + 5} tokens"):
            engine.add(joined("long", max_new=6))
        for rid in ("first", "again"):
            engine.add(joined(rid, max_new=5))
            engine.run_until_idle()
        assert engine.answers["again"].cached_tokens == total - 1
        engine.check_answers()
    engine = make_engine(windows=(Window(total),), page_size=4, part_rate=0.7)
    with pytest.raises(RequestError, match="pages of one token, but --page-size is 4"):
        engine.add(joined("pages", max_new=1))
    engine = make_engine(num_pages=200, windows=(Window(20),), chunk=8, part_rate=0.0, has_cache=False)
    with pytest.raises(RequestError, match="must fit in the 28 pages"):
        engine.add(joined("parts", PREFIX[:8], ((1, 2, 3), (2, 3, 4), (3, 4, 5)), max_new=1))


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10).map(tuple)
segments = st.lists(st.integers(0, 2), max_size=5).map(tuple)


@st.composite
def requests(draw: st.DrawFn, rid: str) -> Request:
    kind = draw(st.sampled_from(["plain", "plain", "jumps", "joined", "joined", "joined", "hold"]))
    sampling = SamplingParams(max_new_tokens=0 if kind == "hold" else draw(st.integers(0, 10)), ignore_eos=True)
    ids, starts = draw(prompts), ()
    if kind == "joined":
        branches = draw(st.lists(segments, min_size=1, max_size=4))
        made = joined(rid, draw(segments), tuple(branches), draw(prompts), 0) if any(branches) else None
        if made is not None:
            ids, starts = made.input_ids, made.joined
    jumps = ()
    if kind in ("jumps", "joined") and draw(st.booleans()):
        where = draw(st.lists(st.integers(0, len(ids) - 1), max_size=3, unique=True))
        jumps = tuple((index, draw(st.integers(1, 4))) for index in sorted(where))
    return Request(
        rid=rid,
        input_ids=ids,
        sampling=sampling,
        joined=starts,
        position_jumps=jumps,
        hold=kind == "hold",
        return_logprob=kind == "joined",
        return_cache_info=draw(st.booleans()),
        priority=draw(st.sampled_from([0, 0, 1])),
    )


def test_random_traffic_with_joined_prompts():
    """Whatever else runs, waits, is held, retracted or aborted: every token sees what it should, where it should."""
    hypothesis.settings(max_examples=25)(hypothesis.given(st.data())(lambda data: play(data)))()


@pytest.mark.slow
def test_random_traffic_with_joined_prompts_at_length():
    hypothesis.settings(max_examples=400)(hypothesis.given(st.data())(lambda data: play(data)))()


@pytest.mark.parametrize("num_examples", [15, pytest.param(150, marks=pytest.mark.slow)])
def test_random_traffic_with_joined_prompts_in_windows(num_examples: int):
    """Layers with a window, which some joined prompts fit in, and for which parts of pages are short."""

    def play_in_windows(data: st.DataObject) -> None:
        windows = data.draw(st.sampled_from([(Window(16),), (Window(30, is_aligned=True),), (Window(12), Window(40))]))
        play(data, {"windows": windows, "part_rate": data.draw(st.sampled_from([0.0, 0.5, 0.8]))})

    hypothesis.settings(max_examples=num_examples)(hypothesis.given(st.data())(play_in_windows))()


def play(data: st.DataObject, knobs: Mapping[str, Any] | None = None) -> None:
    page_size = data.draw(st.sampled_from([1, 1, 4]))
    shape = EngineShape(
        num_pages=data.draw(st.integers(6, 20)) * 4 // page_size,
        page_size=page_size,
        max_running=data.draw(st.integers(1, 4)),
        chunk=data.draw(st.sampled_from([4, 8, 32])),
        overlaps=data.draw(st.booleans()),
        has_decode=data.draw(st.booleans()),
        has_cache=data.draw(st.sampled_from([True, True, True, False])),
        policy=data.draw(st.sampled_from(POLICIES)),
        conservativeness=data.draw(st.sampled_from([0.01, 1.0])),
        max_bypass_tokens=data.draw(st.sampled_from([8, 10**6])),
        draft_len=data.draw(st.sampled_from([0, 0, 3])),
        shares_prefixes=data.draw(st.booleans()),
        context_length=96,
        **(knobs or {}),
    )
    at_once = data.draw(st.sampled_from([1, 2, 1000]))
    with mock.patch.multiple(joined_requests, COPIED_AT_ONCE=0, MIN_AT_ONCE=at_once):
        send(data, shape)


def going_on(data: st.DataObject, rid: str, answers: Iterable[Answer]) -> Request | None:
    """A request that goes on from an earlier joined one: with its branches, or all its tokens, or its answer too."""
    earlier = [answer for answer in answers if answer.request.joined]
    if not earlier:
        return None
    answer = data.draw(st.sampled_from(earlier))
    request, ids = answer.request, (*answer.request.input_ids, *answer.tokens)
    ids = ids[: data.draw(st.integers(request.joined[-1], len(ids)))] + data.draw(prompts)
    jumps = tuple(pair for pair in request.position_jumps if pair[0] <= len(ids))
    return dataclasses.replace(request, rid=rid, input_ids=ids, position_jumps=jumps)


def send(data: st.DataObject, shape: EngineShape) -> None:
    engine = SimulatedEngine(shape, TokenModel(broken_every=data.draw(st.sampled_from([50, 10**9]))))
    engine.scheduler.table.words._limit = data.draw(st.sampled_from([8, 1000]))
    for number in range(data.draw(st.integers(1, 10))):
        request = going_on(data, f"r{number}", engine.answers.values()) if data.draw(st.booleans()) else None
        request = request or data.draw(requests(f"r{number}"))
        try:
            engine.add(request)
        except QueueFullError:
            assert engine.scheduler.table.words._limit == 8
        except JsgError:
            num_tokens = len(request.input_ids) + request.sampling.max_new_tokens
            is_long = num_tokens > shape.num_pages * shape.page_size // 4
            assert is_long or (request.joined and shape.windows and (shape.page_size > 1 or num_tokens > 12))
        if engine.answers and data.draw(st.integers(0, 4)) == 0:
            rid = data.draw(st.sampled_from(sorted(engine.answers)))
            if engine.answers[rid].finish is None:
                engine.abort(rid)
        for _ in range(data.draw(st.integers(0, 3))):
            if engine.has_work:
                engine.step()
    engine.run_until_idle()
    engine.scheduler.break_holds(len(engine.scheduler.holds))
    engine.run_until_idle()
    assert not engine.scheduler.table.words._users
    totals = engine.scheduler.totals
    assert totals.branch_tokens_computed <= totals.branch_tokens
    assert totals.cached_tokens == sum(answer.cached_tokens for answer in engine.answers.values())
    engine.check_answers()
