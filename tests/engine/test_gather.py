"""Outputs that are sent together: none is lost, the first one is sent at once, and no wait is long."""

import dataclasses
import itertools

import pytest

from jsg.constrained.stop_patterns import stop_patterns
from jsg.engine.core import EngineCore
from jsg.engine.gather import PERIOD_S, Gatherer
from jsg.engine.offline.engine import _request_of
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model
from jsg.speech.answers.answer import Answer
from jsg.step_reports import ConstraintReport, DraftReport
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams, TokenLogprob
from tests.engine import small

PROMPT = tuple(range(2, 40))
STOP = FinishReason(FinishType.STOP)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gatherer(clock: Clock) -> Gatherer:
    return Gatherer(clock)


def output(token: int, rid: str = "a", finish: FinishReason | None = None) -> RequestOutput:
    return RequestOutput(rid=rid, token_ids=(token,), finish=finish)


def test_the_first_and_the_last_go_at_once_and_those_between_together(gatherer: Gatherer, clock: Clock):
    gatherer.add("a")
    assert [out.token_ids for out in gatherer.gather([output(1)])] == [(1,)]
    assert gatherer.gather([output(2)]) == gatherer.gather([output(3)]) == []
    clock.now += PERIOD_S
    assert [out.token_ids for out in gatherer.gather([output(4)])] == [(2, 3, 4)]
    assert gatherer.gather([output(5)]) == []
    (last,) = gatherer.gather([output(6, finish=STOP)])
    assert (last.token_ids, last.finish) == ((5, 6), STOP)
    assert [out.token_ids for out in gatherer.gather([output(7)])] == [(7,)], "another request of that name"


def test_others_pass_as_they_come(gatherer: Gatherer):
    gatherer.add("a")
    gatherer.gather([output(1)])
    outputs = [output(2), output(3, "b"), output(4, "c", STOP)]
    assert gatherer.gather(outputs) == outputs[1:]


def test_what_ended_without_an_output_is_forgotten(gatherer: Gatherer):
    gatherer.add("a")
    gatherer.forget("a")
    gatherer.forget("never there")
    assert not gatherer._known


def test_one_output_says_what_several_said():
    def logprob(token: int) -> TokenLogprob:
        return TokenLogprob(token_id=token, logprob=-1.0)

    first = RequestOutput(
        rid="a", token_ids=(1,), prompt_tokens=9, cached_tokens=4, queue_s=0.5, logprobs=(logprob(1),),
        prompt_logprobs=(logprob(8),),
        constraint=ConstraintReport(is_forced=(True,), kept_mass=(0.5,), is_complete=False),
    )  # fmt: skip
    second = RequestOutput(
        rid="a", token_ids=(2, 3), prompt_tokens=9, cached_tokens=4, queue_s=0.5, logprobs=(logprob(2), logprob(3)),
        constraint=ConstraintReport(is_forced=(True, False), kept_mass=(0.25, 1.0), is_complete=True),
    )  # fmt: skip
    end = RequestOutput(rid="a", prompt_tokens=9, finish=FinishReason(FinishType.ABORT))
    assert RequestOutput.join([first, second, end]) == dataclasses.replace(
        first,
        token_ids=(1, 2, 3),
        logprobs=(logprob(1), logprob(2), logprob(3)),
        constraint=ConstraintReport(is_forced=(True, True, False), kept_mass=(0.5, 0.25, 1.0), is_complete=True),
        finish=end.finish,
    )


def request_of(rid: str, *, is_streamed: bool) -> Request:
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=12)
    return Request(
        rid=rid, input_ids=PROMPT, sampling=sampling, return_logprob=True, logprob_start_len=0, is_streamed=is_streamed
    )


def test_an_engine_gives_the_same_answer_in_fewer_outputs(core_of, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    core: EngineCore = core_of(**small.DETERMINISTIC)
    monkeypatch.setattr(core._gatherer, "_clock", clock)
    found, counts = [], []
    for is_streamed in (True, False):
        assert core.flush_cache()
        core.add(request_of("a", is_streamed=is_streamed))
        outputs = list(itertools.chain.from_iterable(core.step() for _ in iter(lambda: core.has_work, False)))
        whole = small.Outcome()
        for each in outputs:
            whole.add(each)
        found.append(whole)
        counts.append(len(outputs))
    assert found[0] == found[1]
    assert counts == [12, 2]
    assert not core._gatherer._known


def test_an_abort_brings_along_what_waited(core_of, clock: Clock, monkeypatch: pytest.MonkeyPatch):
    core: EngineCore = core_of(**small.DETERMINISTIC)
    monkeypatch.setattr(core._gatherer, "_clock", clock)
    core.add(request_of("a", is_streamed=False))
    outputs = [each for _ in range(6) for each in core.step()]
    core.abort("a")
    while core.has_work:
        outputs += core.step()
    first, last = outputs
    assert (len(first.token_ids), first.finish) == (1, None)
    assert len(last.token_ids) >= 2 and last.finish and last.finish.type is FinishType.ABORT
    assert not core._gatherer._known


@pytest.mark.parametrize("ends", [{}, {"stop": ("x",)}, {"stop_regex": ("[0-9]",)}])
def test_what_may_end_in_its_text_is_streamed_all_the_same(ends: dict):
    sampling = SamplingParams(max_new_tokens=5, **ends)
    request = Request(rid="a", input_ids=PROMPT, sampling=sampling)
    answer = Answer(request, load_tokenizer(resolve_model("tiny")), patterns=stop_patterns(sampling))
    assert answer.ends_in_engine == (not ends)
    assert _request_of(answer, is_read=True) is request
    assert _request_of(answer, is_read=False).is_streamed == bool(ends)


def test_an_answer_that_its_text_ends_knows_its_drafts_and_its_steps():
    """The last output of the engine comes later, and the end stands within the tokens of a step."""
    tokenizer = load_tokenizer(resolve_model("tiny"))
    ids = tokenizer.encode("1 2 3 stop 4 5 6")
    answer = Answer(Request(rid="a", input_ids=PROMPT, sampling=SamplingParams(stop=("stop",))), tokenizer)
    answer.push(RequestOutput(rid="a", token_ids=tuple(ids[:1])))
    report = DraftReport(proposed={"tree": 9}, taken={"tree": len(ids) - 2})
    answer.push(RequestOutput(rid="a", token_ids=tuple(ids[1:]), drafts=report))
    assert answer.finish is not None and len(answer.token_ids) < len(ids)
    assert answer.drafts() == {"proposed": report.proposed, "taken": report.taken, "steps": 2}
