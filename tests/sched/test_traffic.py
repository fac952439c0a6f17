"""Random traffic on the scheduler with a simulated device: however requests are scheduled, every answer is the same."""

import dataclasses
import random
import zlib
from collections import Counter
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jsg.config import POLICIES
from jsg.sched import admission, table
from jsg.types import FinishType, Request, SamplingParams
from jsg.window import Window
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.token_model import VOCAB

NAMESPACES = ("", "", "", "tenant")
PRIORITIES = (0, 0, 0, 10, -3)
POSTS = ("", "", "a", "a", "b")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What clients do: `num_requests` arrive, up to `burst` before a step; some of them are aborted at some step."""

    seed: int
    num_requests: int
    burst: int
    abort_rate: float


def random_prompt(rng: random.Random, longest: int) -> tuple[int, ...]:
    """A prompt that shares prefixes of all lengths with the others: a few branches, then its own end; or one of two."""
    shared = random.Random(rng.randrange(2)).choices(range(VOCAB), k=longest)
    if rng.random() < 0.1:
        return tuple(shared[: longest // 2]) or (0,)
    tokens = shared[: rng.randrange(longest)]
    while len(tokens) < longest and rng.random() < 0.6:
        tokens += [rng.randrange(2)] * rng.randrange(1, 5)
    return tuple(tokens[:longest]) or (0,)


def random_request(rng: random.Random, rid: str, shape: EngineShape) -> Request:
    """Any request that the engine does not refuse."""
    limit = min(shape.context_length, shape.num_pages * shape.page_size)
    prompt = random_prompt(rng, limit * 2 // 3)
    most_new = rng.choice([0, 1, limit, limit])
    max_new = min(most_new, limit - len(prompt))
    sampling = SamplingParams(
        max_new_tokens=max_new,
        min_new_tokens=rng.randint(0, max_new) if rng.random() < 0.2 else 0,
        ignore_eos=rng.random() < 0.8,
        stop_token_ids=tuple(rng.sample(range(VOCAB), k=rng.choice([0, 0, 0, 0, 1]))),
    )
    return Request(
        rid=rid,
        input_ids=prompt,
        sampling=sampling,
        return_logprob=(scored := rng.random() < 0.3),
        logprob_start_len=rng.randint(-1, len(prompt)) if scored else -1,
        namespace=rng.choice(NAMESPACES),
        priority=rng.choice(PRIORITIES),
        return_cache_info=rng.random() < 0.3,
        post=POSTS[zlib.crc32(rid.encode()) % len(POSTS)],
        snapshot_at=tuple(end for end in range(1, len(prompt) + 1) if zlib.crc32(f"{rid} {end}".encode()) % 9 == 0),
        turn_end=zlib.crc32(rid[::-1].encode()) % (len(prompt) + 1),
    )


def run_traffic(shape: EngineShape, traffic: Traffic) -> SimulatedEngine:
    """Plays the traffic to its end and checks every answer."""
    rng = random.Random(traffic.seed)
    engine = SimulatedEngine(shape)
    num_sent = 0
    while num_sent < traffic.num_requests:
        for _ in range(min(rng.randint(0, traffic.burst), traffic.num_requests - num_sent)):
            engine.add(random_request(rng, f"r{num_sent}", shape))
            num_sent += 1
        abort_somebody(engine, rng, traffic.abort_rate)
        engine.step()
    for _ in range(20):
        abort_somebody(engine, rng, traffic.abort_rate)
        engine.step()
    engine.run_until_idle()
    engine.check_answers()
    return engine


def abort_somebody(engine: SimulatedEngine, rng: random.Random, rate: float) -> None:
    """Live requests in any phase; sometimes one that has ended, which must be ignored."""
    if engine.answers and rng.random() < rate:
        rids = [rid for rid, answer in engine.answers.items() if answer.finish is None or rng.random() < 0.1]
        if rids:
            engine.abort(rng.choice(rids))


shapes = st.builds(
    EngineShape,
    page_size=st.sampled_from([1, 1, 2, 2, 4]),
    num_pages=st.integers(10, 30),
    context_length=st.sampled_from([16, 24, 40]),
    max_running=st.sampled_from([2, 4, 6, 8]),
    chunk=st.integers(8, 20),
    has_decode=st.sampled_from([True, True, False]),
    has_cache=st.sampled_from([True, True, True, False]),
    max_bypass_tokens=st.sampled_from([0, 10, 50, 1000]),
    max_prefill_tokens=st.sampled_from([1, 10, 1000]),
    conservativeness=st.sampled_from([0.02, 0.1, 1.0]),
)
traffics = st.builds(
    Traffic,
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 50),
    burst=st.integers(1, 20),
    abort_rate=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
)


ANY_POLICY = st.sampled_from(POLICIES)
COMMON = ("retracts", "evictions", "hits", "aborts", "passed")


def play_traffic(num_examples: int, **fields: st.SearchStrategy[Any]) -> Counter[str]:
    """Plays that many random traffics on engines with these fields beside random ones; what happened in all of them."""
    happened: Counter[str] = Counter()

    @settings(max_examples=num_examples, suppress_health_check=[HealthCheck.too_slow])
    @given(shape=shapes, changes=st.fixed_dictionaries(fields), traffic=traffics)
    def play(shape: EngineShape, changes: dict[str, Any], traffic: Traffic) -> None:
        engine = run_traffic(dataclasses.replace(shape, **changes), traffic)
        check_totals(engine)
        answers = engine.answers.values()
        happened["retracts"] += engine.scheduler.totals.num_retracts
        happened["evictions"] += engine.cache.stats().evicted_tokens
        happened["hits"] += sum(answer.cached_tokens > 0 for answer in answers)
        happened["aborts"] += sum(answer.is_aborted for answer in answers)
        happened["passed"] += sum(answer.num_bypassed > shape.max_bypass_tokens for answer in answers)
        happened["drafts"] += engine.num_drafts
        happened["lacking"] += sum(len(batch.lacking) for batch in engine.batches)
        entries = [entry for batch in engine.batches for entry in batch.entries]
        happened["snapshots"] += sum(entry.state_source != entry.state_slot for entry in entries)
        happened["behind wrong drafts"] += sum(
            entry.samples and not entry.ends_prefill and entry.num_new > 1 + entry.num_drafts for entry in entries
        )
        happened["read again"] += sum(entry.is_known for entry in entries)
        happened["drafts beside chunks"] += sum(
            batch.has_drafts and any(entry.num_new > 1 + entry.num_drafts for entry in batch.entries)
            for batch in engine.batches
        )

    # Else one retract makes an engine careful for the whole run, and no prompt is long enough for a state of its own.
    with mock.patch.object(admission, "DECAY_STEPS", 5), mock.patch.object(table, "LEAST_AGAIN", 3):
        play()
    return happened


def check_wild(happened: Counter[str], names: tuple[str, ...], least: int) -> None:
    """Asserts that each of the named things happened so often."""
    rare = [name for name in names if happened[name] < least]
    assert not rare, f"the traffic is too tame to prove anything: {happened}"


def test_scheduling_changes_no_answer():
    check_wild(play_traffic(16, policy=ANY_POLICY, overlaps=st.booleans()), COMMON, 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "overlaps"),
    [
        pytest.param(policy, overlaps, marks=() if overlaps == (number % 2 == 0) else pytest.mark.long)
        for number, policy in enumerate(POLICIES)
        for overlaps in (True, False)
    ],
)
def test_scheduling_changes_no_answer_at_length(policy: str, overlaps: bool):
    """Every second policy with steps that overlap and the others without them; the rest of this grid is long."""
    check_wild(play_traffic(60, policy=st.just(policy), overlaps=st.just(overlaps)), COMMON, 50)


def test_drafts_change_no_answer():
    """Right or wrong, beside chunks and other requests, with retracts and tokens that end a request on the way."""
    happened = play_traffic(40, draft_len=st.just(5), right_drafts=st.sampled_from([0.5, 0.9, 1.0]))
    check_wild(happened, ("drafts", "drafts beside chunks", "retracts", "hits"), 20)


@pytest.mark.slow
@pytest.mark.parametrize("right_drafts", [0.9, *(pytest.param(part, marks=pytest.mark.long) for part in (0.5, 1.0))])
def test_drafts_change_no_answer_at_length(right_drafts: float):
    """Drafts that are never wrong, or as often as not, are long: the test before draws them too."""
    happened = play_traffic(50, draft_len=st.just(5), right_drafts=st.just(right_drafts))
    check_wild(happened, ("drafts", "drafts beside chunks", "retracts", "hits"), 20)


def check_totals(engine: SimulatedEngine) -> None:
    """The counters are what the clients saw."""
    totals, answers = engine.scheduler.totals, engine.answers.values()
    ends = Counter(answer.finish.type for answer in answers if answer.finish)
    assert (totals.num_aborted, totals.num_failed) == (ends[FinishType.ABORT], ends[FinishType.ERROR])
    assert totals.cached_tokens == sum(answer.cached_tokens for answer in answers)
    prompts = {rid: len(answer.request.input_ids) for rid, answer in engine.answers.items()}
    never_ran = {rid for rid, answer in engine.answers.items() if answer.is_aborted}
    ran = sum(prompts[rid] for rid in prompts.keys() - never_ran)
    assert ran <= totals.prompt_tokens <= sum(prompts.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_recorded_trace_replays_exactly(policy: str):
    shape = EngineShape(num_pages=24, page_size=2, max_running=6, policy=policy, conservativeness=0.1)

    def record(seed: int) -> list[object]:
        engine = run_traffic(shape, Traffic(seed, num_requests=24, burst=10, abort_rate=0.1))
        assert engine.scheduler.totals.num_retracts > 0 and engine.cache.stats().evicted_tokens > 0
        return [
            (b.key, b.dirty_rows, [(e.running.request.rid, e.place.row, e.start, e.num_new) for e in b.entries])
            for b in engine.batches
        ]

    first = record(1)
    assert first == record(1) and first != record(2)


ALIGNED = (Window(5, is_aligned=True),)
WINDOW_SETS = [(Window(1),), (Window(2),), (Window(5),), ALIGNED, (Window(9),), (Window(3), Window(8, is_aligned=True))]
WINDOWS = {
    "windows": st.sampled_from(WINDOW_SETS),
    "part_rate": st.sampled_from([0.0, 0.3, 0.6]),
    "has_full_layers": st.booleans(),
    "draft_len": st.sampled_from([0, 0, 3]),
}


def test_freeing_pages_behind_windows_changes_no_answer():
    """Layers with windows, whose pages are freed and found again, with retracts, aborts, drafts and evictions."""
    happened = play_traffic(40, policy=ANY_POLICY, overlaps=st.booleans(), **WINDOWS)
    check_wild(happened, (*COMMON, "drafts", "lacking"), 20)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [80, pytest.param(150, marks=pytest.mark.long)])
def test_freeing_pages_behind_windows_changes_no_answer_at_length(examples: int):
    happened = play_traffic(examples, policy=ANY_POLICY, overlaps=st.booleans(), **WINDOWS)
    check_wild(happened, (*COMMON, "drafts", "lacking"), 50)


STATES = {
    "num_states": st.sampled_from([0, 1, 3, 8, 30]),
    "num_pages": st.integers(14, 60),
    "draft_len": st.sampled_from([0, 3]),
}


def test_states_of_prefixes_change_no_answer():
    """Hybrids: each token is applied to a state once, whoever goes on from whose, and no wrong draft ever."""
    happened = play_traffic(40, policy=ANY_POLICY, overlaps=st.booleans(), **STATES)
    check_wild(happened, (*COMMON, "snapshots", "drafts", "behind wrong drafts"), 20)


@pytest.mark.slow
def test_states_of_prefixes_change_no_answer_at_length():
    happened = play_traffic(200, policy=ANY_POLICY, overlaps=st.booleans(), **STATES)
    check_wild(happened, (*COMMON, "snapshots", "drafts", "behind wrong drafts"), 50)
    check_wild(happened, ("read again",), 5)
