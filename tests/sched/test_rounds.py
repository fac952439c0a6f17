"""Posts take turns: one with many prompts keeps neither a later post nor a running request waiting."""

import dataclasses
import random

import pytest

from jsg.config import POLICIES
from jsg.sched.rounds import ROUND, Rounds
from jsg.types import Request, SamplingParams
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.token_model import VOCAB, TokenModel

NUM_PROMPTS = 200
PROMPT_LEN = 12
NEVER = 10**9
shape = EngineShape(num_pages=8000, max_running=12, chunk=16, context_length=400, max_bypass_tokens=40)


def sampling(max_new: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new, ignore_eos=True)


def prompts(post: str, *, max_new: int, common: int, count: int = NUM_PROMPTS) -> list[Request]:
    """Prompts that only read, so many tokens of which are the same in all."""
    draw = random.Random(post)
    head = draw.choices(range(1, VOCAB), k=common)
    return [
        Request(
            rid=f"{post}{number}",
            input_ids=(*head, *draw.choices(range(1, VOCAB), k=PROMPT_LEN - common)),
            sampling=sampling(max_new),
            post=post,
        )
        for number in range(count)
    ]


def steps_until(engine: SimulatedEngine, rid: str) -> int:
    """How many steps it takes until a request has its first token."""
    for number in range(1, 3000):
        engine.step()
        if engine.answers[rid].tokens:
            return number
    raise AssertionError(f"{rid} has no token")


def begun(engine: SimulatedEngine) -> list[str]:
    """The requests in the order in which they were begun."""
    return [running.request.rid for batch in engine.batches for running in batch.admitted]


@pytest.mark.parametrize(
    "policy", [pytest.param(policy, marks=() if policy in ("fcfs", "lpm") else pytest.mark.slow) for policy in POLICIES]
)
@pytest.mark.parametrize(("max_new", "common"), [(0, 0), (0, 8), (1, 8)])
def test_a_later_post_waits_for_a_bounded_number_of_steps(policy: str, max_new: int, common: int):
    """2 400 prompt tokens came before it, which are 170 steps. Those who decode have a token in each step."""
    engine = SimulatedEngine(dataclasses.replace(shape, policy=policy), TokenModel(broken_every=NEVER))
    engine.add(Request(rid="stream", input_ids=(1, 2), sampling=sampling(300)))
    for _ in range(3):
        engine.step()
    for request in prompts("many", max_new=max_new, common=common):
        engine.add(request)
    for _ in range(5):
        engine.step()
    engine.add(Request(rid="late", input_ids=(2,) * PROMPT_LEN, sampling=sampling(2), post="late"))
    before = len(engine.answers["stream"].tokens)
    ahead = 2 * (shape.chunk + PROMPT_LEN) + shape.max_bypass_tokens + shape.chunk + PROMPT_LEN
    most = -(-ahead // (shape.chunk - 3)) + 2  # rows that decode take a part of a step; a result comes a step later
    num_steps = steps_until(engine, "late")
    assert num_steps <= most
    assert len(engine.answers["stream"].tokens) - before == num_steps
    engine.run_until_idle()
    engine.check_answers()


def test_the_order_of_one_post_is_as_before():
    """Its prompts come in their order, and those with the longest cached prefix first."""
    engine = SimulatedEngine(shape)
    for own in range(1, 6):
        for kind in (1, 2):
            ids = (kind,) * 8 + (own,) * 4
            engine.add(Request(rid=f"{kind}{own}", input_ids=ids, sampling=sampling(0), post="one"))
    engine.run_until_idle()
    assert begun(engine) == [f"{kind}{own}" for kind in (1, 2) for own in range(1, 6)]


def test_two_posts_take_turns():
    engine = SimulatedEngine(dataclasses.replace(shape, policy="fcfs"))
    for post in "ab":
        for request in prompts(post, max_new=0, common=0, count=24):
            engine.add(request)
    engine.run_until_idle()
    order = begun(engine)
    for half in (order[:24], order[24:]):
        assert 10 <= sum(rid[0] == "a" for rid in half) <= 14
    for post in "ab":
        assert [rid for rid in order if rid[0] == post] == [f"{post}{number}" for number in range(24)]


def request(post: str, length: int, *, ids: tuple[int, ...] | None = None, num_branches: int = 0) -> Request:
    joined = (0, *range(1, num_branches + 1)) if num_branches else ()
    return Request(rid="a", input_ids=ids or (random.randrange(10**6),) * length, post=post, joined=joined)


def test_requests_that_come_alone_wait_as_they_came():
    """However many wait, and with those that come back because memory was short."""
    rounds, draw, waiting, given = Rounds(10), random.Random(0), list[int](), list[int]()
    for _ in range(300):
        waiting.append(
            rounds.enter(request(draw.choice(["", str(len(given))]), draw.randrange(1, 50)), min(waiting, default=None))
        )
        given.append(waiting[-1])
        while waiting and draw.random() < 0.5:
            waiting.remove(draw.choice(waiting))
        if draw.random() < 0.1:
            waiting = list({*waiting, draw.choice(given)})
    assert given == sorted(given)


def test_a_post_has_so_many_tokens_in_each_round():
    rounds = Rounds(10)
    assert rounds.enter(request("a", 4), None) // ROUND == 0
    assert [rounds.enter(request("a", 4), 0) // ROUND for _ in range(7)] == [1, 1, 1, 2, 2, 3, 3]
    assert rounds.enter(request("b", 35), 0) // ROUND == 1 and rounds.enter(request("b", 1), 0) // ROUND == 4
    assert rounds.enter(request("c", 1), 2 * ROUND) // ROUND == 3, "others are there already"
    assert rounds.enter(request("c", 1), ROUND) // ROUND == 3, "as when one comes back that was the first to come"
    for _ in range(8):
        rounds.leave("a")
    assert rounds.enter(request("a", 1), ROUND) // ROUND == 3
    for post in "abbcc":
        rounds.leave(post)
    assert not rounds._posts


def test_what_prompts_have_in_common_counts_once():
    rounds = Rounds(10)
    head = tuple(range(100))
    turns = [rounds.enter(request("a", 0, ids=(*head, own)), 0) // ROUND for own in range(101, 113)]
    assert turns == [1] + [11] * 9 + [12] * 2
    same = request("b", 50)
    assert [rounds.enter(same, 0) // ROUND for _ in range(12)] == [1] + [6] * 10 + [7]


def test_rounds_end_although_more_and_more_come():
    """So the last prompt of a long post has its turn, with a queue that is never empty."""
    rounds, waiting = Rounds(10), list[int]()
    for _ in range(20):
        waiting.append(rounds.enter(request("long", 10), min(waiting, default=None)))
    last, num_passed = waiting[-1], 0
    waiting += [rounds.enter(request("", 1), waiting[0]) for _ in range(10)]
    while last in waiting:
        waiting.append(rounds.enter(request("", 1), min(waiting)))
        waiting.remove(min(waiting))
        num_passed += 1
    assert num_passed <= 20 * 30, "the queue has 30 requests, which pass it at most once in each round"


def test_the_debt_of_a_post_ends_when_nobody_waits():
    rounds = Rounds(10)
    for _ in range(50):
        rounds.enter(request("program", 100), None)
    assert rounds.enter(request("", 1), None) // ROUND >= 490


def test_branches_have_places_of_their_own():
    rounds = Rounds(10)
    assert [rounds.enter(request("", 9, num_branches=n), None) for n in (0, 2, 0)] == [0, 4, 5]
