"""Mixtral through the engine: its answers are those of Hugging Face, whatever runs beside it.

The result of a token's experts must not depend on the other tokens of the step, although all tokens of a step are
sorted by expert and every step has other groups.
"""

import dataclasses
import pathlib
from collections.abc import Iterator

import pytest

from jsg.types import Request, SamplingParams
from tests.engine import small
from tests.golden.compare import Recorded
from tests.golden.variants import random_tensors, write_checkpoint

CHUNK = 23  # the recorded prompt of 40 tokens takes two
POOL = {"max_total_tokens": 200, "schedule_conservativeness": 0.01}
"""Two of the recorded requests fill it, so that others are retracted."""


class Golden(Recorded):
    """A recorded variant, and an engine of its checkpoint.

    Each test has an engine of its own: how much it admits, and so whom it retracts, depends on what it has seen before.
    """

    def __init__(self, variant: str, directory: pathlib.Path, cache_dir: str, **knobs: object):
        super().__init__(variant)
        if not any(directory.iterdir()):
            write_checkpoint(directory, variant, random_tensors(variant, self.note["seed"]))
        fixed = {"load_format": "auto", "chunked_prefill_size": CHUNK}
        self.core = small.make_core(directory, cache_dir, **fixed, **POOL, **knobs)

    def question(self, rid: str, **fields: object) -> Request:
        """The recorded prompt, to be answered as it was; nobody shares it."""
        prompt = tuple(self.tokens[: int(self.arrays["prompt_len"])])
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=len(self.greedy))
        return dataclasses.replace(Request(rid=rid, input_ids=prompt, sampling=sampling, namespace=rid), **fields)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    return {variant: tmp_path_factory.mktemp(variant) for variant in ("mixtral", "mixtral_three_of_five", "gpt_oss")}


@pytest.fixture(
    params=[
        ("mixtral", small.DETERMINISTIC),  # two of four experts
        pytest.param(("mixtral", {}), marks=pytest.mark.slow),
        pytest.param(("mixtral_three_of_five", small.DETERMINISTIC), marks=pytest.mark.slow),
        pytest.param(("gpt_oss", small.DETERMINISTIC), marks=pytest.mark.slow),
    ],
    ids=str,
)
def golden(
    request: pytest.FixtureRequest, directories: dict[str, pathlib.Path], compile_cache_dir: str
) -> Iterator[Golden]:
    variant, knobs = request.param
    made = Golden(variant, directories[variant], compile_cache_dir, **knobs)
    yield made
    made.core.close()


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_answer_is_that_of_hugging_face_although_the_prompt_comes_in_chunks(golden: Golden, overlaps: bool):
    golden.core._overlaps = overlaps
    assert small.alone(golden.core, golden.question("r")).token_ids == golden.greedy


def test_from_the_cache_the_answer_is_the_same(golden: Golden):
    first, second = golden.question("a", namespace="x"), golden.question("b", namespace="x")
    assert small.alone(golden.core, first).cached_tokens == 0
    again = small.run(golden.core, [(0, second)])["b"]
    assert again.cached_tokens == len(second.input_ids) - 1
    assert again.token_ids == golden.greedy


def test_answers_are_the_same_in_traffic_and_bit_for_bit_in_deterministic_mode(golden: Golden):
    core = golden.core
    is_deterministic = not core._runner._buckets.decode
    asked = golden.question("asked", return_logprob=True, logprob_start_len=0, top_logprobs_num=3)
    arrivals = [(4, asked), *small.traffic(0)]
    outcomes = small.run(core, arrivals)
    assert core.scheduler.totals.num_retracts > 0
    assert outcomes["asked"].token_ids == golden.greedy
    for _, request in arrivals[::3] if is_deterministic else ():
        found, expected = outcomes[request.rid], small.alone(core, request)
        assert dataclasses.replace(found, cached_tokens=0) == dataclasses.replace(expected, cached_tokens=0)
