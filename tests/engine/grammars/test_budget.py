"""The masks of one step stay within its budget. A request whose mask is late skips the step, and loses only time."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from jsg.cache.node import Root
from jsg.cache.radix import PrefixLock
from jsg.constrained.compiler import compile_tables
from jsg.constrained.grammar import GrammarMasker
from jsg.constrained.limits import STEP_STEPS
from jsg.engine.core import EngineCore
from jsg.engine.device.mask_pool import MaskPool
from jsg.engine.grammars.begun import Begun
from jsg.engine.grammars.constraints import Constraints
from jsg.engine.grammars.lexicon import Lexicon, LexiconLoader
from jsg.sched.batch import Batch, BatchEntry
from jsg.sched.buckets import BucketKey, Phase
from jsg.sched.put_off import put_off
from jsg.sched.request import Placement, new_running_request
from jsg.types import GrammarSpec, JumpForward, Request
from tests.constrained.vocabularies import bits, tekken
from tests.engine import lettered
from tests.engine.lettered import Outcome, greedy, traffic
from tests.engine.small import DETERMINISTIC, PAGE_SIZE, check_core
from tests.engine.taught import BUSY, check_bitwise, check_matches, outcome_of, run

COSTLY = tuple(GrammarSpec("regex", f"[a-z0-9 ]*{letter}[a-z0-9 ]{{14}}") for letter in "abcdefgh")
"""Each with as many states as texts have ways to go on."""
STEP = 2_000
"""Of work: about as much as one of their masks takes for the small vocabulary."""


@pytest.fixture
def put_offs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each entry that was put off: whether it was the end of a chunk, and whether it had drafts."""
    seen: list[tuple[bool, bool]] = []

    def spy(entry: BatchEntry, *args: object) -> None:
        seen.append((entry.ends_prefill, entry.num_drafts > 0))
        put_off(entry, *args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr("jsg.engine.core.put_off", spy)
    return seen


class Work:
    """The questions to maskers, and their work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[tuple[str, int]] = []
        for name in ("mask_key", "accept", "forced_bytes", "is_finished"):
            monkeypatch.setattr(GrammarMasker, name, self._counted(name, getattr(GrammarMasker, name)))

    def _counted(self, name: str, real: Callable) -> Callable:
        def ask(masker: GrammarMasker, *args: int) -> object:
            before = masker.num_steps
            try:
                return real(masker, *args)
            finally:
                self.asked.append((name, masker.num_steps - before))

        return ask

    def take(self) -> tuple[int, int, int]:
        """Since the last time: all of it, what was not for masks, and the dearest question."""
        asked, self.asked = self.asked, []
        others = sum(steps for name, steps in asked if name != "mask_key")
        return sum(steps for _, steps in asked), others, max([steps for _, steps in asked], default=0)


def limit(core: EngineCore, num_steps: int) -> EngineCore:
    """The engine, with so much work for a step from now on."""
    core.grammars._most_steps = core.grammars._steps_left = num_steps
    return core


def teach_afresh(core: EngineCore) -> None:
    """Nothing is worked out yet of the costly grammars."""
    core.grammars.forget_grammars([grammar.key for grammar in COSTLY])
    for grammar in COSTLY:
        core.grammars.add_grammar(grammar.key, compile_tables(grammar).to_bytes())


def costly(number: int, **fields: object) -> Request:
    sampling = greedy(grammar=COSTLY[number], **({"max_new_tokens": 24, "ignore_eos": True} | fields))
    prompt = tuple(range(3 + number, 3 + number + 5 + number % 3))
    return Request(rid=str(number), input_ids=prompt, sampling=sampling, return_logprob=True)


@pytest.mark.parametrize("jump", ["off", "draft"])
def test_a_stream_goes_on_while_many_costly_grammars_begin(
    new_taught_core_of, jump: JumpForward, monkeypatch: pytest.MonkeyPatch, put_offs: list
):
    """Each of its tokens takes one step, and no step has more work with masks than it may, and one mask beyond that."""
    core = new_taught_core_of(**DETERMINISTIC, max_running_requests=16)
    teach_afresh(core)
    hostile = [costly(number, jump_forward=jump) for number in range(len(COSTLY))]
    expected = {each.rid: outcome_of(limit(core, STEP_STEPS), each) for each in hostile}
    assert not put_offs
    teach_afresh(core)
    assert limit(core, STEP).flush_cache()
    work, outcomes, most = Work(monkeypatch), {each.rid: Outcome() for each in hostile}, 0
    free = Request(rid="free", input_ids=(3, 4), sampling=greedy(grammar=None, max_new_tokens=240, ignore_eos=True))
    core.add(free)
    while not core.step():
        pass
    for each in hostile:
        core.add(each)
    while core.has_work:
        outputs = {output.rid: output for output in core.step()}
        check_core(core)
        total, others, dearest = work.take()
        most = max(most, total)
        assert total <= max(STEP, others) + dearest
        if free is not None:
            assert len(outputs["free"].token_ids) == 1
            free = None if outputs.pop("free").finish else free
        for output in outputs.values():
            outcomes[output.rid].add(output)
    assert most > STEP and len(put_offs) > len(hostile), "there is too little work"
    for rid, outcome in outcomes.items():
        outcome.cached_tokens = expected[rid].cached_tokens
        assert outcome == expected[rid]


def test_the_oldest_is_served_first(new_taught_core_of, put_offs: list):
    core = limit(new_taught_core_of(**DETERMINISTIC), 1)
    teach_afresh(core)
    for number in range(4):
        core.add(costly(number, jump_forward="off"))
    ends = []
    while core.has_work:
        ends += [output.rid for output in core.step() if output.finish is not None]
        check_core(core)
    assert ends == ["0", "1", "2", "3"] and put_offs


@pytest.fixture
def always_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that was worked out is forgotten all the time, so that every mask is work."""
    for name in ("MACHINE_BYTES", "WORTH_BYTES", "WEIGHED_EVERY"):
        monkeypatch.setattr(f"jsg.engine.grammars.store.{name}", 1)


@pytest.mark.usefixtures("always_new")
def test_whoever_sits_steps_out_answers_the_same(new_taught_core_of, taught_alone, put_offs: list):
    """There is room in a step for some of the masks only; chunks, tokens and drafts are put off."""
    core = new_taught_core_of(**BUSY)
    for seed, num_steps in enumerate((1, 500)):
        check_bitwise(limit(core, num_steps), taught_alone, seed)
    assert set(put_offs) == {(True, False), (False, False), (False, True)}


@pytest.mark.slow
@pytest.mark.usefixtures("always_new")
@pytest.mark.parametrize(
    ("knobs", "jump"),
    [
        ({}, "off"),
        pytest.param({}, "draft", marks=pytest.mark.long),
        pytest.param({"page_size": PAGE_SIZE}, "off", marks=pytest.mark.long),
        ({"page_size": PAGE_SIZE}, "draft"),
        pytest.param({"disable_overlap_schedule": True}, "off", marks=pytest.mark.long),
        ({"disable_overlap_schedule": True}, "draft"),
    ],
    ids=str,
)
def test_whoever_sits_steps_out_answers_the_same_in_much_traffic(
    new_taught_core_of, taught_alone, jump: JumpForward, knobs: dict
):
    """Half of this grid is long: each knob is there with one way to jump."""
    core = new_taught_core_of(**BUSY, **knobs)
    for seed in range(6):
        check_bitwise(limit(core, (1, 500, 2_000)[seed % 3]), taught_alone, seed, jump)


@pytest.mark.parametrize("jump", ["draft", pytest.param("off", marks=pytest.mark.slow), "retokenize"])
def test_in_default_mode_too_what_comes_out_matches(new_taught_core_of, jump: JumpForward, put_offs: list):
    core = limit(new_taught_core_of(), 1)
    core.grammars.forget_grammars([each.key for each in lettered.GRAMMARS])
    lettered.teach(core)
    arrivals = traffic(11, jump=jump)
    outcomes = run(core, arrivals)
    assert put_offs
    for _, each in arrivals:
        check_matches(core, each, outcomes[each.rid])


@pytest.mark.parametrize("length", [1, 2, 30])
def test_a_prompt_that_is_put_off_is_scored_once(new_taught_core_of, length: int, put_offs: list):
    core = limit(new_taught_core_of(**DETERMINISTIC), STEP_STEPS)
    prompt = tuple(range(40, 40 + length))
    late = Request(rid="late", input_ids=prompt, sampling=greedy(1), return_logprob=True, logprob_start_len=0)
    expected = outcome_of(core, late)
    core.grammars.forget_grammars([each.key for each in lettered.GRAMMARS])
    lettered.teach(limit(core, 1))
    assert core.flush_cache() and not put_offs
    outcomes = run(core, [(0, Request(rid="early", input_ids=(3, 4, 5), sampling=greedy(0))), (0, late)])
    assert (True, False) in put_offs
    assert expected.prompt_logprobs and len(expected.prompt_logprobs) == length
    assert dataclasses.replace(outcomes["late"], cached_tokens=0) == dataclasses.replace(expected, cached_tokens=0)


# With a real vocabulary, and limits as they are.


def constraints_of(specs: list[GrammarSpec]) -> Constraints:
    lexicon = object.__new__(Lexicon)
    object.__setattr__(lexicon, "vocabulary", tekken())
    loader = object.__new__(LexiconLoader)
    loader._loading = Begun("lexicon", lambda: lexicon)
    constraints = Constraints(loader, tekken().size, frozenset(tekken().eos_ids), "off")
    constraints._tokens = object()  # pyright: ignore[reportAttributeAccessIssue] - of drafts, which there are none
    for spec in specs:
        constraints.add_grammar(spec.key, compile_tables(spec).to_bytes())
    return constraints


@pytest.mark.slow
def test_twenty_costly_grammars_share_a_step_of_a_real_vocabulary(monkeypatch: pytest.MonkeyPatch):
    ambiguous = 's ::= "{}" s s | [a-z] s "b" | [^"\\\\] s | "x" | u\nu ::= [a-zA-Z]+ u "c" | "d"\nroot ::= s'
    specs = [GrammarSpec("regex", f".*{letter}.{{14}}") for letter in "abcdefghij"]
    specs += [GrammarSpec("ebnf", ambiguous.format(letter)) for letter in "klmnopqrst"]
    constraints, pool, work = constraints_of(specs), MaskPool(tekken().num_words), Work(monkeypatch)
    entries = []
    for number, spec in enumerate(specs):
        request = Request(rid=str(number), input_ids=(5, 6, 7), sampling=greedy(grammar=spec, max_new_tokens=8))
        constraint = constraints.prepare(request)
        assert constraint is not None
        constraints.put(request.rid, constraint)
        running = new_running_request(request, number, 0.0)
        running.place = Placement(1 + number, PrefixLock(Root("")), 0, 2, is_prefilling=False)
        entries.append(BatchEntry(running, running.place, 2, 1, 2, output_index=0, samples=True))
    heaviest, num_served, failures = 0, [], 0
    while entries:
        batch = Batch(BucketKey(Phase.DECODE, 32, 32), tuple(entries), len(entries), (), ())
        masks = constraints.mask_rows(batch, pool)
        total, others, dearest = work.take()
        assert total <= STEP_STEPS + dearest and not others
        heaviest = max(heaviest, total)
        served = [entry for entry in entries if entry not in masks.put_off]
        assert entries[0] in served
        num_served.append(len(served))
        entries = masks.put_off
        for entry in served:
            constraint = constraints._live[entry.running.request.rid]
            mask = np.zeros(tekken().num_words, np.uint32)
            if constraint.failure is None:  # one mask alone may be more work than there may be
                assert not constraint.masker.fill_mask(mask) or bits(mask)
            failures += constraint.failure is not None
        work.take()
    assert heaviest > STEP_STEPS and len(num_served) > 1, "there is too little work"
    assert failures <= len(specs) // 2
