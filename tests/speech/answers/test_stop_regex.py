"""Answers that end before the first match of a pattern, whatever the tokens and however they come."""

import re
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.constrained.stop_patterns import stop_patterns
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.answers.answer_stream import AnswerStream
from jsg.speech.answers.parts_reader import CallForm
from jsg.speech.dialects import DIALECTS
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams

LENGTH = FinishReason(FinishType.LENGTH)
PATTERNS = (r"\d\d+", "[ab]{2}c?😀", "é+b", "N[^D]", "(?i:end)")


@pytest.fixture(scope="module")
def byte_level(all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers["byte_level"]


def answer_of(tokenizer: Tokenizer, text: str, cuts: Sequence[int] = (), calls: CallForm | None = None, **sampling):
    """The pieces of the answer that the text's tokens make, pushed in parts of these lengths."""
    params = SamplingParams(**sampling)
    request = Request(rid="r", input_ids=(1,), sampling=params)
    answer = Answer(request, tokenizer, is_continued=False, calls=calls, patterns=stop_patterns(params))
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = []
    for length in cuts:
        if length >= len(ids):
            break
        pieces.append(answer.push(RequestOutput(rid="r", token_ids=tuple(ids[:length]))).text)
        ids = ids[length:]
    pieces.append(answer.push(RequestOutput(rid="r", token_ids=tuple(ids), finish=LENGTH)).text)
    return answer, pieces


def first_match(text: str, stop: Sequence[str], patterns: Sequence[str]) -> tuple[int, int] | None:
    """Where the match that is complete first begins and ends, of several the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        starts += [b for p in patterns for b in range(end) if re.fullmatch(p, text[b:end])]
        if starts:
            return min(starts), end
    return None


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    text=st.text("abcENDend1😀é", max_size=20),
    stop=st.lists(st.text("abN", min_size=2, max_size=3), max_size=1).map(tuple),
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3).map(tuple),
    cuts=st.lists(st.integers(0, 3), max_size=12),
    no_stop_trim=st.booleans(),
)
def test_any_cut_gives_what_the_whole_text_gives(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], patterns: tuple[str, ...], cuts: list[int],
    no_stop_trim: bool,
) -> None:  # fmt: skip
    answer, pieces = answer_of(tokenizer, text, cuts, stop=stop, stop_regex=patterns, no_stop_trim=no_stop_trim)
    found = first_match(text, stop, patterns)
    if found is None:
        assert (answer.text, answer.finish) == (text, LENGTH)
    else:
        begin, end = found
        assert answer.text == text[: end if no_stop_trim else begin]
        is_string = text[begin:end] in stop
        said = text[begin:end] if is_string else next(p for p in patterns if re.fullmatch(p, text[begin:end]))
        assert answer.finish == FinishReason(FinishType.STOP, matched=said)
    assert "".join(pieces) == answer.text  # nothing that was shown is taken back


def test_holds_back_only_what_may_begin_a_match(byte_level: Tokenizer) -> None:
    params = SamplingParams(stop_regex=r"Q\d+:")
    make = stop_patterns(params)
    assert make is not None
    stream = AnswerStream(byte_level, params, patterns=make)
    deltas = [stream.push(byte_level.encode(char, add_special_tokens=False), None) for char in "aQ1b2Q12:x"]
    assert [delta.text for delta in deltas] == ["a", "", "", "Q1b", "2", "", "", "", "", ""]
    assert [delta.finish is not None for delta in deltas] == [False] * 8 + [True, False]


def test_it_counts_from_the_first_token_that_may_be_the_last(byte_level: Tokenizer) -> None:
    text = "1 2 3 4 5"
    ids = byte_level.encode(text, add_special_tokens=False)
    answer, _ = answer_of(byte_level, text, [1] * 20, stop_regex=r"\d", min_new_tokens=3)
    assert answer.token_ids == ids[:3]
    assert answer.text == byte_level.decode(ids[:3])[:-1]
    assert answer.finish == FinishReason(FinishType.STOP, matched=r"\d")


def test_a_call_is_never_cut_in_two(byte_level: Tokenizer) -> None:
    form = CallForm(DIALECTS["hermes"], frozenset(("f",)))
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 12}}\n</tool_call>'
    answer, _ = answer_of(byte_level, f"{call} and 34 more", [2] * 40, calls=form, stop_regex=r"\d+")
    assert answer.text == f"{call} and "
    assert answer.finish == FinishReason(FinishType.STOP, matched=r"\d+")


def test_an_answer_with_patterns_and_no_finder_is_our_bug(byte_level: Tokenizer) -> None:
    request = Request(rid="r", input_ids=(1,), sampling=SamplingParams(stop_regex="a"))
    with pytest.raises(AssertionError, match="stop_patterns"):
        Answer(request, byte_level)


def test_each_of_n_answers_has_a_finder_of_its_own(byte_level: Tokenizer) -> None:
    prompt = Prompt(rid="r", input_ids=(1,), sampling=SamplingParams(n=2, stop_regex="ab"))
    make = stop_patterns(prompt.sampling)
    first, second = (
        Answer(request, byte_level, is_continued=False, patterns=make) for request in prompt.requests(fresh_seed=0)
    )
    a, b = (tuple(byte_level.encode(char, add_special_tokens=False)) for char in "ab")
    first.push(RequestOutput(rid="r_0", token_ids=a))
    second.push(RequestOutput(rid="r_1", token_ids=b, finish=LENGTH))
    assert (second.text, second.finish) == ("b", LENGTH)
    first.push(RequestOutput(rid="r_0", token_ids=b))
    assert (first.text, first.finish) == ("", FinishReason(FinishType.STOP, matched="ab"))
