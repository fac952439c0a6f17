"""Grammars in the engine: what comes out matches, jump-forward changes nothing but speed, failures stay alone."""

import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.constrained.compiler import compile_grammar, compile_tables
from jsg.constrained.grammar import CompiledGrammar, GrammarMasker
from jsg.constrained.limits import LIMITS
from jsg.engine.core import EngineCore
from jsg.engine.device.executables import Executables
from jsg.engine.device.mask_pool import MaskPool, num_words
from jsg.engine.device.programs import GREEDY
from jsg.engine.grammars.constraints import PATIENCE, Constraint
from jsg.errors import GrammarError, QueueFullError, RequestError
from jsg.processing.tokenizer import load_tokenizer
from jsg.types import FinishType, GrammarSpec, JumpForward
from tests.engine import lettered, small
from tests.engine.integrity import check_store
from tests.engine.lettered import Outcome, matches, traffic
from tests.engine.small import DETERMINISTIC, PAGE_SIZE, check_core
from tests.engine.taught import BUSY, check_bitwise, check_matches, outcome_of, request, run, text_of


@pytest.fixture
def core(taught_core_of: Callable[..., EngineCore]) -> EngineCore:
    return taught_core_of(**DETERMINISTIC)


# Jump-forward.


def test_drafts_change_nothing_in_traffic_that_retracts_and_takes_and_refuses_them(new_taught_core_of, taught_alone):
    """An engine of its own: how much is admitted, and what is proposed, depends on what it has seen before."""
    core = new_taught_core_of(**BUSY)
    for seed in range(2):
        check_bitwise(core, taught_alone, seed)
    assert core.stats()["num_retracts"] > 0
    stats = core.stats()
    for source in ("", "_forced", "_text"):
        assert stats[f"num_drafts{source}"] > stats[f"num_drafts_taken{source}"] > 0, source
    assert stats["num_grammar_failures"] == 0


def test_masks_of_steps_that_overlap_change_nothing(taught_core_of, taught_alone):
    check_bitwise(taught_core_of(**BUSY), taught_alone, 1, "off")


def test_drafts_change_nothing_with_larger_pages(taught_core_of, taught_alone):
    check_bitwise(taught_core_of(**BUSY, page_size=PAGE_SIZE), taught_alone, 0)


@pytest.mark.slow
@pytest.mark.parametrize("knobs", [{}, {"page_size": PAGE_SIZE}, {"disable_overlap_schedule": True}], ids=str)
@given(seed=st.integers(0, 2**20), jump=st.sampled_from(["off", "draft"]))
@settings(max_examples=10)
def test_drafts_change_nothing_in_much_traffic(taught_core_of, taught_alone, seed: int, jump: JumpForward, knobs: dict):
    check_bitwise(taught_core_of(**BUSY, **knobs), taught_alone, seed, jump)


@pytest.mark.parametrize(
    ("knobs", "jump"),
    [
        ({}, "draft"),
        ({"disable_overlap_schedule": True}, "off"),
        pytest.param({}, "retokenize", marks=pytest.mark.slow),
        pytest.param({"disable_overlap_schedule": True}, "draft", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_default_mode_matches_the_grammar(taught_core_of, knobs: dict, jump: JumpForward):
    core = taught_core_of(**knobs)
    arrivals = traffic(11, jump=jump)
    outcomes = run(core, arrivals)
    ends = [outcome.finish.type for outcome in outcomes.values() if outcome.finish]
    assert FinishType.STOP in ends and FinishType.ERROR not in ends
    for _, each in arrivals:
        check_matches(core, each, outcomes[each.rid])


def test_a_request_holds_only_the_place_where_its_text_is(core: EngineCore):
    core.add(request(pattern=3, jump_forward="draft"))
    num_held = list[int]()
    while core.has_work:
        core.step()
        maskers = [each.masker for each in core.grammars._live.values()]
        num_held += [len(masker._passed) for masker in maskers if masker.num_accepted]
    assert num_held and not any(num_held), "places that the text has passed cannot be forgotten"


def test_drafts_save_steps(core: EngineCore):
    steps = {}
    for jump in ("off", "draft", "retokenize"):
        before = core.stats()["num_steps"]
        outcome = outcome_of(core, request(pattern=3, jump_forward=jump, return_constraint=True))
        assert text_of(core, outcome)[:-1] == b"x" + b"name age " * 3
        steps[jump] = core.stats()["num_steps"] - before
        assert (outcome.num_forced > 0) == (jump != "off")
    assert steps["off"] > steps["draft"] and steps["off"] > steps["retokenize"]


def test_drafts_are_verified_before_the_shapes_for_drafts_are_compiled(new_taught_core_of):
    """A larger shape stands in, and drafts fill only the rows that it has."""
    core = new_taught_core_of()
    executables, buckets = core._executables, core._runner._buckets
    for key in buckets.drafts:
        del executables._declared["forward", key]
    assert not any(executables.is_ready(("forward", key)) for key in buckets.drafts)
    outcome = outcome_of(core, request(pattern=3, return_constraint=True))
    assert text_of(core, outcome)[:-1] == b"x" + b"name age " * 3
    assert outcome.num_forced > 0


def test_retokenize_appends_the_usual_tokens(core: EngineCore, lettered_model: pathlib.Path):
    each = request(pattern=3, jump_forward="retokenize", return_constraint=True, return_logprob=True)
    outcome, usual = outcome_of(core, each), load_tokenizer(lettered_model).encode("xname age name age name age ")
    assert outcome.token_ids[: len(usual)] == usual and outcome.num_forced == len(usual)
    assert [each.token_id for each in outcome.logprobs] == outcome.token_ids


def test_drafts_stop_at_the_most_tokens(core: EngineCore):
    expected = outcome_of(core, request(pattern=3, jump_forward="off")).token_ids
    for limit in range(1, 8):
        for jump in ("draft", "retokenize"):
            outcome = outcome_of(core, request(pattern=3, max_new_tokens=limit, jump_forward=jump))
            assert len(outcome.token_ids) == limit and outcome.finish and outcome.finish.type is FinishType.LENGTH
            assert jump == "retokenize" or outcome.token_ids == expected[:limit]


def test_a_stop_token_ends_inside_a_draft(core: EngineCore):
    every = outcome_of(core, request(pattern=3, jump_forward="off", return_constraint=True))
    stop = every.token_ids[-4]
    fields = {"pattern": 3, "stop_token_ids": [stop], "return_constraint": True, "return_logprob": True}
    expected = outcome_of(core, request(**fields, jump_forward="off"))
    outcome = outcome_of(core, request(**fields, jump_forward="draft"))
    assert expected.finish and expected.finish.matched == stop
    expected.num_forced, expected.is_complete = outcome.num_forced, outcome.is_complete
    assert outcome == expected


# Masks.


def test_a_batch_without_grammars_runs_nothing_for_them(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    names = []
    call = Executables.__call__

    def spy(self: Executables, name: tuple, *args: object) -> object:
        names.append(name)
        return call(self, name, *args)

    monkeypatch.setattr(Executables, "__call__", spy)
    run(core, [(0, request(grammar=None)), (1, request("b"))])
    alone = [name[2] for name in names if name[0] == "sample"][:1]
    assert alone == [GREEDY]
    assert any(name[0] == "sample" and name[2].has_masks for name in names)
    names.clear()
    run(core, [(0, request(grammar=None)), (0, request("b", grammar=None, temperature=1))])
    assert not any(name[0] == "write_masks" or (name[0] == "sample" and name[2].has_masks) for name in names)


def test_a_pool_that_is_too_small_for_a_grammar_changes_nothing(core: EngineCore, new_taught_core_of):
    arrivals = [(0, request(str(i), pattern=i % 3, prompt=4 + i)) for i in range(4)]
    expected = run(core, arrivals)
    other = new_taught_core_of(**DETERMINISTIC)
    pool = other._runner.masks = MaskPool(num_words(small.VOCAB), 70)
    for number in range(69):
        pool.put(number.to_bytes(4), np.zeros(num_words(small.VOCAB), np.uint32))
    outcomes = run(other, arrivals)
    assert {rid: each.token_ids for rid, each in outcomes.items()} == {
        rid: each.token_ids for rid, each in expected.items()
    }
    pool.check_integrity()
    assert pool.num_made > 69


@pytest.mark.parametrize("jump", ["off", "draft"])
def test_kept_mass_is_the_probability_of_what_was_allowed(core: EngineCore, jump: JumpForward):
    each = request(pattern=0, temperature=1.0, sampling_seed=3, jump_forward=jump, return_constraint=True)
    each = dataclasses.replace(each, return_logprob=True, top_logprobs_num=small.VOCAB)
    outcome = outcome_of(core, each)
    grammar = compile_grammar(lettered.GRAMMARS[0], core.grammars._grammars.lexicon.vocabulary)
    masker, words = grammar.new_masker(), np.zeros(num_words(small.VOCAB), np.uint32)
    for token, scores, mass in zip(outcome.token_ids, outcome.logprobs, outcome.kept_mass, strict=True):
        assert masker.fill_mask(words)
        allowed = [i for i in range(small.VOCAB) if words[i >> 5] >> (i & 31) & 1]
        assert mass == pytest.approx(sum(math.exp(dict(scores.top)[i]) for i in allowed), abs=1e-5)
        assert masker.accept(token)


def test_reports_nothing_that_was_not_asked_for(core: EngineCore):
    core.add(request(rid="a"))
    while core.has_work:
        assert all(output.constraint is None and not output.logprobs for output in core.step())


def test_what_forces_nothing_for_long_lets_steps_overlap(core: EngineCore):
    """And drafts come back as soon as a text is forced again."""
    core.add(request("free", pattern=2, max_new_tokens=60, ignore_eos=True))
    waits = []
    while core.has_work:
        waits.append(core.grammars.must_know_tokens(core.scheduler.running))
        core.step()
    assert all(waits[1:PATIENCE]) and not any(waits[PATIENCE + 3 :])
    for constraint_of in (2, 0):
        outcome = outcome_of(core, request("again", pattern=constraint_of, max_new_tokens=40, return_constraint=True))
        assert (outcome.num_forced > 0) == (constraint_of == 0)


def test_requests_that_wait_are_not_looked_at_in_each_step(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    looks: list[str] = []
    monkeypatch.setattr(Constraint, "must_know_tokens", property(lambda each: looks.append(str(each)) or False))
    for number in range(5):
        core.add(request(str(number), pattern=0))
    assert not core.grammars.must_know_tokens(core.scheduler.running)
    assert not looks and core.scheduler.num_waiting == 5
    for number in range(5):
        core.abort(str(number))
    core.step()


# Ends.


def test_eos_ends_where_the_text_is_complete(core: EngineCore):
    outcome = outcome_of(core, request(pattern=0))
    assert outcome.token_ids[-1] == small.EOS
    assert outcome.finish and (outcome.finish.type, outcome.finish.matched) == (FinishType.STOP, small.EOS)
    assert text_of(core, outcome).endswith((b"true}", b"false}"))


@pytest.mark.parametrize("jump", ["off", "draft"])
@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_new_tokens": 79}], ids=str)
def test_ends_where_nothing_may_follow_and_eos_may_not_end(core: EngineCore, fields: dict, jump: JumpForward):
    each = request(pattern=0, jump_forward=jump, **fields)
    outcome = outcome_of(core, each)
    assert outcome.finish and (outcome.finish.type, outcome.finish.matched) == (FinishType.STOP, None)
    assert small.EOS not in outcome.token_ids and matches(each, text_of(core, outcome))


def test_a_model_without_eos_ends_where_nothing_may_follow(tmp_path: pathlib.Path, compile_cache_dir: str):
    directory = lettered.write_model(tmp_path / "endless", eos_token_id=None)
    with contextlib.closing(lettered.make_core(directory, compile_cache_dir, **DETERMINISTIC)) as core:
        each = request(pattern=0)
        outcome = outcome_of(core, each)
        assert outcome.finish and outcome.finish.type is FinishType.STOP and matches(each, text_of(core, outcome))


def test_a_grammar_that_leaves_only_tokens_that_may_not_end_yet_says_so(core: EngineCore):
    """`min_new_tokens` keeps a stop token away that is the only one that the grammar allows."""
    first = outcome_of(core, request(pattern=3)).token_ids[0]  # an x, which is one token
    each = request("b", pattern=3, stop_token_ids=[first], min_new_tokens=4)
    outcome = outcome_of(core, each)
    assert outcome.finish and outcome.finish.type is FinishType.ERROR
    assert "min_new_tokens" in str(outcome.finish.message)


# Refusals and failures.


def test_a_grammar_that_was_not_sent_is_refused(core: EngineCore):
    with pytest.raises(RequestError, match="grammar that the engine does not have") as refusal:
        core.add(request(grammar=dataclasses.replace(lettered.GRAMMARS[0], text="unknown")))
    assert refusal.value.param == "grammar" and core.scheduler.is_idle


def test_a_model_without_a_tokenizer_refuses_grammars_and_runs(new_core_of):
    core = lettered.teach(new_core_of(**DETERMINISTIC))
    with pytest.raises(RequestError, match="needs the model's tokenizer, but a model directory must have"):
        core.add(request())
    assert len(outcome_of(core, request(grammar=None, ignore_eos=True, max_new_tokens=4)).token_ids) == 4


def test_a_rid_in_use_leaves_the_masker_of_its_owner_alone(core: EngineCore):
    core.add(request())
    masker = core.grammars._live["a"]
    with pytest.raises(RequestError, match="in use"):
        core.add(request(pattern=1))
    assert core.grammars._live["a"] is masker
    run_on = Outcome()
    while core.has_work:
        for output in core.step():
            run_on.add(output)
    assert run_on.finish and run_on.finish.type is FinishType.STOP


def test_a_forgotten_grammar_lives_as_long_as_its_requests(core: EngineCore):
    core.add(request())
    core.grammars.forget_grammars([each.key for each in lettered.GRAMMARS])
    with pytest.raises(RequestError, match="does not have"):
        core.add(request("b"))
    outcome = Outcome()
    while core.has_work:
        for output in core.step():
            outcome.add(output)
    assert outcome.finish and outcome.finish.type is FinishType.STOP
    lettered.teach(core)


def test_a_text_that_takes_too_much_work_ends_with_an_error_of_its_grammar_and_harms_no_other(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
):
    expected = run(core, [(0, request("b", pattern=1)), (0, request("c", grammar=None))])
    limits = dataclasses.replace(LIMITS, text_steps=3_000_000, token_steps=0)
    monkeypatch.setattr("jsg.engine.grammars.store.CompiledGrammar", functools.partial(CompiledGrammar, limits=limits))
    spec = GrammarSpec("regex", "((a|b|ab|ba|aba|bab)*c?)*(.{0,300}z)?")
    core.grammars.add_grammar(spec.key, compile_tables(spec).to_bytes())
    ambiguous = request(grammar=spec, max_new_tokens=40, min_new_tokens=39)
    outcomes = run(core, [(0, ambiguous), (0, request("b", pattern=1)), (0, request("c", grammar=None))])
    core.grammars.forget_grammars([spec.key])
    finish = outcomes["a"].finish
    assert finish and finish.type is FinishType.ERROR and finish.blames_grammar
    assert isinstance(error := finish.to_error(), GrammarError) and "ambiguous" in str(error), error
    for rid in ("b", "c"):
        assert outcomes[rid].token_ids == expected[rid].token_ids


@pytest.mark.parametrize("method", ["mask_key", "accept", "forced_bytes"])
def test_what_raises_in_a_grammar_fails_its_request_alone(
    core: EngineCore, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    expected = run(core, [(0, request("b", pattern=1)), (0, request("c", grammar=None))])
    real, calls = getattr(GrammarMasker, method), [0]

    def broken(self: GrammarMasker, *args: int) -> object:
        if "a" in core.grammars._live and self is core.grammars._live["a"].masker:
            calls[0] += 1
            if calls[0] > 4:
                raise RuntimeError("broken on purpose")
        return real(self, *args)

    monkeypatch.setattr(GrammarMasker, method, broken)
    assert core.flush_cache()
    with caplog.at_level(logging.ERROR):
        outcomes = run(core, [(0, request()), (0, request("b", pattern=1)), (0, request("c", grammar=None))])
    finish = outcomes["a"].finish
    assert finish and finish.type is FinishType.ERROR and "log has the cause" in (finish.message or "")
    assert not finish.blames_grammar
    assert "broken on purpose" in caplog.text
    for rid in ("b", "c"):
        assert outcomes[rid].token_ids == expected[rid].token_ids


def test_a_token_that_the_grammar_does_not_allow_fails_its_request(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GrammarMasker, "mask_key", lambda self: None)
    outcome = outcome_of(core, request(pattern=0, jump_forward="off"))
    assert outcome.finish and outcome.finish.type is FinishType.ERROR
    monkeypatch.undo()
    assert core.grammars.stats(core._runner.masks)["num_grammar_failures"] > 0


def test_what_grammars_have_worked_out_is_bounded(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jsg.engine.grammars.store.MACHINE_BYTES", 1)
    for pattern in range(len(lettered.PATTERNS)):
        outcome_of(core, request(str(pattern), pattern=pattern, max_new_tokens=6))
    store = core.grammars._grammars
    assert len(store) == len(lettered.PATTERNS) and len(store._machines) <= 1
    assert store.num_bytes == sum(len(each.tables) + each.num_bytes for each in store._grammars.values())


def test_memory_that_is_taken_away_all_the_time_changes_no_answer(
    taught_core_of, taught_alone, monkeypatch: pytest.MonkeyPatch
):
    for name in ("MACHINE_BYTES", "WORTH_BYTES", "WEIGHED_EVERY"):
        monkeypatch.setattr(f"jsg.engine.grammars.store.{name}", 1)
    check_bitwise(taught_core_of(**BUSY), taught_alone, 2)


def test_requests_that_wait_have_no_machine(core: EngineCore):
    store = core.grammars._grammars
    core.grammars.forget_grammars([each.key for each in lettered.GRAMMARS])
    lettered.teach(core)
    for number in range(20):
        core.add(request(str(number), pattern=number % 3))
    assert not store._machines and len(core.grammars._live) == 20
    core.step()
    assert 0 < len(store._machines) <= 3, "equal grammars are one"
    while core.has_work:
        core.step()
        check_core(core)
    check_store(store)


def test_a_request_whose_masker_is_lost_gets_no_answer(core: EngineCore, caplog: pytest.LogCaptureFixture):
    expected = outcome_of(core, request("b"))
    core.add(request("a", jump_forward="off"))
    core.add(request("b"))
    core.step()
    lost = core.grammars._live.pop("a")
    outcomes = {"a": Outcome(), "b": Outcome()}
    while core.has_work:
        for output in core.step():
            outcomes[output.rid].add(output)
    core.grammars._grammars.release(lost.grammar)
    finish = outcomes["a"].finish
    assert finish and finish.type is FinishType.ERROR and "no masker" in caplog.text
    assert len(outcomes["a"].token_ids) <= 1, "what was under way when it was lost"
    assert outcomes["b"].token_ids == expected.token_ids


def test_grammars_that_wait_are_bounded_by_their_tables(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    core.add(request("a"))
    monkeypatch.setattr("jsg.engine.grammars.store.TABLE_BYTES", 1)
    core.add(request("b"))  # it takes nothing more
    with pytest.raises(QueueFullError, match="grammars of all requests may take"):
        core.add(request("c", pattern=1))
    monkeypatch.undo()
    core.add(request("c", pattern=1))
    for rid in "abc":
        core.abort(rid)
    while core.has_work:
        core.step()
    store = core.grammars._grammars
    assert not any(each.num_users for each in store._grammars.values())
