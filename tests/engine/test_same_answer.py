"""The answer does not depend on luck (docs/architecture.md, "The same answer").

The reference is each request alone, on an engine that shares nothing. The others run random traffic on a pool so small
that they evict and retract all the time, with aborts in every phase.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.engine.core import EngineCore
from jsg.engine.device.noise import gumbel
from jsg.types import FinishType, Request, TokenLogprob
from tests.engine import small

SMALL_POOL = {"max_total_tokens": 200, "max_running_requests": 6, "schedule_conservativeness": 0.01}
DETERMINISTIC = {"deterministic": True}
MARGIN = 2e-4
LOGPROB_ERROR = 1e-4


def random_aborts(seed: int, arrivals: list[tuple[int, Request]]) -> dict[str, int]:
    rng = np.random.default_rng(seed + 1000)
    return {request.rid: when + int(rng.integers(0, 30)) for when, request in arrivals if rng.random() < 0.25}


def assert_is_prefix_of(outcome: small.Outcome, reference: small.Outcome) -> None:
    """An aborted request has said the beginning of what it would have said."""
    count = len(outcome.token_ids)
    assert outcome.token_ids == reference.token_ids[:count]
    assert outcome.logprobs == reference.logprobs[:count]


@pytest.fixture(scope="module")
def alone(core_of: Callable[..., EngineCore]) -> Callable[[int, Request], small.Outcome]:
    """What a request of a seed's traffic gives by itself; found once for all tests that meet the seed."""
    found: dict[tuple[int, str], small.Outcome] = {}

    def find(seed: int, request: Request) -> small.Outcome:
        if (seed, request.rid) not in found:
            found[seed, request.rid] = small.alone(core_of(**DETERMINISTIC, disable_radix_cache=True), request)
        return found[seed, request.rid]

    return find


def check_bitwise(core_of: Callable[..., EngineCore], alone, seed: int, policy: str, page_size: int = 1) -> None:
    """Runs one random traffic and compares every answer with the same request alone."""
    busy = core_of(**DETERMINISTIC, **SMALL_POOL, schedule_policy=policy, chunked_prefill_size=23, page_size=page_size)
    arrivals = small.traffic(seed)
    aborts = random_aborts(seed, arrivals)
    outcomes = small.run(busy, arrivals, aborts)
    for _, request in arrivals:
        outcome, expected = outcomes[request.rid], alone(seed, request)
        if outcome.finish is not None and outcome.finish.type is FinishType.ABORT:
            assert request.rid in aborts
            assert_is_prefix_of(outcome, expected)
        else:
            assert outcome.token_ids == expected.token_ids
            assert outcome.logprobs == expected.logprobs
            assert outcome.prompt_logprobs == expected.prompt_logprobs
            assert outcome.finish == expected.finish


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@given(seed=st.integers(0, 2**20))
@settings(max_examples=5)
def test_deterministic_mode_is_bitwise_the_same_under_any_traffic(core_of, alone, seed: int, policy: str):
    check_bitwise(core_of, alone, seed, policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lpm", "dfs-weight", "fcfs", "random"])
@given(seed=st.integers(0, 2**20))
@settings(max_examples=15)
def test_deterministic_mode_is_bitwise_the_same_under_much_traffic(core_of, alone, seed: int, policy: str):
    check_bitwise(core_of, alone, seed, policy)


@pytest.mark.slow
@given(seed=st.integers(0, 2**20))
@settings(max_examples=10)
def test_deterministic_mode_is_bitwise_the_same_with_pages_of_8(core_of, alone, seed: int):
    check_bitwise(core_of, alone, seed, "lpm", page_size=8)


def test_the_traffic_evicts_and_retracts(core_of):
    own = {"max_queued_requests": 100}  # an engine of its own: how much is admitted depends on what it has seen before
    core = core_of(**DETERMINISTIC, **SMALL_POOL, **own, schedule_policy="lpm", chunked_prefill_size=23)
    before = core.stats()
    for seed in range(4):
        small.run(core, small.traffic(seed))
    stats = core.stats()
    assert stats["num_retracts"] > before["num_retracts"]
    assert stats["num_evicted_tokens"] > before["num_evicted_tokens"]
    assert stats["cached_tokens"] > before["cached_tokens"]


def test_cold_and_warm_are_bitwise_the_same_in_deterministic_mode(core_of):
    core = core_of(**DETERMINISTIC)
    for _, request in small.traffic(7):
        cold = small.alone(core, request)
        warm = small.run(core, [(0, request)])[request.rid]
        assert (cold.token_ids, cold.logprobs, cold.prompt_logprobs) == (
            warm.token_ids, warm.logprobs, warm.prompt_logprobs,
        )  # fmt: skip


@pytest.mark.parametrize("knobs", [{}, {"disable_overlap_schedule": True}, {"page_size": 8}], ids=str)
def test_default_mode_differs_in_the_last_bits_only(core_of, knobs: dict, capsys: pytest.CaptureFixture[str]):
    reference = core_of(chunked_prefill_size=192, disable_radix_cache=True)
    busy = core_of(**SMALL_POOL, **knobs)
    num_tokens = num_ties = 0
    for seed in range(2):
        arrivals = small.traffic(seed, logprobs=small.VOCAB)
        outcomes = small.run(busy, arrivals)
        for _, request in arrivals:
            expected = small.alone(reference, request)
            num_tokens += len(expected.token_ids)
            num_ties += differs_at_a_tie(request, outcomes[request.rid], expected)
    with capsys.disabled():
        print(f"\n{num_ties} near-ties in {num_tokens} tokens {knobs}")
    assert num_tokens > 300
    assert num_ties <= 1 + num_tokens // 10_000


def differs_at_a_tie(request: Request, got: small.Outcome, expected: small.Outcome) -> bool:
    """Asserts that both agree up to a position where the reference itself was close to another token."""
    assert_close(got.prompt_logprobs or (), expected.prompt_logprobs or ())
    for i, (mine, theirs) in enumerate(zip(got.token_ids, expected.token_ids, strict=False)):
        if mine != theirs:
            assert margin(request, expected, i) < MARGIN, f"token {i} of {request.rid} differs without a tie"
            return True
        assert_close(got.logprobs[i : i + 1], expected.logprobs[i : i + 1])
    assert len(got.token_ids) == len(expected.token_ids)
    assert got.finish == expected.finish
    return False


def assert_close(got: tuple[TokenLogprob, ...] | list, expected: tuple[TokenLogprob, ...] | list) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.token_id == theirs.token_id
        if mine.logprob is None or theirs.logprob is None:
            assert mine.logprob is theirs.logprob
            continue
        assert abs(mine.logprob - theirs.logprob) <= LOGPROB_ERROR
        top = dict(theirs.top)
        assert all(abs(value - top[token]) <= LOGPROB_ERROR for token, value in mine.top if math.isfinite(value))


def margin(request: Request, outcome: small.Outcome, index: int) -> float:
    """Distance of the two best perturbed scores; penalties and nucleus edges count as ties where they apply."""
    sampling = request.sampling
    if sampling.frequency_penalty or sampling.repetition_penalty != 1 or sampling.min_new_tokens:
        return 0.0
    scores = np.full(small.VOCAB, -np.inf)
    for token, value in outcome.logprobs[index].top:
        scores[token] = value
    if sampling.temperature:
        if sampling.top_p < 1 or sampling.top_k > 0:
            return 0.0
        seed = sampling.sampling_seed or 0
        seeds = jnp.array([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32)
        noise = np.asarray(gumbel(seeds, jnp.array([index]), small.VOCAB))[0]
        scores = scores / sampling.temperature + noise
    best = np.sort(scores)[-2:]
    return float(best[1] - best[0])


def test_no_trace_and_no_compile_after_warm_up(core_of):
    core: EngineCore = core_of(**SMALL_POOL, is_warm=True)
    with small.nothing_compiled(core):
        small.run(core, small.traffic(11))
