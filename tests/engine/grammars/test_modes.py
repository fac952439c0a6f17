"""What all modes of jump-forward share with `off`: the answer, its end, the outputs, and the order of a step."""

import dataclasses
import pathlib

import numpy as np
import pytest

import jsg
from jsg.constrained.compiler import compile_grammar
from jsg.engine.core import EngineCore
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model
from jsg.speech.answers.answer import Answer
from jsg.step_reports import ConstraintReport
from jsg.types import FinishType, GrammarSpec, JumpForward, Request, RequestOutput, SamplingParams
from tests.constrained.vocabularies import bits
from tests.engine import small
from tests.engine.lettered import Outcome, traffic, with_jump
from tests.engine.small import DETERMINISTIC, PAGE_SIZE, SMALL_POOL
from tests.engine.taught import check_matches, outcome_of, random_aborts, request, run
from tests.engine.ties import LOGPROB_ERROR, MARGIN, assert_close, margin

# The mode of an engine.


def num_drafts(core: EngineCore, each: Request) -> int:
    before = core.stats()["num_drafts"]
    outcome_of(core, each)
    return int(core.stats()["num_drafts"] - before)


def test_an_engine_jumps_as_it_was_told_and_a_request_as_it_asks(taught_core_of, lettered_model: pathlib.Path):
    asked: dict[JumpForward, Request] = {
        jump: request(pattern=3, jump_forward=jump) for jump in ("off", "draft", "retokenize")
    }
    unsaid = request(pattern=3)
    usual = load_tokenizer(lettered_model).encode("xname age name age name age ")
    engines = {jump: taught_core_of(**DETERMINISTIC, jump_forward=jump) for jump in asked}
    for jump, core in engines.items():
        assert (num_drafts(core, unsaid) > 0) == (jump != "off")
        assert outcome_of(core, unsaid) == outcome_of(core, asked[jump])
        for other, each in asked.items():
            assert (num_drafts(core, each) > 0) == (other != "off")
            assert outcome_of(core, each).token_ids == outcome_of(engines[other], unsaid).token_ids
    appended = outcome_of(engines["retokenize"], unsaid).token_ids
    assert appended[: len(usual)] == usual
    assert taught_core_of(**DETERMINISTIC).grammars._jump == "draft", "the default"


# The same answer in default mode.


def allowed_tokens(core: EngineCore, each: Request, tokens: list[int]) -> set[int]:
    """The tokens that the grammar allows after some tokens; all tokens without a grammar."""
    if each.sampling.grammar is None:
        return set(range(small.VOCAB))
    assert isinstance(each.sampling.grammar, GrammarSpec)
    vocabulary = core.grammars._grammars.lexicon.vocabulary
    masker = compile_grammar(each.sampling.grammar, vocabulary).new_masker()
    assert all(masker.accept(token) for token in tokens)
    mask = np.full(vocabulary.num_words, 0xFFFFFFFF, np.uint32)
    masker.fill_mask(mask)
    return bits(mask)


def differs_at_a_tie(core: EngineCore, each: Request, got: Outcome, expected: Outcome) -> bool:
    """As in `ties.py`, where only what the grammar allows counts for a tie."""
    for i, (mine, theirs) in enumerate(zip(got.token_ids, expected.token_ids, strict=False)):
        if mine != theirs:
            allowed = allowed_tokens(core, each, expected.token_ids[:i])
            top = tuple(pair for pair in expected.logprobs[i].top if pair[0] in allowed)
            scores = [*expected.logprobs[:i], dataclasses.replace(expected.logprobs[i], top=top)]
            masked = dataclasses.replace(expected, logprobs=scores)
            assert margin(each, masked, i) < MARGIN, f"token {i} of {each.rid} differs without a tie"
            return True
        assert_close(got.logprobs[i : i + 1], expected.logprobs[i : i + 1])
    assert len(got.token_ids) == len(expected.token_ids)
    assert (got.finish, got.is_complete) == (expected.finish, expected.is_complete)
    assert np.abs(np.subtract(got.kept_mass, expected.kept_mass)).max(initial=0) <= LOGPROB_ERROR
    return False


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        pytest.param({"disable_overlap_schedule": True}, marks=pytest.mark.slow),
        pytest.param({"page_size": PAGE_SIZE}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_drafts_in_default_mode_differ_from_none_in_the_last_bits_only(taught_core_of, knobs: dict):
    reference = taught_core_of(disable_radix_cache=True)
    busy = taught_core_of(**SMALL_POOL, **knobs)
    before, num_tokens, num_ties = busy.stats()["num_drafts_taken"], 0, 0
    for seed in range(2):
        arrivals = [
            (when, dataclasses.replace(each, top_logprobs_num=small.VOCAB)) for when, each in traffic(seed, count=12)
        ]
        outcomes = run(busy, arrivals)
        for _, each in arrivals:
            expected = outcome_of(reference, with_jump(each, "off"))
            assert expected.num_forced == 0
            num_tokens += len(expected.token_ids)
            num_ties += differs_at_a_tie(reference, each, outcomes[each.rid], expected)
    assert num_tokens > 300 and num_ties <= 1 + num_tokens // 10_000
    assert busy.stats()["num_drafts_taken"] > before + 20


# Text that is appended.


@pytest.mark.parametrize(
    "knobs",
    [
        DETERMINISTIC,
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"page_size": PAGE_SIZE}, marks=pytest.mark.slow),
        pytest.param({"disable_overlap_schedule": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_what_is_appended_survives_retracts_chunks_and_aborts(new_taught_core_of, knobs: dict):
    """`run` asserts after each step that no token that was given out has changed."""
    core = new_taught_core_of(**SMALL_POOL, chunked_prefill_size=23, **knobs)
    ends, num_forced = set(), 0
    for seed in range(4):
        arrivals = traffic(seed, count=14, jump="retokenize")
        aborts = random_aborts(seed, arrivals)
        outcomes = run(core, arrivals, aborts)
        for _, each in arrivals:
            outcome = outcomes[each.rid]
            check_matches(core, each, outcome)
            assert len(outcome.logprobs) == len(outcome.token_ids)
            assert [score.token_id for score in outcome.logprobs] == outcome.token_ids
            assert outcome.finish is not None and outcome.finish.type is not FinishType.ERROR
            assert (outcome.finish.type is FinishType.ABORT) <= (each.rid in aborts)
            ends.add(outcome.finish.type)
            num_forced += outcome.num_forced
    assert core.stats()["num_retracts"] > 0 and num_forced > 20
    assert ends == {FinishType.STOP, FinishType.LENGTH, FinishType.ABORT}


# Stop strings.


FORCED = "one; two; three; four"
STOPPED = {"regex": f"[a-z]{{4}}: {FORCED}, [0-9]{{3}}", "temperature": 0, "max_new_tokens": 80}


@pytest.mark.parametrize(
    ("ends", "jump"),
    [
        ({"stop": ["o; th"]}, "draft"),
        ({"stop": ["ee", "; four"]}, "retokenize"),
        ({"stop_regex": ["t[a-z]o;"]}, "draft"),
        ({"stop_regex": ["t[a-z]o;"]}, "retokenize"),
    ],
    ids=str,
)
def test_a_stop_string_inside_of_a_forced_text_ends_it(tiny_engine: jsg.Engine, jump: JumpForward, ends: dict):
    fields = STOPPED | ends | {"return_constraint": True}
    expected = tiny_engine.generate("Say it: ", fields | {"jump_forward": "off"})
    found = tiny_engine.generate("Say it: ", fields | {"jump_forward": jump})
    whole = tiny_engine.generate("Say it: ", STOPPED | {"jump_forward": "off"})["text"]
    assert found["text"] == expected["text"] and found["text"] != whole
    assert whole.startswith(found["text"])
    assert found["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    report = found["meta_info"]["constraint"]
    assert len(report["kept_mass"]) == len(found["output_ids"]) == found["meta_info"]["completion_tokens"]
    assert not report["is_complete"] and 0 < report["forced_share"] <= 1
    if jump == "draft":
        assert found["output_ids"] == expected["output_ids"]
        assert report["kept_mass"] == expected["meta_info"]["constraint"]["kept_mass"]
    *_, last = tiny_engine.generate("Say it: ", fields | {"jump_forward": jump}, stream=True)
    assert last["text"] == found["text"] and last["output_ids"] == found["output_ids"]
    streamed = last["meta_info"]["constraint"]  # how much of it was forced may differ: what is proposed is learnt
    assert (streamed["kept_mass"], streamed["is_complete"]) == (report["kept_mass"], False)


def test_the_report_of_an_answer_ends_where_a_stop_string_cuts_it():
    tokenizer = load_tokenizer(resolve_model("tiny"))
    tokens = [tokenizer.encode(letter)[-1] for letter in "abcde"]

    def answer(stop: tuple[str, ...]) -> dict:
        sampling = SamplingParams(grammar=GrammarSpec("regex", "a.*"), stop=stop, return_constraint=True)
        made = Answer(Request(rid="a", input_ids=(2, 3), sampling=sampling), tokenizer)
        parts = [
            (tokens[:1], (False,), (0.5,), False),
            (tokens[1:], (True, True, True, False), (0.25, 1.0, 0.75, 0.125), True),
        ]
        for token_ids, is_forced, mass, is_complete in parts:
            report = ConstraintReport(is_forced=is_forced, kept_mass=mass, is_complete=is_complete)
            made.push(RequestOutput(rid="a", token_ids=tuple(token_ids), constraint=report))
        return made.constraint()

    forced, mass = [False, True, True, True, False], [0.5, 0.25, 1.0, 0.75, 0.125]
    shares = {(): 3 / 5, ("e",): 3 / 5, ("d",): 3 / 4, ("c",): 2 / 3, ("b",): 1 / 2, ("a",): 0.0}
    for stop, share in shares.items():
        count = 5 if not stop else tokens.index(tokenizer.encode(stop[0])[-1]) + 1
        assert answer(stop) == {
            "forced_share": share,
            "is_forced": forced[:count],
            "kept_mass": mass[:count],
            "is_complete": count == 5,
        }


# The order of a step.


@pytest.mark.parametrize("jump", ["off", "draft"])
def test_masks_are_found_while_the_forward_pass_runs(
    taught_core_of, jump: JumpForward, monkeypatch: pytest.MonkeyPatch
):
    """The step before is committed and masks are made between the dispatch of forward pass and sampling."""
    core, events = taught_core_of(**DETERMINISTIC), []

    def spy(owner: object, name: str) -> None:
        real = getattr(owner, name)

        def noted(*args: object) -> object:
            events.append(name if name != "_commit_in_flight" or core._in_flight is not None else "nothing to commit")
            return real(*args)

        monkeypatch.setattr(owner, name, noted)

    for owner, name in (
        (core._runner, "begin"), (core._runner, "_sample"), (core.grammars, "mask_rows"), (core, "_commit_in_flight")
    ):  # fmt: skip
        spy(owner, name)
    run(core, [(0, request(pattern=0, jump_forward=jump))])
    steps = ["begin", "_commit_in_flight", "mask_rows", "_sample"]
    first = ["begin", "nothing to commit", "mask_rows", "_sample"]
    num_steps = events.count("begin")
    assert num_steps > 5
    if jump == "off":
        assert events == first + steps * (num_steps - 1) + ["_commit_in_flight"]
    else:  # what is forced behind a token must be known before a step is planned
        assert events == [*first, "_commit_in_flight"] * num_steps + ["nothing to commit"]
