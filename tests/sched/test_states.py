"""Where the states of hybrids are kept, on a simulated device: what each request finds, and what drafts cost."""

import random

import pytest

from jsg.config import POLICIES
from jsg.sched.batch import Proposal
from jsg.sched.drafts.adding import MOST_AGAIN
from jsg.types import Request, SamplingParams
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.token_model import VOCAB, TokenModel, prefix_hashes


def make_engine(num_states: int = 8, **knobs: int | float | bool | str) -> SimulatedEngine:
    shape = {"num_pages": 500, "context_length": 400, "max_running": 4, "chunk": 256} | knobs
    return SimulatedEngine(EngineShape(num_states=num_states, **shape), TokenModel(broken_every=10**9))  # pyright: ignore[reportArgumentType]


def prompt(length: int, seed: int = 1) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCAB - 1), k=length))


def asked(rid: str, tokens: tuple[int, ...], max_new: int = 4, **fields: object) -> Request:
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    return Request(rid=rid, input_ids=tokens, sampling=sampling, **fields)  # pyright: ignore[reportArgumentType]


def found(engine: SimulatedEngine, *requests: Request) -> list[int]:
    """How many tokens of each prompt were cached, if they arrive together."""
    for request in requests:
        engine.add(request)
    engine.run_until_idle()
    return [engine.answers[request.rid].cached_tokens for request in requests]


@pytest.mark.parametrize(("page_size", "length", "cached"), [(1, 64, 63), (16, 62, 48), (16, 64, 48), (16, 65, 64)])
def test_answers_to_one_prompt_go_on_from_the_first_one(page_size: int, length: int, cached: int):
    engine = make_engine(page_size=page_size)
    points = {"snapshot_at": (length,)}
    assert found(engine, *(asked(f"r{i}", prompt(length), **points) for i in range(4))) == [0, cached, cached, cached]


def test_a_prefix_gets_a_state_where_a_second_prompt_parts_from_the_first():
    engine, stem = make_engine(), prompt(100)
    each = [found(engine, asked(f"r{i}", (*stem, i, *prompt(40, seed=i + 2)))) for i in range(4)]
    assert each == [[0], [0], [100], [100]]


def test_requests_that_wait_together_compute_what_they_share_once():
    engine, stem = make_engine(), prompt(100)
    assert found(engine, *(asked(f"r{i}", (*stem, i, *prompt(40, seed=i + 2))) for i in range(4))) == [0, 100, 100, 100]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_waits_for_a_state_lets_others_pass(policy: str):
    engine, stem = make_engine(policy=policy), prompt(100)
    first, second = (asked(f"r{i}", (*stem, i, *prompt(40, seed=i + 2)), snapshot_at=(100,)) for i in range(2))
    others = [asked(f"other {i}", prompt(30, seed=i + 7)) for i in range(2)]
    for request in (first, second, *others):
        engine.add(request)
    engine.step()
    admitted = {running.request.rid for running in engine.scheduler.running}
    assert len(admitted & {"r0", "r1"}) == 1 and admitted > {"other 0", "other 1"}
    engine.abort("r1" if "r0" in admitted else "r0")
    engine.add(asked("again", second.input_ids))
    engine.run_until_idle()
    assert engine.answers["again"].cached_tokens >= 100


def test_who_waits_for_a_state_is_passed_by_no_more_than_the_bound():
    engine, stem = make_engine(policy="fcfs", chunk=60, max_bypass_tokens=20), prompt(100)
    points = {"snapshot_at": (30, 60, 100)}
    first, second = (asked(f"r{i}", (*stem, i, *prompt(40, seed=i + 2)), **points) for i in range(2))
    for request in (first, second, *(asked(f"other {i}", prompt(30, seed=i + 7)) for i in range(8))):
        engine.add(request)
    engine.step()
    rids = [running.request.rid for running in engine.scheduler.running]
    assert rids == ["r0", "other 0"]
    engine.step()
    assert [running.request.rid for running in engine.scheduler.running] == rids, "it was passed by 30"
    engine.run_until_idle()
    assert engine.answers["r1"].cached_tokens == 100


@pytest.mark.parametrize("drops", [False, True])
def test_a_conversation_goes_on_from_its_last_turn(drops: bool):
    """A template that drops thoughts writes the last two tokens of the prompt otherwise in the next turn."""
    engine, history, cached, expected = make_engine(num_states=3), prompt(50), [], [0]
    for turn in range(6):
        length = len(history)
        cached += found(engine, asked(f"turn {turn}", history, turn_end=length - 2 if drops else length))
        answer = tuple(engine.answers[f"turn {turn}"].tokens)
        history = history[:-2] + prompt(30, seed=turn) if drops else (*history, *answer, *prompt(20, seed=turn))
        expected.append(length - 2 if drops else length + len(answer) - 1)
    assert cached == expected[:-1]


@pytest.mark.parametrize("length", [16, 18])
def test_a_hold_keeps_the_state_at_its_last_whole_page(length: int):
    engine = make_engine(num_states=2, page_size=4)
    found(engine, asked("hold", prompt(length), 0, hold=True))
    for i in range(6):
        found(engine, asked(f"other {i}", prompt(24, seed=i + 5), snapshot_at=(20,)))
    assert found(engine, asked("fork", (*prompt(length), 1, 2, 3))) == [16]


def test_drafts_go_on_when_the_cache_is_full_of_states():
    engine, drafts = make_engine(draft_len=3, right_drafts=1.0, overlaps=False), []
    for i in range(30):
        before = engine.num_drafts
        found(engine, asked(f"r{i}", prompt(12, seed=i), 20))
        drafts.append(engine.num_drafts - before)
    assert min(drafts) > 3


def test_tokens_that_run_again_do_not_pile_up():
    """Three drafts in each step, all of them wrong."""

    class Wrong(SimulatedEngine):
        def _proposals(self) -> dict[str, Proposal]:
            running = [r for r in self.scheduler.running if r.place and not r.place.is_prefilling]
            states = [prefix_hashes(r.tokens[: r.num_known], r.request)[-1] for r in running]
            right = [self.model.next_token(state, r.num_output) for state, r in zip(states, running, strict=True)]
            wrong = [((token + 1) % VOCAB,) * 3 for token in right]
            pairs = zip(running, wrong, strict=True)
            return {r.request.rid: Proposal(tokens, False, len(tokens)) for r, tokens in pairs}

    shape = EngineShape(num_pages=900, context_length=400, num_states=8, draft_len=3, chunk=64, overlaps=False)
    engine = Wrong(shape, TokenModel(broken_every=10**9))
    found(engine, asked("r", prompt(20), 100))
    entries = [entry for batch in engine.batches for entry in batch.entries][1:]
    assert max(entry.num_new for entry in entries) <= MOST_AGAIN + 4
    assert sum(entry.num_new for entry in entries) < 800
