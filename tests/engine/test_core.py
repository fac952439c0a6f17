"""What one engine does for single requests: when they stop, what they report, what they refuse."""

import dataclasses
import gc
import json
import re

import jax
import numpy as np
import pytest

from jsg.config import EngineConfig
from jsg.engine import startup
from jsg.engine.child.protocol import Progress
from jsg.engine.core import EngineCore
from jsg.engine.device.devices import Device
from jsg.engine.progress import load_progress
from jsg.errors import ConfigError, ContextLengthError, QueueFullError, RequestError
from jsg.kernels_pallas import ops
from jsg.types import FinishReason, FinishType, Request, SamplingParams
from tests.engine import small
from tests.engine.small import check_core
from tests.golden.variants import VARIANTS

PROMPT = tuple(range(2, 40))


@pytest.fixture
def core(core_of) -> EngineCore:
    return core_of(**small.DETERMINISTIC)


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams.from_dict({"temperature": 0, "ignore_eos": True, "max_new_tokens": 12} | fields)


def outcome_of(core: EngineCore, sampling: SamplingParams, **fields: object) -> small.Outcome:
    return small.alone(core, Request(rid="r", input_ids=PROMPT, sampling=sampling, **fields))  # pyright: ignore[reportArgumentType]


def test_stops_at_its_length(core: EngineCore):
    outcome = outcome_of(core, greedy())
    assert len(outcome.token_ids) == 12 and outcome.finish == FinishReason(FinishType.LENGTH)


def test_stops_at_a_stop_token_and_says_which(core: EngineCore):
    tokens = outcome_of(core, greedy()).token_ids
    stop = next(token for token in tokens if tokens.index(token) >= 3)
    outcome = outcome_of(core, greedy(stop_token_ids=[stop]))
    assert outcome.token_ids == tokens[: tokens.index(stop) + 1]
    assert outcome.finish == FinishReason(FinishType.STOP, matched=stop)


def test_eos_stops_unless_it_is_ignored(core: EngineCore):
    force_eos = {"logit_bias": {small.EOS: 100}, "max_new_tokens": 4}
    assert outcome_of(core, greedy(**force_eos, ignore_eos=False)).token_ids == [small.EOS]
    assert outcome_of(core, greedy(**force_eos)).token_ids == [small.EOS] * 4
    assert outcome_of(core, greedy(**force_eos, min_new_tokens=2)).token_ids == [small.EOS] * 4


def test_min_new_tokens_puts_off_every_end(core: EngineCore):
    sampling = greedy(logit_bias={small.EOS: 100}, ignore_eos=False, min_new_tokens=5)
    outcome = outcome_of(core, sampling)
    assert small.EOS not in outcome.token_ids[:5]
    assert outcome.token_ids[5:] == [small.EOS]


def test_zero_new_tokens_only_fill_the_cache(core: EngineCore):
    outcome = outcome_of(core, greedy(max_new_tokens=0))
    assert outcome.token_ids == [] and outcome.finish == FinishReason(FinishType.LENGTH)
    again = small.run(core, [(0, Request(rid="again", input_ids=PROMPT, sampling=greedy(max_new_tokens=0)))])["again"]
    assert again.cached_tokens == len(PROMPT)
    follower = small.run(core, [(0, Request(rid="next", input_ids=PROMPT, sampling=greedy()))])["next"]
    assert follower.cached_tokens == len(PROMPT) - 1


def test_prompt_logprobs_equal_those_of_generating_the_same_tokens(core: EngineCore):
    generated = outcome_of(core, greedy(), return_logprob=True, top_logprobs_num=3)
    whole = PROMPT + tuple(generated.token_ids)
    request = Request(
        rid="s", input_ids=whole, sampling=greedy(max_new_tokens=0), return_logprob=True, top_logprobs_num=3,
        logprob_start_len=len(PROMPT),
    )  # fmt: skip
    scored = small.run(core, [(0, request)])["s"].prompt_logprobs
    assert scored is not None
    assert [s.token_id for s in scored] == generated.token_ids
    np.testing.assert_allclose([s.logprob for s in scored], [g.logprob for g in generated.logprobs], atol=1e-4)
    assert [s.top[0][0] for s in scored] == generated.token_ids


@pytest.mark.parametrize("start", [0, 1, 5, len(PROMPT) - 1, len(PROMPT)])
def test_prompt_logprobs_start_where_asked_even_when_the_prompt_is_cached(core: EngineCore, start: int):
    full = outcome_of(core, greedy(max_new_tokens=1), return_logprob=True, logprob_start_len=0)
    assert full.prompt_logprobs is not None and full.prompt_logprobs[0].logprob is None
    assert [s.token_id for s in full.prompt_logprobs] == list(PROMPT)
    request = Request(
        rid="s", input_ids=PROMPT, sampling=greedy(max_new_tokens=1), return_logprob=True, logprob_start_len=start
    )
    scored = small.run(core, [(0, request)])["s"].prompt_logprobs
    if start >= len(PROMPT):
        assert scored is None
    else:
        assert scored is not None
        expected = full.prompt_logprobs[start:]
        assert [s.token_id for s in scored] == [s.token_id for s in expected]
        for mine, theirs in zip(scored, expected, strict=True):
            assert (mine.logprob is None) == (theirs.logprob is None)
            assert mine.logprob is None or mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_chosen_and_top_logprobs_come_with_every_token(core: EngineCore):
    outcome = outcome_of(core, greedy(), return_logprob=True, top_logprobs_num=4, token_ids_logprob=(5, 9))
    for score in outcome.logprobs:
        assert score.top[0] == (score.token_id, score.logprob)
        assert [value for _, value in score.top] == sorted((v for _, v in score.top), reverse=True)
        assert [token for token, _ in score.chosen] == [5, 9]
        known = dict(score.top)
        assert all(value == known.get(token, value) for token, value in score.chosen)


def test_penalties_survive_a_new_row_and_a_mixed_batch(core: EngineCore):
    sampling = greedy(frequency_penalty=2.0, presence_penalty=2.0, max_new_tokens=20)
    expected = outcome_of(core, sampling).token_ids
    assert len(set(expected)) == 20, "the penalties are strong enough to forbid every repetition"
    mixed = [(0, Request(rid=f"m{i}", input_ids=PROMPT, sampling=sampling if i % 2 else greedy())) for i in range(4)]
    outcomes = small.run(core, mixed)
    assert outcomes["m1"].token_ids == outcomes["m3"].token_ids == expected


def test_same_seed_same_tokens_other_seed_other_tokens(core: EngineCore):
    def tokens(seed: int) -> list[int]:
        return outcome_of(core, greedy(temperature=1.0, sampling_seed=seed)).token_ids

    assert tokens(3) == tokens(3) and tokens(3) != tokens(4)


def test_namespaces_share_nothing(core: EngineCore):
    requests = [Request(rid=name, input_ids=PROMPT, sampling=greedy(), namespace=name) for name in ("a", "b", "a2")]
    requests[2] = dataclasses.replace(requests[2], namespace="a")
    for request, hit in zip(requests, (0, 0, len(PROMPT) - 1), strict=True):
        assert small.run(core, [(0, request)])[request.rid].cached_tokens == hit


def test_requests_with_one_prompt_share_one_prefill(core: EngineCore):
    requests = [(0, Request(rid=f"r{i}", input_ids=PROMPT, sampling=greedy())) for i in range(4)]
    outcomes = small.run(core, requests)
    assert sorted(o.cached_tokens for o in outcomes.values()) == [0] + [len(PROMPT) - 1] * 3
    assert len({tuple(o.token_ids) for o in outcomes.values()}) == 1


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"input_ids": (2,) * 250, "sampling": greedy(max_new_tokens=7)}, ContextLengthError),
        ({"input_ids": (small.VOCAB,)}, RequestError),
        ({"input_ids": (2, -1)}, RequestError),
        ({"token_ids_logprob": (small.VOCAB,)}, RequestError),
    ],
)
def test_refuses_what_can_never_run(core: EngineCore, fields: dict, error: type[Exception]):
    with pytest.raises(error):
        core.add(Request(**({"rid": "r", "input_ids": PROMPT} | fields)))
    assert not core.has_work


def test_refuses_a_second_request_of_the_same_name_and_a_full_queue(core_of):
    core = core_of(**small.DETERMINISTIC, max_queued_requests=2)
    core.add(Request(rid="a", input_ids=PROMPT))
    with pytest.raises(RequestError, match="'a'"):
        core.add(Request(rid="a", input_ids=PROMPT))
    core.add(Request(rid="b", input_ids=PROMPT))
    with pytest.raises(QueueFullError):
        core.add(Request(rid="c", input_ids=PROMPT))
    for rid in "ab":
        core.abort(rid)
    ends = {output.rid: output.finish for output in core.step()}
    assert {rid: finish.type for rid, finish in ends.items() if finish} == dict.fromkeys("ab", FinishType.ABORT)


def test_the_cache_is_not_flushed_under_running_requests(core: EngineCore):
    core.add(Request(rid="a", input_ids=PROMPT, sampling=greedy()))
    assert not core.flush_cache()
    core.step()
    assert not core.flush_cache()
    core.abort("a")
    while core.has_work:
        core.step()
    assert core.flush_cache() and core.stats()["num_cached_tokens"] == 0


@pytest.mark.parametrize("ends_by", ["abort", "stop token"])
def test_the_cache_can_be_flushed_as_soon_as_the_last_request_has_ended(core: EngineCore, ends_by: str):
    """Though a step with its next token may still be in flight."""
    stop = outcome_of(core, greedy()).token_ids[3]
    stops = {"stop_token_ids": [stop]} if ends_by == "stop token" else {}
    core.add(Request(rid="a", input_ids=PROMPT, sampling=greedy(**stops)))
    outputs = [output for _ in range(3) for output in core.step()]
    if ends_by == "abort":
        core.abort("a")
    while not core.scheduler.is_idle and ends_by != "abort":
        outputs += core.step()
    assert core._in_flight is not None and core.flush_cache()
    assert core.stats()["num_cached_tokens"] == 0
    while core.has_work:
        outputs += core.step()
    finish = outputs[-1].finish
    assert finish and finish.type is (FinishType.ABORT if ends_by == "abort" else FinishType.STOP)
    check_core(core)


def test_a_row_with_logits_that_are_not_finite_fails_alone(new_core_of):
    core = new_core_of(**small.DETERMINISTIC)
    leaves = list(core._runner.replica.leaves)
    broken = [i for i, leaf in enumerate(leaves) if leaf.shape == (small.VOCAB, 32)]
    leaves[broken[0]] = leaves[broken[0]].at[90].set(np.nan)
    core._runner.replica.leaves = tuple(leaves)
    good = Request(rid="good", input_ids=PROMPT, sampling=greedy())
    bad = Request(rid="bad", input_ids=(*PROMPT[:9], 90), sampling=greedy())
    outcomes = small.run(core, [(0, bad), (0, good)])
    assert outcomes["bad"].finish is not None and outcomes["bad"].finish.type is FinishType.ERROR
    assert len(outcomes["good"].token_ids) == 12


def test_a_closed_engine_leaves_nothing_behind(small_model, compile_cache_dir: str):
    """Not even until Python collects garbage: the next engine needs the device's memory, and programs have mappings."""

    def left() -> tuple[int, int]:
        return sum(array.nbytes for array in jax.live_arrays()), len(jax.devices()[0].client.live_executables())

    request = Request(rid="r", input_ids=PROMPT, sampling=greedy(), return_logprob=True)
    gc.collect()
    gc.disable()
    try:
        before = left()
        with small.few_variants():
            core = EngineCore(small.make_config(small_model, compile_cache_dir, **small.DETERMINISTIC))
            small.run(core, [(0, request)])
        with_programs = left()
        names = [name[0] for name in core._executables._compiled]  # pyright: ignore[reportIndexIssue]
        core.close()
        without = left()
    finally:
        gc.enable()
    assert without[0] == before[0] < with_programs[0]
    # Of functions that are no engine's own, such as `step.write_rows`, JAX keeps the programs.
    num_own = sum(name in ("forward", "sample", "prompt_logprobs") for name in names)
    assert 3 <= num_own <= with_programs[1] - without[1]


def test_deterministic_mode_has_two_gpus_at_most(small_model):
    """Three or more add up in an order that depends on where a number lies; a CPU's add up as one does."""
    config = EngineConfig(model_path=str(small_model), deterministic=True, tp_size=4)
    with pytest.raises(ConfigError, match="--deterministic needs --tp-size 1 or 2, but got 4"):
        startup.settle(config, small_model, Device(platform="gpu", kind="NVIDIA H200", gpu=None, why="", count=4), None)


def test_the_context_of_an_engine_decides_how_longrope_turns(tmp_path):
    """Texts within the original context of 32 tokens have positions of their own."""
    (tmp_path / "config.json").write_text(json.dumps(VARIANTS["phi3_longrope"]))
    device = Device(platform="cpu", kind="cpu", gpu=None, why="")
    factors = []
    for context_length in (None, 33, 32):
        config = EngineConfig(model_path=str(tmp_path), load_format="dummy", context_length=context_length)
        (rope,) = {layer.attention.rope for layer in startup.settle(config, tmp_path, device, None).model.layers}
        factors.append(rope.factors[-1])
    assert factors == [6.0, 6.0, 1.5]


@pytest.mark.parametrize(
    ("best", "refusals", "shown"),
    [
        ("native", {}, "attention by 'native', KV pool"),
        ("triton", {}, "attention by 'triton', block sizes of tuning/sm_86.json, KV pool"),
        (
            "triton",
            {"paged_attention": "a head_dim of 72", "grouped_matmul": "x"},
            "attention by 'reference', grouped_matmul by 'reference', block sizes of tuning/sm_86.json, KV pool",
        ),
    ],
)
def test_the_start_says_which_operation_runs_how(
    small_model, monkeypatch: pytest.MonkeyPatch, best: str, refusals: dict[str, str], shown: str
):
    monkeypatch.setattr(ops, "best_implementation", lambda: best)
    monkeypatch.setattr(ops, "refusals", refusals)
    card = Device(platform="gpu", kind="NVIDIA L4", gpu=None, why="", capability=(8, 9))
    assert shown in str(startup.settle(EngineConfig(model_path=str(small_model)), small_model, card, None))


def test_who_waits_for_a_model_is_told_how_fast_it_is_read():
    told: list[Progress] = []
    tell = load_progress(told.append)
    tell(1, 2, 3 * 2**20)
    tell(2, 2, 0)  # random weights
    read, drawn = told
    assert (read.stage, read.done, read.total) == ("load", 1, 2)
    assert re.fullmatch(r"3 MiB, \d+\.\d GB/s", read.text) and drawn.text == ""
