"""Requests on their way into the step loop, turn by turn, and the longest gaps of both loops for each kind of body."""

from collections.abc import Callable, Sequence

import numpy as np

from bench import gaps
from bench.growth.curve import Calls, Curve
from bench.null_engine import NullGrammars
from bench.report import Report
from bench.sched import VOCAB, make_host
from jsg.engine.child.intake import Grammars, Intake
from jsg.engine.child.protocol import ToEngine
from jsg.engine.child.wire import MessageDecoder, MessageEncoder
from jsg.prompt_ids import PromptIds
from jsg.types import Request, SamplingParams, altered, expand_answers

PROMPT_LEN = 65_000
SHORT_LEN = 700
IN_A_MESSAGE = 64
"""Requests that the front sends in one message, as its loop has its turns."""


class _Core:
    """Takes requests as an engine does, up to their first plans."""

    def __init__(self, context_length: int) -> None:
        self.scheduler = make_host(context_length=context_length).scheduler
        self.grammars: Grammars = NullGrammars()

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, rid: str) -> None:
        self.scheduler.abort(rid)


def _ids(seed: int, size: int) -> PromptIds:
    return PromptIds(np.random.default_rng(seed).integers(0, VOCAB, size).astype(np.int32))


def _answers(size: int) -> list[Request]:
    first = Request(rid="r", input_ids=_ids(0, PROMPT_LEN), sampling=SamplingParams(max_new_tokens=4, ignore_eos=True))
    each = expand_answers(altered(first.sampling, n=size), 0)
    return [altered(first, rid=f"r{index}", sampling=sampling) for index, sampling in enumerate(each)]


def _prompts(size: int) -> list[Request]:
    sampling = SamplingParams(max_new_tokens=4, ignore_eos=True)
    return [Request(rid=f"r{index}", input_ids=_ids(index, SHORT_LEN), sampling=sampling) for index in range(size)]


def _turns(requests: Callable[[int], Sequence[Request]]) -> Callable[[int], Calls]:
    """They are written, read and taken; each turn of either loop is a call. It counts the ids that are on the wire."""

    def calls(size: int) -> Calls:
        made, core, waiting = requests(size), _Core(PROMPT_LEN + 1000), Intake()
        encoder, decoder = MessageEncoder(), MessageDecoder()
        frames: list[bytes | memoryview] = []

        def write(some: Sequence[Request]) -> int:
            frames[:] = encoder.encode(ToEngine(requests=some))
            return sum(map(len, frames))

        def turn() -> None:
            waiting.take(core)

        for start in range(0, size, IN_A_MESSAGE):
            yield lambda start=start: write(made[start : start + IN_A_MESSAGE])
            yield lambda: waiting.put(decoder.decode([memoryview(bytes(frame)) for frame in frames]), core)
            while waiting:
                yield turn
        yield core.scheduler.plan

    return calls


def _checks(size: int) -> Calls:
    """The ids of one prompt are checked."""
    ids = _ids(0, size)[:]
    yield lambda: PromptIds.of(ids)


CURVES = (
    Curve("n answers to a prompt of 65 000 ids, into the step loop", (2, 8, 32, 128), _turns(_answers)),
    Curve("n prompts of 700 ids, into the step loop", (16, 64, 256, 1024), _turns(_prompts)),
    Curve("n ids of a prompt are checked", (2000, 8000, 32_000, 128_000), _checks),
)


def add_others(report: Report, *, is_quick: bool) -> list[str]:
    """Adds the longest gap of both loops for each kind of body. Gives the kinds whose gap is beyond the bound."""
    kinds, repeats = (gaps.QUICK_KINDS, 1) if is_quick else (tuple(gaps.KINDS), 3)
    return gaps.measure_kinds(report, kinds, repeats)
