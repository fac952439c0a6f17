"""The bound on waiting: a request that was bypassed too often goes to the head of the queue."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsg.config import POLICIES
from jsg.sched.bypass import BypassLedger
from jsg.types import Request, SamplingParams
from tests.sched.simulated import Answer, EngineShape, SimulatedEngine
from tests.sched.token_model import VOCAB, TokenModel

HOT = tuple([1, 2, 3, 4] * 4)
COLD = tuple([5, 6] * 8)
NEVER = 10**9


def hot(number: int, max_new: int = 3) -> Request:
    """A request whose prefix is cached; four tokens of its own."""
    own = tuple(number // VOCAB**digit % VOCAB for digit in range(4))
    return Request(rid=f"hot{number}", input_ids=HOT + own, sampling=sampling(max_new))


def sampling(max_new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new, ignore_eos=True)


def offer(shape: EngineShape, *, num_steps: int, cold: tuple[int, ...] = COLD, hot_new: int = 3) -> Answer:
    """One cold request, and before each of so many steps two more hot ones, until the cold one has its answer."""
    engine = SimulatedEngine(shape, TokenModel(broken_every=NEVER))
    for number in range(4):
        engine.add(hot(number))
    engine.step()
    engine.add(Request(rid="cold", input_ids=cold, sampling=sampling(2)))
    for number in range(4, 4 + 2 * num_steps, 2):
        engine.add(hot(number, hot_new))
        engine.add(hot(number + 1, hot_new))
        engine.step()
        if engine.answers["cold"].finish is not None:
            break
    return engine.answers["cold"]


shape = EngineShape(num_pages=100, max_running=6, chunk=10, max_bypass_tokens=100)


def test_longest_prefix_first_alone_starves_the_cold():
    answer = offer(dataclasses.replace(shape, max_bypass_tokens=NEVER), num_steps=120)
    assert answer.finish is None and answer.num_bypassed > 500


def test_the_bound_ends_the_wait():
    answer = offer(shape, num_steps=60)
    assert answer.finish is not None
    assert 100 < answer.num_bypassed <= 100 + shape.chunk, "it was passed, as often as is allowed and no more"


def test_a_bound_of_zero_lets_one_chunk_pass():
    answer = offer(dataclasses.replace(shape, max_bypass_tokens=0), num_steps=20)
    assert answer.finish is not None and answer.num_bypassed <= shape.chunk


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bound_holds_when_memory_blocks(policy: str):
    """The cold prompt needs most of the pool, which the hot ones keep full."""
    tight = dataclasses.replace(shape, policy=policy, num_pages=50, max_running=8, max_bypass_tokens=20)
    answer = offer(tight, num_steps=100, cold=COLD * 2, hot_new=8)
    assert answer.finish is not None and answer.num_bypassed <= 20 + shape.chunk


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bound_holds_when_rows_block(policy: str):
    """There are two rows, and two requests that hold them for long."""
    narrow = dataclasses.replace(shape, policy=policy, max_running=2, max_bypass_tokens=20)
    answer = offer(narrow, num_steps=150, hot_new=20)
    assert answer.finish is not None and answer.num_bypassed <= 20 + shape.chunk


@pytest.mark.parametrize("policy", POLICIES)
def test_no_priority_starves_anybody(policy: str):
    """One request of a low priority, and before every step two more of a high one."""
    engine = SimulatedEngine(dataclasses.replace(shape, policy=policy), TokenModel(broken_every=NEVER))
    for number in range(4):
        engine.add(dataclasses.replace(hot(number), priority=7))
    engine.add(Request(rid="cold", input_ids=COLD, sampling=sampling(2), priority=-7))
    for number in range(4, 200, 2):
        engine.step()
        engine.add(dataclasses.replace(hot(number), priority=7))
        engine.add(dataclasses.replace(hot(number + 1), priority=7))
    answer = engine.answers["cold"]
    assert answer.finish is not None
    assert 100 < answer.num_bypassed <= 100 + shape.chunk, "it was passed, as often as is allowed and no more"


def test_unfinished_prompts_of_later_arrivals_give_way():
    """A later arrival in the middle of its prompt keeps neither its only row nor its memory."""
    engine = SimulatedEngine(dataclasses.replace(shape, max_running=1, chunk=8, max_bypass_tokens=0))
    engine.add(Request(rid="warm", input_ids=HOT, sampling=sampling(0)))
    engine.run_until_idle()
    engine.batches.clear()
    engine.add(Request(rid="cold", input_ids=COLD, sampling=sampling(1)))
    engine.add(Request(rid="long", input_ids=(*HOT, *[7, 0] * 12), sampling=sampling(1)))
    engine.step()
    assert engine.batches[0].entries[0].running.request.rid == "long"
    engine.step()
    engine.step()
    assert [e.running.request.rid for e in engine.batches[1].entries] == ["cold"]
    assert engine.scheduler.totals.num_retracts == 1
    engine.run_until_idle()
    engine.check_answers()


# The ledger.


@given(
    st.lists(
        st.tuples(st.sampled_from(["add", "record", "end"]), st.integers(0, 40), st.integers(1, 100)), max_size=80
    ),
    st.integers(0, 500),
)
def test_ledger_counts_the_tokens_of_later_places_since_a_request_came(events: list[tuple[str, int, int]], bound: int):
    ledger = BypassLedger(bound)
    passed: dict[int, int] = {}
    used = set[int]()
    for kind, place, num_tokens in events:
        if kind == "add" and place not in used:
            used.add(place)  # as places are given once only
            passed[place] = 0
            ledger.add(place)
        elif kind == "record" and place in passed:
            ledger.record(place, num_tokens)
            passed |= {earlier: passed[earlier] + num_tokens for earlier in passed if earlier < place}
        elif kind == "end" and passed.pop(place, None) is not None:
            ledger.end(place)
        for asked, num_passed in passed.items():
            assert ledger.bypassed(asked) == num_passed and ledger.is_overdue(asked) == (num_passed > bound)


def test_ledger_stays_small():
    ledger = BypassLedger(0)
    ledger.add(0)
    for place in range(1, 20_000):
        ledger.add(place)
        ledger.record(place, 1)
        if place > 100:
            ledger.end(place - 100)
    assert len(ledger._tokens) <= 2048 and ledger.bypassed(19_950) == 49 and ledger.bypassed(0) == 19_999
