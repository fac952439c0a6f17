"""An engine of a hybrid model: no token is applied to a state twice, and no request sees the state of another."""

import dataclasses
import itertools
import pathlib
import socket
from collections.abc import Iterator
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
import zmq

from jsg.cache.states import SLOT_TERMS
from jsg.engine.child.kv_events import END, KvEventPublisher
from jsg.engine.child.protocol import CORE_STATS, STATE_STATS, KvEvents
from jsg.engine.core import EngineCore
from jsg.engine.drafter import Drafter
from jsg.engine.grammars.constraints import MaskRows
from jsg.errors import RequestError
from jsg.sched.batch import Batch, Proposal
from jsg.sched.request import RunningRequest
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
KIMI = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1], "num_heads": 4, "head_dim": 16},
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "rms_norm_eps": 1e-2,
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
    pytest.param(KIMI, id="kimi_linear", marks=pytest.mark.slow),
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


def with_drafts(arrivals: list[tuple[int, Request]]) -> list[tuple[int, Request]]:
    """The same requests, of which those without penalties may have drafts."""

    def changed(request: Request) -> Request:
        return dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, speculative="auto"))

    return [(when, changed(request)) for when, request in arrivals]


def test_traffic_with_drafts_aborts_and_retracts_changes_no_bit(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    """The equation of slots is checked after every step."""
    arrivals = small.traffic(4, 14)
    expected = {request.rid: small.alone(core, request) for _, request in arrivals}
    aborts = small.random_aborts(4, arrivals)
    monkeypatch.setattr(Drafter, "_search", small.mixed_drafts(lambda request: expected[request.rid].token_ids))
    for played in (arrivals, with_drafts(arrivals)):
        outcomes = small.run(core, played, aborts)
        for rid, outcome in outcomes.items():
            if rid in aborts:
                small.assert_is_prefix_of(outcome, expected[rid])
            else:
                without = dataclasses.replace(expected[rid], cached_tokens=0)
                assert dataclasses.replace(outcome, cached_tokens=0) == without
    assert core.scheduler.totals.num_retracts and core.scheduler.totals.cached_tokens > 0
    assert 0 < core.stats()["num_drafts_taken"] < core.stats()["num_drafts"]


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


def forked(rid: str, stem: tuple[int, ...], *own: int, **fields: object) -> Request:
    """A prompt that goes on from a stem, which it announces."""
    return question(rid, input_ids=(*stem, *own), snapshot_at=(len(stem),), logprob_start_len=-1, **fields)


def test_prompts_go_on_from_states_of_others_to_the_last_bit(core: EngineCore):
    """Forks of one step and of a hold, the same prompt again, a longer one, and the next turns of a conversation."""
    stem = question("stem", 50).input_ids[:50]
    asked = {rid: forked(rid, stem, *own) for rid, own in (("a", (5,)), ("b", (7, 9)), ("c", (8, 6, 7)), ("d", (5,)))}
    expected = {rid: small.alone(core, request) for rid, request in asked.items()}
    assert core.flush_cache()
    found = small.run(core, [(0, request) for request in asked.values()])
    assert [found[rid].cached_tokens for rid in "abcd"] == [0, 50, 50, 50], "one of them computes the stem"
    again = small.run(core, [(0, dataclasses.replace(asked[rid], rid=f"{rid} again")) for rid in "abc"])
    assert [outcome.cached_tokens for outcome in again.values()] == [50, 51, 52], "but the last token, which runs again"
    for rid, outcome in [*found.items(), *again.items()]:
        assert dataclasses.replace(outcome, cached_tokens=0) == expected[rid[0]]

    turn, answer = asked["b"], found["b"].token_ids
    later = question("later", input_ids=(*turn.input_ids, *answer, 3, 4), logprob_start_len=-1)
    cached = small.run(core, [(0, later)])["later"]
    assert cached.cached_tokens == len(later.input_ids) - 3, "the last token of an answer is never run"
    assert dataclasses.replace(cached, cached_tokens=0) == small.alone(core, later)


def test_a_hold_keeps_its_state(core: EngineCore):
    stem = question("stem", 50).input_ids[:50]
    asked = forked("asked", stem, 5)
    expected = small.alone(core, asked)
    assert core.flush_cache()
    hold = Request(rid="hold", input_ids=stem, hold=True, sampling=SamplingParams(max_new_tokens=0))
    small.run(core, [(0, hold)], check=False)
    for index in range(30):
        small.run(core, [(0, question(f"other {index}", 30 + index))], check=False)
    found = small.run(core, [(0, asked)], check=False)["asked"]
    assert found.cached_tokens == 50 and dataclasses.replace(found, cached_tokens=0) == expected
    core.abort("hold")
    while core.has_work:
        core.step()


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_a_wrong_draft_leaves_no_trace_in_a_state(core: EngineCore, monkeypatch: pytest.MonkeyPatch, num_right: int):
    """Three drafts for each step, the first of which are right. The tokens after a wrong one are computed as ever."""
    requests = [question("asked"), question("other", 33)]
    expected = {request.rid: small.alone(core, request) for request in requests}
    num_rows = []

    def proposals(running: list[RunningRequest], most: int) -> dict[str, Proposal]:
        found = {}
        for r in running:
            right = expected[r.request.rid].token_ids[r.num_output : r.num_output + 3]
            tokens = [token if i < num_right else (token + 1) % 50 + 2 for i, token in enumerate(right)]
            if tokens and r.num_output:
                found[r.request.rid] = Proposal(tuple(tokens), False, len(tokens))
        num_rows.append(len(found))
        return found

    monkeypatch.setattr(core._drafter, "proposals", proposals)
    monkeypatch.setattr(core._drafter, "must_know_tokens", lambda running, most: True)
    assert core.flush_cache()
    assert small.run(core, [(0, request) for request in requests]) == expected
    assert sum(num_rows) > 10 and (len(num_rows) < 20) == (num_right > 0), "right drafts save steps"


def test_joined_prompts_are_refused_by_name(core: EngineCore):
    with pytest.raises(RequestError, match="layers with a state of each request"):
        core.add(question("joined", 20, joined=(4, 8, 12), logprob_start_len=-1))
    assert not core.has_work


@pytest.mark.parametrize(("point", "num_blocks"), [(20, 3), (63, 4)])
def test_routers_are_told_how_much_of_a_prompt_is_of_use(core: EngineCore, point: int, num_blocks: int):
    """More is cached, but a prompt can go on only where a state was kept: at the end of a chunk, or of the answer."""
    assert core.flush_cache()
    prompt = question("told", 63).input_ids
    sampling = SamplingParams(temperature=0, max_new_tokens=8)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        live, past = (f"tcp://127.0.0.1:{each.getsockname()[1]}" for each in (first, second))
    publisher = KvEventPublisher(KvEvents(address=live, replay_address=past, topic="kv", rank=0))
    publisher.observe(core.cache)
    try:
        asked = Request(rid="told", input_ids=prompt, sampling=sampling, turn_end=point)
        text = (*prompt, *small.run(core, [(0, asked)])["told"].token_ids)
        assert core.cache.matched_len(np.array(text, np.int32)) >= 64
        publisher.publish()
        events = replayed(past)
        assert {event["type"] for event in events} <= {"BlockStored"}
        tokens = [token for event in events for token in event["token_ids"]]
        assert tokens == list(text[: 16 * num_blocks])
    finally:
        core.cache.unobserve(publisher._recorder)
        publisher.close()


def replayed(address: str) -> list[dict[str, Any]]:
    """All events so far, of which the publisher has sent one batch at most."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as past:
        past.linger, past.rcvtimeo = 0, 20_000
        past.connect(address)
        past.send_multipart([b"", bytes(8)])
        events: list[dict[str, Any]] = []
        while (frames := past.recv_multipart())[2] != END:
            events += msgspec.msgpack.decode(frames[3])[1]
        return events


def test_the_gauges_tell_who_has_the_slots(core: EngineCore):
    assert core.flush_cache()
    before = core.stats()
    assert before.keys() - CORE_STATS.keys() == STATE_STATS.keys()
    prompt = question("hold", 30).input_ids
    core.add(Request(rid="hold", input_ids=prompt, hold=True, sampling=SamplingParams(max_new_tokens=0)))
    while core.stats()["num_running_states"] or not core.stats()["num_holds"]:
        core.step()
    core.add(question("one"))
    core.step()
    during = core.stats()
    assert (during["num_running_states"], during["num_evictable_states"]) == (1, 1), "that of the hold goes last"
    assert during["num_locked_states"] >= 1 and sum(during[f"num_{term}_states"] for term in SLOT_TERMS) == 12
    core.abort("one")
    core.abort("hold")
    while core.has_work:
        core.step()
    after = core.stats()
    assert sum(after[f"num_{term}_states"] for term in SLOT_TERMS) == 12 and not after["num_locked_states"]
    assert core.flush_cache()
    names = ("num_kept_states", "num_forgotten_states")
    kept, forgotten = (core.stats()[name] - before[name] for name in names)
    assert kept == forgotten == after["num_evictable_states"] > 0


def test_the_plan_has_the_bytes_of_the_states(core: EngineCore):
    states = core._runner.replica.state.pool.states
    assert core.info.memory_plan["states"] == sum(array.nbytes for layer in states for array in layer)
    assert {array.shape[0] for layer in states for array in layer} == {13}, (
        "a slot for each of 4 requests, two for prefixes for each, and one for padding"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_default_mode_changes_no_more_than_the_models_own_conditioning(
    tmp_path: pathlib.Path, compile_cache_dir: str, kind: dict[str, Any]
):
    """Cold in one chunk, which is the reference, beside cached, in chunks, and in chunks beside others."""
    directory = small.write_model(tmp_path / "hybrid", **kind)
    whole, core = (small.make_core(directory, compile_cache_dir, chunked_prefill_size=size) for size in (128, 16))
    requests = [question(str(length), length, turn_end=length) for length in (3, 40, 70)]
    reference = {request.rid: small.alone(whole, request) for request in requests}
    bound = FEW * change_after_one_ulp(whole, requests, reference)
    assert 0 < bound < 1e-3, "a mistake of one token is larger"
    later = [continued(request, reference[request.rid]) for request in requests]
    expected = reference | {request.rid: small.alone(whole, request) for request in later}
    chunked = {request.rid: small.alone(core, request) for request in (*requests, *later)}
    small.alone(core, requests[0])
    together = small.run(core, [(i, request) for i, request in enumerate(requests[1:])])
    cached = small.run(core, [(0, request) for request in later])
    assert [outcome.cached_tokens for outcome in cached.values()] == [3, 40, 70]
    for found in (chunked, together, cached):
        for rid, outcome in found.items():
            assert distance(outcome, expected[rid]) <= bound
    whole.close()
    core.close()


FEW = 4
"""How many times as much as one ulp of the embedding the other roundings of two layers may change."""


def change_after_one_ulp(core: EngineCore, requests: list[Request], reference: dict[str, small.Outcome]) -> float:
    """How far log-probabilities move if each number of the embedding is the next one up or down."""
    replica = core._runner.replica
    table, *others = leaves = replica.leaves
    assert table.shape == (small.VOCAB, small.MODEL["hidden_size"])
    way = np.random.default_rng(0).choice([-np.inf, np.inf], table.shape)
    moved = np.nextafter(np.asarray(table), way, dtype=np.float32)
    replica.leaves = (jax.device_put(moved, table.sharding), *others)
    changes = [distance(small.alone(core, request), reference[request.rid]) for request in requests]
    replica.leaves = leaves
    return max(changes)


def continued(request: Request, outcome: small.Outcome) -> Request:
    """A prompt that goes on from another one, and from its answer. What is new is scored."""
    prompt = (*request.input_ids, *outcome.token_ids[:5])
    fields = {"rid": f"{request.rid} on", "logprob_start_len": len(request.input_ids) + 1}
    return dataclasses.replace(request, input_ids=prompt, **fields)


def distance(left: small.Outcome, right: small.Outcome) -> float:
    """The largest difference of log-probabilities, of prompts too."""
    assert left.token_ids == right.token_ids
    values = [
        [token.logprob for token in (*(each.prompt_logprobs or ()), *each.logprobs) if token.logprob is not None]
        for each in (left, right)
    ]
    return float(np.abs(np.subtract(*values)).max())
