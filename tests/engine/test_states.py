"""An engine of a hybrid model: no token is applied to a state twice, and no request sees the state of another."""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jsg.engine.core import EngineCore
from jsg.engine.grammars.constraints import MaskRows
from jsg.errors import RequestError
from jsg.sched.batch import Batch, Proposal
from jsg.types import Request, SamplingParams
from tests.engine import small

HYBRID = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 1e-2,
}
CONVOLUTIONS = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "num_hidden_layers": 2,
    "full_attn_idxs": [1],
    "block_auto_adjust_ff_dim": False,
    "conv_bias": True,
    "rms_norm_eps": None,
}
GRANITE = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 2,
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 0,
    "shared_intermediate_size": 64,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "rms_norm_eps": 1e-2,
}
BLOCKS = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "-M*E",
    "num_hidden_layers": 4,
    "hidden_act": None,
    "n_groups": 1,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "layer_norm_epsilon": 1e-2,
}
KINDS = [
    pytest.param(HYBRID, id="delta"),
    pytest.param(CONVOLUTIONS, id="convolution", marks=pytest.mark.slow),
    pytest.param(GRANITE, id="mamba", marks=pytest.mark.slow),
    pytest.param(BLOCKS, id="blocks", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=KINDS)
def core(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str
) -> Iterator[EngineCore]:
    """Deterministic, so that any difference is seen; two or three requests fill its pool of keys."""
    directory = small.write_model(tmp_path_factory.mktemp("hybrid"), **request.param)
    made = small.make_core(directory, compile_cache_dir, **small.DETERMINISTIC, **small.SMALL_POOL)
    yield made
    made.close()


def question(rid: str, length: int = 20, **fields: object) -> Request:
    prompt = tuple(np.random.default_rng(length).integers(2, small.VOCAB, length).tolist())
    sampling = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)
    scored = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    return dataclasses.replace(Request(rid=rid, input_ids=prompt, sampling=sampling, **scored), **fields)


def test_traffic_with_aborts_and_retracts_changes_no_bit(core: EngineCore):
    """The equation of slots is checked after every step."""
    arrivals = small.traffic(3)
    expected = {request.rid: small.alone(core, request) for _, request in arrivals}
    aborts = small.random_aborts(3, arrivals)
    outcomes = small.run(core, arrivals, aborts)
    assert core.scheduler.totals.num_retracts and core.scheduler.totals.cached_tokens == 0
    for rid, outcome in outcomes.items():
        if rid in aborts:
            small.assert_is_prefix_of(outcome, expected[rid])
        else:
            assert outcome == expected[rid]
    assert core.scheduler.table._states is not None and core.scheduler.table._states.num_free == 4


def test_a_request_that_is_put_off_runs_its_last_token_again_but_does_not_apply_it(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
):
    """At the end of its prompt and later, several times one after another, and beside others."""
    requests = [question("a"), question("b", 70), question("c", 1)]
    expected = {request.rid: small.alone(core, request) for request in requests}
    turns, real, num_put_off = itertools.count(), core.grammars.mask_rows, 0

    def mask_rows(batch: Batch, pool) -> MaskRows:
        nonlocal num_put_off
        masks = real(batch, pool)
        masks.put_off.extend(entry for entry in batch.entries if entry.samples and next(turns) % 5 < 3)
        num_put_off += len(masks.put_off)
        return masks

    monkeypatch.setattr(core.grammars, "concerns", lambda batch: True)
    monkeypatch.setattr(core.grammars, "must_know_tokens", lambda running: True)
    monkeypatch.setattr(core.grammars, "mask_rows", mask_rows)
    assert small.run(core, [(2 * i, request) for i, request in enumerate(requests)]) == expected
    assert num_put_off > 60


def test_drafts_are_not_taken(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    """Whatever is proposed, a state has the tokens of the answer."""
    asked = question("asked")
    expected = small.alone(core, asked)
    monkeypatch.setattr(
        core.grammars,
        "proposals",
        lambda running, rows: {r.request.rid: Proposal((5, 6, 7), is_forced=False) for r in running},
    )
    assert small.alone(core, asked) == expected


def test_joined_prompts_are_refused_by_name(core: EngineCore):
    with pytest.raises(RequestError, match="layers with a state of each request"):
        core.add(question("joined", 20, joined=(4, 8, 12), logprob_start_len=-1))
    assert not core.has_work


def test_the_plan_has_the_bytes_of_the_states(core: EngineCore):
    states = core._runner.replica.state.pool.states
    assert core.info.memory_plan["states"] == sum(array.nbytes for layer in states for array in layer)
    assert {array.shape[0] for layer in states for array in layer} == {5}, (
        "a slot for each request, and one for padding"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_default_mode_gives_the_same_tokens_alone_and_in_chunks_beside_others(
    tmp_path: pathlib.Path, compile_cache_dir: str, kind: dict[str, Any]
):
    directory = small.write_model(tmp_path / "hybrid", **kind)
    core = small.make_core(directory, compile_cache_dir, chunked_prefill_size=16)
    requests = [question(str(length), length) for length in (3, 40, 70)]
    together = small.run(core, [(i, request) for i, request in enumerate(requests)])
    for request in requests:
        assert together[request.rid].token_ids == small.alone(core, request).token_ids
    core.close()
