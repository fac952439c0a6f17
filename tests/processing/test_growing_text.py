"""Texts that grow: against plain strings, and that a token of a long answer costs as much as one of a short answer."""

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.constrained.stop_patterns import stop_patterns
from jsg.processing.growing_text import GrowingText
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model
from jsg.speech.answers.answer import Answer
from jsg.speech.answers.thoughts import MARKERS, Phase, Thoughts
from jsg.types import Request, RequestOutput, SamplingParams

NUM_TOKENS = 60_000
FEW_BYTES = 10_000  # a copy of the answer's text would take at least a byte for each token
STEPS = st.lists(st.one_of(st.text(max_size=5), st.integers(0, 12), st.sampled_from(["read", "take all"])), max_size=40)


@given(steps=STEPS)
@settings(deadline=None, derandomize=True, max_examples=50)
def test_as_a_plain_string(steps: list[str | int]):
    growing, plain = GrowingText(), ""
    for step in steps:
        if step == "read":
            assert str(growing) == plain
        elif step == "take all":
            assert growing.take_all() == plain
            plain = ""
        elif isinstance(step, int):
            step = min(step, len(plain))
            assert growing.take(step) == plain[:step]
            plain = plain[step:]
        else:
            growing.append(step)
            plain += step
        assert len(growing) == len(plain)
    assert str(growing) == plain


def answer_of(tokenizer: Tokenizer, thoughts: Thoughts | None = None, **fields: object) -> Answer:
    sampling = SamplingParams.from_dict(fields)
    request = Request(rid="r", input_ids=(1,), sampling=sampling)
    return Answer(request, tokenizer, thoughts=thoughts, patterns=stop_patterns(sampling))


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return load_tokenizer(resolve_model("tiny"))


@pytest.mark.parametrize("kind", ["plain", "stop string", "stop regex", "thoughts", "blanks", "counted"])
def test_a_token_of_a_long_answer_is_as_cheap_as_of_a_short_one(kind: str, tiny: Tokenizer):
    """Whatever of the answer is held back: for a stop string, for a pattern, or as thoughts."""
    qwen = MARKERS["qwen3"]
    answer = {
        "plain": lambda: answer_of(tiny),
        "stop string": lambda: answer_of(tiny, stop="b"),
        "stop regex": lambda: answer_of(tiny, stop_regex="a+b"),
        "thoughts": lambda: answer_of(tiny, Thoughts(qwen, phase=Phase.INSIDE)),
        "blanks": lambda: answer_of(tiny, Thoughts(qwen)),
        "counted": lambda: answer_of(tiny, Thoughts(qwen, is_split=False)),
    }[kind]()
    (token,) = tiny.encode(" " if kind in ("blanks", "counted") else "a")
    one, many = (RequestOutput(rid="r", token_ids=(token,) * size) for size in (1, 1000))
    for _ in range(NUM_TOKENS // 1000):
        answer.push(many)
    # A list that has no room for one more is copied, so not each push is cheap.
    assert min(peak_bytes(lambda: answer.push(one)) for _ in range(3)) < FEW_BYTES
    assert len(answer.result()["output_ids"]) == NUM_TOKENS + 3


def peak_bytes(run: Callable[[], object]) -> int:
    """The most memory that a call has taken at a time."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
