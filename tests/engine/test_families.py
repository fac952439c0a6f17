"""Each family through the engine: its answers are those of Hugging Face, whatever runs beside it, bit for bit.

The result of a token's experts must not depend on the other tokens of the step, although all tokens of a step are
sorted by expert and every step has other groups. Nor may what grows with the position, or has no position.
"""

import dataclasses
import pathlib
from typing import Any
from unittest import mock

import jax
import pytest

from jsg.engine.device.pool_sizes import PoolSizes
from jsg.types import Request, SamplingParams
from tests.engine import small
from tests.engine.late import POOL_TOKENS
from tests.golden.compare import Recorded
from tests.golden.families import covering, mark, one_of_each
from tests.golden.variants import random_tensors, write_checkpoint

CHUNK = 23  # the recorded prompt of 40 tokens takes two
POOL = {"max_total_tokens": 200, "schedule_conservativeness": 0.01}
"""Two of the recorded requests fill it, so that others are retracted."""
FAST = ("mixtral", "ministral3")
"""Experts, and queries that grow with the position."""


class Golden(Recorded):
    """A recorded variant, and an engine of its checkpoint."""

    def __init__(self, variant: str, directory: pathlib.Path, cache_dir: str, **knobs: object):
        super().__init__(variant)
        write_checkpoint(directory, variant, random_tensors(variant, self.note["seed"]))
        fixed = {"load_format": "auto", "chunked_prefill_size": CHUNK}
        # Layers with windows get as much room as the others, so that every family is retracted and finds its prompt.
        with mock.patch.object(PoolSizes, "window_tokens", lambda sizes, window, pool_tokens: pool_tokens):
            self.core = small.make_core(directory, cache_dir, **fixed, **POOL, **knobs)

    def question(self, rid: str, **fields: object) -> Request:
        """The recorded prompt, to be answered as it was; nobody shares it."""
        prompt = tuple(self.tokens[: int(self.arrays["prompt_len"])])
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=len(self.greedy))
        return dataclasses.replace(Request(rid=rid, input_ids=prompt, sampling=sampling, namespace=rid), **fields)


def cases() -> list[Any]:
    slow = covering(one_of_each())
    names = dict.fromkeys([*FAST, *one_of_each()])
    found = [pytest.param(name, small.DETERMINISTIC, marks=mark(name, FAST, slow)) for name in names]
    others = (("mixtral", {}), ("mixtral_three_of_five", small.DETERMINISTIC))
    return found + [pytest.param(*other, marks=pytest.mark.slow) for other in others]


@pytest.mark.parametrize(("variant", "knobs"), cases())
def test_cold_cached_and_batched_answers_are_the_recorded_one(
    tmp_path: pathlib.Path, compile_cache_dir: str, variant: str, knobs: dict[str, Any]
):
    """One engine for all. In deterministic mode scores are equal to the last bit, and those of the traffic too."""
    golden = Golden(variant, tmp_path, compile_cache_dir, **knobs)
    core, scored = golden.core, {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3}
    asked = golden.question("asked", **scored)
    cold = small.alone(core, asked)
    assert (cold.token_ids, cold.cached_tokens) == (golden.greedy, 0)
    core._overlaps = False
    assert small.alone(core, golden.question("again")).token_ids == golden.greedy
    core._overlaps = True

    first, second = (golden.question(rid, namespace="x") for rid in "ab")
    assert small.run(core, [(0, first)])["a"].token_ids == golden.greedy
    cached = small.run(core, [(0, dataclasses.replace(second, return_logprob=True, top_logprobs_num=3))])["b"]
    assert cached.cached_tokens == len(second.input_ids) - 1 and cached.token_ids == golden.greedy

    traffic = small.traffic(0)
    outcomes = small.run(core, [(4, asked), *traffic])
    assert core.scheduler.totals.num_retracts > 0
    assert outcomes["asked"].token_ids == golden.greedy
    if knobs == small.DETERMINISTIC:
        assert cached.logprobs == cold.logprobs
        assert dataclasses.replace(outcomes["asked"], cached_tokens=0) == cold
        for _, request in traffic[::6]:
            found, expected = outcomes[request.rid], small.alone(core, request)
            assert dataclasses.replace(found, cached_tokens=0) == dataclasses.replace(expected, cached_tokens=0)
    check_bytes(core)
    core.close()


def check_bytes(core: Any) -> None:
    """The plan has the bytes of the arrays that there are."""
    plan, state = core.info.memory_plan, core._runner.replica.state
    assert plan["weights"] == sum(leaf.nbytes for leaf in core._runner.programs.leaves)
    assert plan.get("states", 0) == sum(array.nbytes for array in jax.tree.leaves(state.pool.states))
    pool = sum(array.nbytes for array in jax.tree.leaves(state.pool.layers))
    num_slots = POOL_TOKENS + core.info.page_size  # the arrays of test engines are as large, whatever is planned
    assert plan["KV pool"] == pool // num_slots * POOL["max_total_tokens"] and pool % num_slots == 0
