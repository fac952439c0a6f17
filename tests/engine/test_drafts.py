"""Drafts change how fast an answer comes, and never the answer, the tree or another namespace.

In deterministic mode drafts cost nothing, so that the gate lets all of them pass, and the number of steps says how good
they are.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from jsg.cache.following import following
from jsg.cache.node import Node
from jsg.engine import drafter
from jsg.engine.core import EngineCore
from jsg.engine.drafter import Drafter
from jsg.prompt_ids import PromptIds
from jsg.sched.drafts import sources
from jsg.sched.drafts.estimates import kind_of, kinds_from
from jsg.sched.drafts.sources import Guess
from jsg.step_reports import Source
from jsg.types import Request, SamplingParams
from tests.engine import small, taught
from tests.engine.small import DETERMINISTIC, SMALL_POOL, VOCAB
from tests.engine.test_same_answer import BUSY, check_bitwise

LONG = 40
"""Tokens of an answer."""


def asked(rid: str, *prompt: int, namespace: str = "", **sampling: object) -> Request:
    fields = {"max_new_tokens": LONG, "temperature": 1.3, "sampling_seed": 5, "ignore_eos": True} | sampling
    return Request(rid=rid, input_ids=prompt, namespace=namespace, sampling=SamplingParams(**fields))  # pyright: ignore[reportArgumentType]


def steps_of(core: EngineCore, request: Request) -> int:
    """The steps that a request takes, at the end of which nothing is in flight."""
    before = core.stats()["num_steps"]
    outcome = small.run(core, [(0, request)])[request.rid]
    assert len(outcome.token_ids) == LONG
    return int(core.stats()["num_steps"] - before)


@pytest.fixture
def core(core_of) -> EngineCore:
    core = core_of(**DETERMINISTIC, speculative="auto")
    assert core.flush_cache()
    return core


# What is proposed.


def test_a_prompt_that_is_asked_again_takes_a_seventh_of_the_steps(core: EngineCore):
    """The tree has its answer. Random answers repeat nothing else."""
    first = steps_of(core, asked("first", *range(3, 20)))
    assert first >= 0.9 * LONG and steps_of(core, asked("again", *range(3, 20))) <= 0.15 * LONG


def test_an_answer_is_copied_from_the_prompt_and_from_past_outputs(core: EngineCore):
    """A prompt that ends like the answer of another one: its answer is not in the tree behind it."""
    first = small.run(core, [(0, asked("first", *range(3, 20), temperature=0))])["first"].token_ids
    before = core.stats()
    steps_of(core, asked("other", 30, *range(3, 20), temperature=0))
    after = core.stats()
    assert len(first) == LONG
    assert sum(after[f"num_drafts_taken_{name}"] - before[f"num_drafts_taken_{name}"] for name in ("text", "past")) > 5


def test_a_predicted_answer_is_copied_from_its_beginning_and_behind_what_is_wrong_in_it(core: EngineCore):
    first = small.run(core, [(0, asked("first", *range(3, 20)))])["first"].token_ids
    assert core.flush_cache()
    wrong = [*first[:10], (first[10] + 1) % VOCAB, *first[11:]]
    request = replace(asked("predicted", *range(3, 20)), prediction=PromptIds.of(wrong))
    core.add(request)
    before, outputs = core.stats()["num_steps"], []
    while core.has_work:
        outputs += core.step()
    assert [token for output in outputs for token in output.token_ids] == list(first)
    assert core.stats()["num_steps"] - before < LONG / 2 and outputs[-1].drafts.taken["prediction"] > LONG / 2


def test_another_namespace_takes_as_many_steps_as_if_nothing_had_been_asked(core: EngineCore):
    """Nobody can find out by the time of an answer whether another one has got the same answer."""
    mine = steps_of(core, asked("first", *range(3, 20), namespace="a"))
    assert steps_of(core, asked("other", *range(3, 20), namespace="b")) == mine
    assert steps_of(core, asked("again", *range(3, 20), namespace="a")) < mine


def test_a_flush_forgets_past_outputs(core: EngineCore):
    first = steps_of(core, asked("first", *range(3, 20)))
    assert core.flush_cache() and steps_of(core, asked("again", *range(3, 20))) == first


@pytest.mark.parametrize(
    ("engine", "request_", "drafts"),
    [("auto", None, True), ("auto", "off", False), ("off", None, False), ("off", "auto", True)],
)
def test_a_request_has_drafts_as_it_asks_or_else_as_the_engine_was_told(core_of, engine, request_, drafts: bool):
    core = core_of(**DETERMINISTIC, speculative=engine)
    assert core.flush_cache()
    first = steps_of(core, asked("first", *range(3, 20)))
    assert (steps_of(core, asked("again", *range(3, 20), speculative=request_)) < first) == drafts


def test_a_joined_request_has_drafts_as_it_asks_although_its_branches_have_its_name(core: EngineCore):
    """Branches generate nothing and ask for nothing, and its answer is one of the past outputs."""
    prompt, drafts = np.random.default_rng(0).integers(2, VOCAB, size=60).tolist(), dict[str, int]()
    for rid, speculative in (("first", None), ("again", None), ("off", "off")):
        before = core.stats()["num_drafts_past"]
        steps_of(core, replace(asked(rid, *prompt, speculative=speculative), joined=(20, 35, 50)))
        drafts[rid] = core.stats()["num_drafts_past"] - before
    assert drafts["off"] == 0 < LONG / 2 < drafts["again"]


@pytest.mark.parametrize("settings", [{"frequency_penalty": 0.5}, {"logit_bias": {5: 1.0}}, {"min_new_tokens": 2}])
def test_penalties_have_no_drafts_since_the_device_counts_none_for_them(core: EngineCore, settings: dict):
    first = steps_of(core, asked("first", *range(3, 20), **settings))
    assert steps_of(core, asked("again", *range(3, 20), **settings)) == first


def test_a_step_searches_few_texts_and_each_request_has_its_turn(core: EngineCore, monkeypatch: pytest.MonkeyPatch):
    """Four prompts that are asked again, and one search in a step."""
    searches = list[int]()

    def counted(*arguments) -> list[int]:
        searches.append(core.stats()["num_steps"])
        return following(*arguments)

    monkeypatch.setattr(drafter, "SEARCH", drafter.MOST_SCANNED)
    monkeypatch.setattr(sources, "following", counted)
    for turn in ("first", "again"):
        searches.clear()
        before, taken = core.stats()["num_steps"], core.stats()["num_drafts_taken_tree"]
        small.run(core, [(0, asked(f"{turn} {number}", number, *range(3, 20))) for number in range(30, 34)])
    assert core.stats()["num_steps"] - before < LONG / 2 and core.stats()["num_drafts_taken_tree"] - taken > 3 * LONG
    assert len(searches) >= 4 and max(map(searches.count, searches)) <= 2  # before the commit, and behind it


def test_kinds_of_tokens_one_after_another():
    for source, start, count in [
        (Source.TEXT, 0, 40),
        (Source.PAST, 5, 3),
        (Source.TREE, 100, 2),
        (Source.TREE, 15, 2),
    ]:
        assert kinds_from(source, start, count) == [kind_of(source, start + index) for index in range(count)]


def test_nothing_is_proposed_that_is_no_token_or_ends_the_answer(core: EngineCore):
    usable = core._drafter._usable
    core.add(asked("a", 3, 4, stop_token_ids=(7,)))
    core.step()
    (running,) = core.scheduler.running
    assert usable(running, Guess(Source.TEXT, 1, [5, VOCAB, 6])) == ([5], [kind_of(Source.TEXT, 1)])
    assert usable(running, Guess(Source.TREE, 1, [5, 7, 6]))[0] == [5]
    assert usable(running, Guess(Source.TREE, 1, [5, small.EOS, 6]))[0] == [5, small.EOS, 6]  # it asked to ignore these
    core.abort("a")
    while core.has_work:
        core.step()
    assert not core._drafter._outlooks


def test_a_request_that_asks_is_told_of_its_drafts(core: EngineCore):
    """With each output, so that one whose text ends it knows too; the counts of all requests are in `stats`."""
    small.run(core, [(0, asked("first", *range(3, 20)))])
    core.add(asked("again", *range(3, 20), return_drafts=True))
    before, outputs = core.stats(), []
    while core.has_work:
        outputs += core.step()
    taken = core.stats()["num_drafts_taken_tree"] - before["num_drafts_taken_tree"]
    assert [output.drafts and sum(output.drafts.taken.values()) for output in outputs[:2]] == [
        None,
        len(outputs[1].token_ids) - 1,
    ]
    assert outputs[-1].drafts is not None and outputs[-1].drafts.taken == {"tree": taken}
    assert taken == outputs[-1].drafts.proposed["tree"] == LONG - len(outputs)


def test_each_token_that_was_taken_saved_a_step_even_where_the_answer_ends_early(core: EngineCore):
    first = small.run(core, [(0, asked("first", *range(3, 20)))])["first"].token_ids
    core.add(asked("again", *range(3, 20), return_drafts=True, stop_token_ids=(first[25],)))
    outputs = []
    while core.has_work:
        outputs += core.step()
    num_tokens, drafts = sum(len(output.token_ids) for output in outputs), outputs[-1].drafts
    assert num_tokens == first.index(first[25]) + 1 and drafts.taken["tree"] == num_tokens - len(outputs) > 0


# What they do not change.


def test_a_text_that_a_grammar_forces_is_reported_as_such_whoever_writes_it(taught_core_of):
    """The tree has the second answer, in other steps than the first one's."""
    core = taught_core_of(**DETERMINISTIC, speculative="auto")
    first = taught.outcome_of(core, taught.request("first", return_constraint=True))
    again = taught.run(core, [(0, taught.request("again", return_constraint=True))])["again"]
    assert core.stats()["num_drafts_taken_tree"] > 0 and again.token_ids == first.token_ids
    assert len(first.token_ids) > again.num_forced == first.num_forced > 0


@pytest.fixture
def noisy(monkeypatch: pytest.MonkeyPatch, alone) -> None:
    monkeypatch.setattr(Drafter, "_search", small.mixed_drafts(lambda request: alone(request).token_ids))


def paths(node: Node, before: list[int]) -> Iterator[list[int]]:
    """The tokens of each path of a tree."""
    whole = before + np.frombuffer(node.tokens, np.int32).tolist()
    yield whole
    for child in node.children.values():
        yield from paths(child, whole)


@pytest.mark.usefixtures("noisy")
@pytest.mark.parametrize("knobs", [{}, {"page_size": small.PAGE_SIZE}], ids=str)
def test_right_and_wrong_drafts_change_no_bit_of_an_answer(new_core_of, alone, knobs: dict):
    """With every temperature, penalty and stop token, log-probabilities, aborts, chunks and retracts."""
    core = new_core_of(**BUSY, **knobs)
    for seed in range(2):
        check_bitwise(core, alone, seed)
    stats = core.stats()
    assert stats["num_drafts"] > stats["num_drafts_taken"] + 30 > 60 and stats["num_retracts"] > 0


@pytest.mark.usefixtures("noisy")
def test_the_tree_has_nothing_of_a_wrong_draft(core_of, alone):
    core = core_of(**DETERMINISTIC, speculative="auto")
    assert core.flush_cache()
    requests = [request for _, request in small.traffic(3)]
    outcomes = small.run(core, [(0, request) for request in requests])
    said = [[*request.input_ids, *outcomes[request.rid].token_ids] for request in requests]
    found = [path for root in core.cache.roots for path in paths(root, [])]
    assert len(found) > 10 and core.stats()["num_drafts"] > core.stats()["num_drafts_taken"]
    assert all(any(text[: len(path)] == path for text in said) for path in found)


# The gate.


@pytest.mark.slow
def test_shapes_are_measured_when_nothing_runs_and_then_the_gate_opens(new_core_of):
    with small.few_variants():
        core = new_core_of(speculative="auto", forbid_compile=False, **SMALL_POOL)
        while not core.is_settled or core.has_work:
            core.step()
    gate = core.scheduler.gate
    assert gate.is_open and set(gate.seconds) == {*gate._plain, *gate._drafted}
    costs = [gate.seconds[key] for key in sorted(gate.seconds, key=lambda key: key.num_rows)]
    assert costs == sorted(costs) and costs[0] > 0


def test_without_drafts_nothing_is_measured_until_a_request_asks_for_some(new_core_of, monkeypatch: pytest.MonkeyPatch):
    core = new_core_of(speculative="off", **SMALL_POOL)
    monkeypatch.setattr(core._runner, "can_time", lambda key: True)
    core.add(asked("a", 3, 4))
    assert core._unmeasured is None and core.scheduler.gate.to_measure
    core.add(asked("b", 3, 4, speculative="auto"))
    assert core._unmeasured is not None


def test_steps_overlap_where_nothing_is_worth_a_draft(core_of):
    """Every proposal of such a request turned out to be wrong."""
    core = core_of(**DETERMINISTIC, speculative="auto")
    assert core.flush_cache()
    core.add(asked("a", 3, 4, max_new_tokens=60))
    while not core.scheduler.running or core.scheduler.running[0].num_output < 10:
        core.step()
    (running,) = core.scheduler.running
    outlook = core._drafter._look(running)
    for kind in [kind_of(source, length) for source in Source for length in range(20)]:
        for _ in range(200):
            outlook.estimates.count(kind, is_right=False)
    assert not core._drafter.must_know_tokens(core.scheduler.running, 64)
    assert core._in_flight is not None and not core._must_commit_first()
    core.abort("a")
    while core.has_work:
        core.step()
