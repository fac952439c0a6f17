"""The answer does not depend on luck (docs/architecture.md, "The same answer").

The reference is each request alone, on an engine that shares nothing. The others run random traffic on a pool so small
that they evict and retract all the time, with aborts in every phase.
"""

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.engine.core import EngineCore
from jsg.types import FinishType, Request
from tests.engine import small
from tests.engine.small import DETERMINISTIC, SMALL_POOL
from tests.engine.ties import differs_at_a_tie

Alone = Callable[[Request], small.Outcome]


def check_bitwise(busy: EngineCore, alone: Alone, seed: int) -> None:
    """Runs one random traffic and compares every answer with the same request alone."""
    arrivals = small.traffic(seed)
    aborts = small.random_aborts(seed, arrivals)
    outcomes = small.run(busy, arrivals, aborts)
    for _, request in arrivals:
        outcome, expected = outcomes[request.rid], alone(request)
        if outcome.finish is not None and outcome.finish.type is FinishType.ABORT:
            assert request.rid in aborts
            small.assert_is_prefix_of(outcome, expected)
        else:
            assert outcome.token_ids == expected.token_ids and outcome.logprobs == expected.logprobs
            assert outcome.prompt_logprobs == expected.prompt_logprobs and outcome.finish == expected.finish


BUSY = {**DETERMINISTIC, "speculative": "auto", **SMALL_POOL, "chunked_prefill_size": 23}


def test_deterministic_mode_is_bitwise_the_same_under_traffic_that_evicts_and_retracts(new_core_of, alone):
    """An engine of its own: how much is admitted depends on what it has seen before."""
    core = new_core_of(**BUSY)
    for seed in range(2):
        check_bitwise(core, alone, seed)
    stats = core.stats()
    for counter in ("num_retracts", "num_evicted_tokens", "cached_tokens", "num_aborted"):
        assert stats[counter] > 0, counter


@pytest.mark.parametrize(
    "knobs",
    [
        {"schedule_policy": "fcfs", "disable_overlap_schedule": True},
        {"page_size": small.PAGE_SIZE},
    ],
    ids=str,
)
def test_deterministic_mode_is_bitwise_the_same_in_other_orders_and_pages(core_of, alone, knobs: dict):
    check_bitwise(core_of(**BUSY, **knobs), alone, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "knobs",
    [
        {"schedule_policy": "lpm"},
        pytest.param({"schedule_policy": "fcfs"}, marks=pytest.mark.long),
        {"page_size": small.PAGE_SIZE},
        {"disable_overlap_schedule": True},
    ],
    ids=str,
)
@given(seed=st.integers(0, 2**20))
@settings(max_examples=6)
def test_deterministic_mode_is_bitwise_the_same_under_much_traffic(core_of, alone, seed: int, knobs: dict):
    """The other policy is long. It chooses the order only, which random traffic changes anyhow."""
    check_bitwise(core_of(**BUSY, **knobs), alone, seed)


def test_cold_and_warm_are_bitwise_the_same_in_deterministic_mode(core_of):
    core, num_cached = core_of(**DETERMINISTIC), 0
    for _, request in small.traffic(7, count=6):
        cold = small.alone(core, request)
        warm = small.run(core, [(0, request)])[request.rid]
        num_cached += warm.cached_tokens
        assert (cold.token_ids, cold.logprobs, cold.prompt_logprobs) == (
            warm.token_ids, warm.logprobs, warm.prompt_logprobs,
        )  # fmt: skip
    assert num_cached > 0


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        pytest.param({"disable_overlap_schedule": True}, marks=pytest.mark.slow),
        pytest.param({"page_size": small.PAGE_SIZE}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_default_mode_differs_in_the_last_bits_only(core_of, knobs: dict):
    """Prompts that come whole, where nothing is cached, are the reference of those that come in chunks."""
    reference = core_of(chunked_prefill_size=128, disable_radix_cache=True)
    busy = core_of(**SMALL_POOL, **knobs)
    num_tokens = num_ties = 0
    for seed in range(2):
        arrivals = small.traffic(seed, logprobs=small.VOCAB)
        outcomes = small.run(busy, arrivals)
        for _, request in arrivals:
            expected = small.alone(reference, request)
            num_tokens += len(expected.token_ids)
            num_ties += differs_at_a_tie(request, outcomes[request.rid], expected)
    assert num_tokens > 300
    assert num_ties <= 1 + num_tokens // 10_000


@pytest.mark.parametrize("knobs", [DETERMINISTIC, pytest.param({}, marks=pytest.mark.slow)], ids=str)
def test_no_trace_and_no_compile_after_warm_up(new_core_of, knobs: dict):
    with small.few_variants() if knobs else contextlib.nullcontext():
        core = new_core_of(**SMALL_POOL, **knobs, is_warm=True)
    with small.nothing_compiled(core):
        small.run(core, small.traffic(11))
