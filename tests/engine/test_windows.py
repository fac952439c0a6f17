"""Layers with a window free the pages behind it: answers are bit by bit those of an engine that keeps all pages."""

import contextlib
import pathlib
from collections.abc import Iterator
from unittest import mock

import pytest

from jsg.engine.core import EngineCore
from jsg.engine.device.pool_sizes import PoolSizes
from jsg.sched.row_states import WindowRows
from jsg.types import FinishType, Request, SamplingParams
from tests.engine import small
from tests.engine.small import DETERMINISTIC, SMALL_POOL

WINDOW = 8
MODELS = {
    "some layers": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 1,
        "num_hidden_layers": 3,
    },
    "aligned": {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "attention_chunk_size": WINDOW,
        "no_rope_layer_interval": 3,
        "num_hidden_layers": 3,
    },
    "all layers": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": WINDOW},
}


@contextlib.contextmanager
def all_pages_kept() -> Iterator[None]:
    """Engines that are used inside free no page that a request has."""
    with (
        mock.patch.object(WindowRows, "move"),
        mock.patch.object(PoolSizes, "window_tokens", lambda self, window, pool_tokens: pool_tokens),
    ):
        yield


def make_core(directory: pathlib.Path, cache_dir: str, name: str, **knobs: object) -> EngineCore:
    return small.make_core(small.write_model(directory / name, **MODELS[name]), cache_dir, **knobs)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        ("some layers", small.PAGE_SIZE),
        *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("some layers", "aligned")),
        pytest.param("all layers", small.PAGE_SIZE, marks=pytest.mark.slow),
    ],
)
def test_answers_are_bitwise_those_of_an_engine_that_keeps_all_pages(
    tmp_path: pathlib.Path, compile_cache_dir: str, name: str, page_size: int
):
    knobs = {**DETERMINISTIC, "chunked_prefill_size": 23, "page_size": page_size}
    with mock.patch.object(PoolSizes, "window_tokens", lambda self, window, pool_tokens: 4 * pool_tokens // 5):
        busy = make_core(tmp_path, compile_cache_dir, name, **knobs, **SMALL_POOL)
    (group,) = busy.scheduler.table.windows
    assert (group.num_total * page_size, busy.scheduler.table.num_pages * page_size) == (160, 200)
    with all_pages_kept():
        keeping = make_core(tmp_path, compile_cache_dir, name, **knobs, disable_radix_cache=True)
    with contextlib.closing(busy), contextlib.closing(keeping):
        for seed in range(2):
            arrivals = small.traffic(seed)
            aborts = small.random_aborts(seed, arrivals)
            outcomes = small.run(busy, arrivals, aborts)
            for _, request in arrivals:
                with all_pages_kept():
                    expected = small.alone(keeping, request)
                outcome = outcomes[request.rid]
                if outcome.finish is not None and outcome.finish.type is FinishType.ABORT:
                    small.assert_is_prefix_of(outcome, expected)
                else:
                    assert outcome.token_ids == expected.token_ids and outcome.logprobs == expected.logprobs
        stats = busy.stats()
    for counter in ("num_evicted_tokens", "cached_tokens", "num_aborted"):
        assert stats[counter] > 0, counter
    assert stats["num_retracts"] > 0 or name == "all layers"


def test_a_long_request_runs_in_a_pool_that_has_its_window_only(tmp_path: pathlib.Path, compile_cache_dir: str):
    """The plan's bytes are those of the arrays, and a prompt of many windows is found again at its end."""
    with mock.patch("tests.engine.late.POOL_TOKENS", 1):
        core = make_core(
            tmp_path, compile_cache_dir, "some layers", **DETERMINISTIC, max_running_requests=1, max_total_tokens=256
        )
    with contextlib.closing(core):
        (group,) = core.scheduler.table.windows
        assert group.num_total == WINDOW + 64 < core.scheduler.table.num_pages == 256
        pool = core._runner.replica.state.pool
        assert [keys.shape[0] for keys, _ in pool.layers] == [257, WINDOW + 65, WINDOW + 65]
        dump = sum(array.nbytes // array.shape[0] for layer in pool.layers for array in layer)
        assert core.info.memory_plan["KV pool"] == sum(a.nbytes for layer in pool.layers for a in layer) - dump
        prompt = tuple(2 + i % 90 for i in range(200))
        sampling = SamplingParams(max_new_tokens=50, temperature=0.0, ignore_eos=True)
        first = small.run(core, [(0, Request(rid="a", input_ids=prompt, sampling=sampling))])["a"]
        again = small.run(core, [(0, Request(rid="b", input_ids=prompt, sampling=sampling))])["b"]
        longer = (*prompt, *first.token_ids[:40])
        third = small.run(core, [(0, Request(rid="c", input_ids=longer, sampling=SamplingParams(max_new_tokens=1)))])
    assert len(first.token_ids) == 50 and again.token_ids == first.token_ids
    assert third["c"].cached_tokens == len(longer) - 1 and again.cached_tokens == 199
