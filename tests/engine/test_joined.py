"""Joined prompts and position jumps in a real engine, beside a dense model with a mask."""

import asyncio
import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.engine.child.protocol import ToEngine
from jsg.engine.child.wire import MessageDecoder, MessageEncoder
from jsg.engine.core import EngineCore
from jsg.engine.front.client import EngineClient
from jsg.errors import RequestError
from jsg.types import Request, SamplingParams
from tests.engine import dense, small
from tests.engine.front.background import outputs_of, start_client
from tests.sched.token_model import positions

MAX_ERROR = 1e-4
MARGIN = 2e-4
MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None}
FAMILIES = {"llama": {}, "mistral": MISTRAL}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    directories = {}
    for name, changes in FAMILIES.items():
        directories[name] = small.write_model(tmp_path_factory.mktemp("dense") / name, **changes)
        dense.write_weights(directories[name])
    return directories


@pytest.fixture(scope="module")
def core_for(models: dict[str, pathlib.Path], compile_cache_dir: str) -> Iterator[Callable[..., EngineCore]]:
    """Makes an engine of a family with the given knobs, or returns the one made before, its cache emptied."""

    def make(family: str = "llama", **knobs: object) -> EngineCore:
        return small.make_core(models[family], compile_cache_dir, load_format="safetensors", **knobs)

    with small.shared_cores(make) as get:
        yield get


def random_tokens(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(rng.integers(2, small.VOCAB, size=count).tolist())


def joined(
    rid: str,
    prefix: tuple[int, ...],
    branches: list[tuple[int, ...]],
    suffix: tuple[int, ...],
    max_new: int = 10,
    jumps: tuple[tuple[int, int], ...] = (),
    **fields: Any,
) -> Request:
    ids, starts = prefix, [len(prefix)]
    for branch in branches:
        ids += branch
        starts.append(len(ids))
    fields = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": max_new} | fields
    return Request(
        rid=rid,
        input_ids=ids + suffix,
        sampling=SamplingParams(**fields),
        return_logprob=True,
        top_logprobs_num=2,
        joined=tuple(starts),
        position_jumps=jumps,
    )


def plain(rid: str, tokens: tuple[int, ...], max_new: int, **fields: Any) -> Request:
    sampling = SamplingParams(max_new_tokens=max_new, temperature=0.0, ignore_eos=True)
    return Request(rid=rid, input_ids=tokens, sampling=sampling, **fields)


def check(outcome: small.Outcome, request: Request, model: dense.DenseModel) -> None:
    """The engine's tokens and their log-probabilities are what the dense model says, given these tokens."""
    tokens = [*request.input_ids, *outcome.token_ids]
    sees = dense.mask(request, len(tokens))
    expected = model.logprobs(tokens, positions(request, len(tokens)), sees)[len(request.input_ids) - 1 : -1]
    found = np.array([logprob.logprob for logprob in outcome.logprobs])
    assert len(found) == request.sampling.max_new_tokens
    np.testing.assert_allclose(found, expected[np.arange(len(found)), outcome.token_ids], rtol=0, atol=MAX_ERROR)
    for row, token in zip(expected, outcome.token_ids, strict=True):
        assert row.max() - row[token] < MARGIN, "not the likeliest token"


@pytest.mark.parametrize("num_examples", [5, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"page_size": small.PAGE_SIZE, "speculative": "auto", **small.DETERMINISTIC},
        {"family": "mistral", **small.DETERMINISTIC},
    ],
    ids=str,
)
def test_a_joined_prompt_gives_what_a_dense_mask_gives(
    core_for: Callable[..., EngineCore], models: dict[str, pathlib.Path], knobs: dict[str, Any], num_examples: int
):
    """Cold, and again with the branches in the cache; branches of any length, with positions that jump anywhere."""
    core, model = core_for(**knobs), dense.DenseModel(models[knobs.get("family", "llama")])

    @settings(max_examples=num_examples)
    @given(data=st.data())
    def play(data: st.DataObject) -> None:
        check_joined(core, model, data)

    play()


def check_joined(core: EngineCore, model: dense.DenseModel, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    prefix = random_tokens(rng, data.draw(st.integers(0, 30)))
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=5).filter(any))
    branches = [random_tokens(rng, size) for size in sizes]
    suffix = random_tokens(rng, data.draw(st.integers(1, 12)))
    total = len(prefix) + sum(sizes) + len(suffix)
    where = sorted(data.draw(st.sets(st.integers(0, total), max_size=4)))
    jumps = tuple((index, int(rng.integers(1, 15))) for index in where)
    request = joined("cold", prefix, branches, suffix, jumps=jumps)
    cold = small.run(core, [(0, request)])["cold"]
    check(cold, request, model)
    assert cold.prompt_tokens == total
    computed = core.stats()["branch_tokens_computed"]
    warm = small.run(core, [(0, dataclasses.replace(request, rid="warm"))])["warm"]
    check(warm, request, model)
    if core.info.page_size == 1:
        assert warm.cached_tokens == total - 1, "the last token always runs"
        assert core.stats()["branch_tokens_computed"] == computed, "0 branch tokens are computed again"


def fork_and_join(core: EngineCore) -> tuple[Request, small.Outcome, int]:
    """Three forks generate, and their join; the join's request, what it gave, and what was computed of branches."""
    rng = np.random.default_rng(5)
    prefix, suffix = random_tokens(rng, 25), random_tokens(rng, 6)
    starts = [random_tokens(rng, 3 + number) for number in range(3)]
    forks = [(0, plain(f"fork {number}", prefix + start, 12)) for number, start in enumerate(starts)]
    outcomes = small.run(core, forks)
    branches = [start + tuple(outcomes[f"fork {n}"].token_ids) for n, start in enumerate(starts)]
    before = core.stats()["branch_tokens_computed"]
    request = joined("join", prefix, branches, suffix)
    outcome = small.run(core, [(0, request)])["join"]
    return request, outcome, int(core.stats()["branch_tokens_computed"] - before)


def test_what_forks_have_generated_is_not_computed_again(core_for: Callable[..., EngineCore], models):
    core = core_for(**small.DETERMINISTIC)
    request, outcome, computed = fork_and_join(core)
    check(outcome, request, dense.DenseModel(models["llama"]))
    assert computed == 3, "the last token of each fork never ran; all others are there"
    assert outcome.cached_tokens == request.joined[-1] - 3


@pytest.mark.parametrize("page_size", [1, small.PAGE_SIZE])
def test_deterministic_answers_are_the_same_cold_and_warm(core_for: Callable[..., EngineCore], page_size: int):
    """Branches that were decoded, computed, or found, and without a cache: the same bits."""
    core = core_for(deterministic=True, page_size=page_size)
    request, outcome, _ = fork_and_join(core)
    for knobs in ({"page_size": page_size}, *([{"disable_radix_cache": True}] if page_size == 1 else [])):
        other = core_for(deterministic=True, **knobs)
        for _ in range(2):
            again = small.run(other, [(0, request)])["join"]
            assert (again.token_ids, again.logprobs) == (outcome.token_ids, outcome.logprobs)


@pytest.mark.parametrize("page_size", [1, small.PAGE_SIZE])
def test_a_retract_changes_nothing(core_for: Callable[..., EngineCore], page_size: int):
    """Several joined requests and plain ones on a pool too small for them, some aborted: each as if it were alone."""
    reference = core_for(deterministic=True)
    pool = 168 if page_size == 1 else 220
    busy = core_for(
        deterministic=True,
        max_total_tokens=pool,
        schedule_conservativeness=0.01,
        chunked_prefill_size=23,
        page_size=page_size,
    )
    rng = np.random.default_rng(page_size)
    prefix = random_tokens(rng, 20)
    arrivals = []
    for number in range(4):
        branches = [random_tokens(rng, int(rng.integers(1, 12))) for _ in range(3)]
        fields = {"temperature": 0.8, "sampling_seed": number} if number % 2 else {}
        arrivals.append((number, joined(f"join {number}", prefix, branches, random_tokens(rng, 4), 40, **fields)))
        arrivals.append((number, dataclasses.replace(plain(f"plain {number}", prefix, 30), return_logprob=True)))
    retracts = busy.stats()["num_retracts"]
    outcomes = small.run(busy, arrivals, {"join 2": 25, "plain 3": 15})
    assert busy.stats()["num_retracts"] > retracts, "the pool is not too small"
    for _, request in arrivals:
        outcome, expected = outcomes[request.rid], small.alone(reference, request)
        count = len(outcome.token_ids)
        assert outcome.token_ids == expected.token_ids[:count] and outcome.logprobs == expected.logprobs[:count]
        assert count == request.sampling.max_new_tokens or request.rid in ("join 2", "plain 3")


def test_stops_and_biases_work_behind_a_join(core_for: Callable[..., EngineCore]):
    core = core_for(**small.DETERMINISTIC)
    rng = np.random.default_rng(3)
    prefix, branches, suffix = random_tokens(rng, 9), [random_tokens(rng, 4), random_tokens(rng, 7)], (5, 6)
    free = small.run(core, [(0, joined("free", prefix, branches, suffix))])["free"]
    stop = free.token_ids[4]
    stopped = small.run(core, [(0, joined("stop", prefix, branches, suffix, stop_token_ids=(stop,)))])["stop"]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish is not None and stopped.finish.matched == stop
    biased = small.run(core, [(0, joined("bias", prefix, branches, suffix, logit_bias=((7, 100.0),)))])["bias"]
    assert biased.token_ids == [7] * 10


def test_what_fits_in_a_sliding_window_is_as_without_one(
    core_for: Callable[..., EngineCore], models: dict[str, pathlib.Path], tmp_path: pathlib.Path, compile_cache_dir: str
):
    """In a pool that has few tokens of layers with a window, and not for prompts that leave it."""
    directory = pathlib.Path(shutil.copytree(models["mistral"], tmp_path / "window"))
    small.write_model(directory, **(MISTRAL | {"sliding_window": 40}))
    rng, without = np.random.default_rng(5), core_for(family="mistral", **small.DETERMINISTIC)
    prefix, branches, suffix = random_tokens(rng, 9), [random_tokens(rng, 8), random_tokens(rng, 6)], (5, 6)
    request = joined("fits", prefix, branches, suffix)
    core = small.make_core(directory, compile_cache_dir, load_format="safetensors", **small.DETERMINISTIC)
    with contextlib.closing(core):
        for rid in ("cold", "warm"):
            outcome, expected = (
                small.run(each, [(0, dataclasses.replace(request, rid=rid))])[rid] for each in (core, without)
            )
            assert (outcome.token_ids, outcome.logprobs) == (expected.token_ids, expected.logprobs)
        assert outcome.cached_tokens == expected.cached_tokens == 24
        with pytest.raises(RequestError, match=r"sliding window of 40 tokens.* have 41 tokens"):
            core.add(joined("long", random_tokens(rng, 16), branches, suffix))


@pytest.mark.parametrize("page_size", [1, small.PAGE_SIZE])
def test_a_jump_gives_what_positions_give(core_for: Callable[..., EngineCore], models, page_size: int):
    core, model = core_for(page_size=page_size, **small.DETERMINISTIC), dense.DenseModel(models["llama"])
    tokens = random_tokens(np.random.default_rng(8), 30)
    for jumps in ((), ((10, 50),), ((10, 50), (20, 1)), ((0, 3),), ((30, 40),), ((10, 50), (30, 2)), ((10, 50),)):
        request = dataclasses.replace(plain(f"{jumps}", tokens, 10, position_jumps=jumps), return_logprob=True)
        outcome = small.run(core, [(0, request)])[request.rid]
        check(outcome, request, model)
    assert outcome.cached_tokens == 29 // page_size * page_size


def test_what_is_written_behind_a_jump_is_found_again(core_for: Callable[..., EngineCore]):
    """The prompt ends in a jump, with and without new tokens."""
    core, tokens, jumps = core_for(**small.DETERMINISTIC), random_tokens(np.random.default_rng(9), 12), ((12, 20),)
    for count in (0, 6):
        first = small.run(core, [(0, plain("first", tokens, count, position_jumps=jumps))])["first"]
    assert first.cached_tokens == 11
    longer = (*tokens, *first.token_ids, 5)
    again = small.run(core, [(0, plain("again", longer, 1, position_jumps=jumps))])["again"]
    assert again.cached_tokens == len(tokens) + len(first.token_ids) - 1
    elsewhere = small.run(core, [(0, plain("elsewhere", longer, 1))])["elsewhere"]
    assert elsewhere.cached_tokens == len(tokens)


# The process boundary.


def test_the_fields_survive_the_wire():
    request = joined("r", (2, 3), [(4,), (5, 6)], (7,), jumps=((1, 3), (4, 2)))
    hold = dataclasses.replace(plain("h", (1, 2), 0), hold=True)
    frames = MessageEncoder().encode(ToEngine(requests=(request, hold)))
    arrived = MessageDecoder().decode([memoryview(bytes(frame)) for frame in frames])
    assert [sent.make() for sent in arrived.requests] == [request, hold]


def test_forks_and_a_join_through_the_client(models: dict[str, pathlib.Path], compile_cache_dir: str):
    knobs = {**small.DETERMINISTIC, "load_format": "safetensors"}
    config = small.make_config(models["llama"], compile_cache_dir, **knobs)
    rng = np.random.default_rng(11)
    prefix, suffix = random_tokens(rng, 20), random_tokens(rng, 4)

    async def collect(client: EngineClient, request: Request) -> small.Outcome:
        outcome = small.Outcome()
        async for output in outputs_of(client, request):
            outcome.add(output)
        return outcome

    async def main() -> tuple[Request, small.Outcome, dict[str, Any]]:
        client = await start_client(config, core="tests.engine.late:LateCore")
        try:
            hold = outputs_of(client, dataclasses.replace(plain("hold", prefix, 0), hold=True))
            assert (await anext(hold)).finish is None
            forks = [plain(f"fork {number}", (*prefix, number + 2), 8) for number in range(3)]
            outcomes = await asyncio.gather(*(collect(client, fork) for fork in forks))
            assert {outcome.cached_tokens for outcome in outcomes} == {20}
            branches = [(number + 2, *outcome.token_ids) for number, outcome in enumerate(outcomes)]
            request = joined("join", prefix, branches, suffix)
            outcome = await collect(client, request)
            assert (await client.stats())["num_holds"] == 1
            await hold.aclose()
            return request, outcome, await client.stats()
        finally:
            await client.close()

    request, outcome, stats = asyncio.run(asyncio.wait_for(main(), 300))
    check(outcome, request, dense.DenseModel(models["llama"]))
    assert outcome.cached_tokens == 20 + 3 * 8 and stats["branch_tokens_computed"] == 3
    assert stats["num_holds"] == 0 == stats["num_protected_tokens"]
