"""Answers with calls: their texts and calls, and stop strings, which are found in texts and never in a call."""

import pytest

from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.answer_stream import AnswerDelta, AnswerStream
from jsg.speech.answers.parts_reader import CallForm
from jsg.speech.dialects import DIALECTS
from jsg.types import FinishReason, FinishType, SamplingParams
from tests.speech.parsed import join_deltas, parse_tool_calls

FORM = CallForm(DIALECTS["hermes"], frozenset(("f", "g")))
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "END", "b": [1, 2]}}\n</tool_call>'
LENGTH = FinishReason(FinishType.LENGTH)

CASES: list[tuple[tuple[str, ...], str, str, str | None]] = [
    (("END",), CALL, CALL, None),
    (("\n",), CALL, CALL, None),
    (("<tool", "tool_call", "<"), CALL, CALL, None),
    (("{", "f", "]}}"), CALL, CALL, None),
    (("</tool_call>",), CALL, CALL, None),
    (("END",), f"It is the END. {CALL}", "It is the ", "END"),
    (("END",), f"Words. {CALL}\n{CALL} and the END of it", f"Words. {CALL}\n{CALL} and the ", "END"),
    (("END",), f"EN{CALL}D", f"EN{CALL}D", None),
    (("EN", "END"), "the END", "the ", "EN"),
    (("\n\n",), f"See:\n\n{CALL}", f"See:\n\n{CALL}", None),  # white space beside a call belongs to it
    (("\n\n",), "See:\n\nthis", "See:", "\n\n"),
    (("\n",), "See:\n", "See:", "\n"),
    (("\n",), f"{CALL}\n", f"{CALL}\n", None),
    (("<tool", "END"), "a <tools END", "a ", "<tool"),  # only the beginning of a call
    (("<tool",), "a <tool", "a ", "<tool"),
    (("\n", "na"), '<tool_call>\n{"na', '<tool_call>\n{"na', None),  # cut off inside the beginning of a call
    (("no call",), "<tool_call> no call END", "<tool_call> ", "no call"),
    (("END",), '<tool_call>{"name": "f", "arguments": {"a": END',
     '<tool_call>{"name": "f", "arguments": {"a": ', "END"),
    (("ab",), f"{CALL}a</tool_call>b", f"{CALL}a</tool_call>b", None),  # a mark without a call is no text
    (("b c",), f"{CALL}a</tool_call>b c", f"{CALL}a</tool_call>", "b c"),
    (("x",), '{"name": "f"} x', '{"name": "f"} ', "x"),  # another model's form is text
]  # fmt: skip


@pytest.fixture(scope="module")
def byte_level(all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers["byte_level"]


def read(tokenizer: Tokenizer, text: str, step_len: int, **sampling) -> AnswerDelta:
    params = SamplingParams(**sampling)
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = AnswerStream(tokenizer, params, calls=FORM)
    deltas = []
    for start in range(0, len(ids), step_len):
        deltas.append(stream.push(ids[start : start + step_len], LENGTH if start + step_len >= len(ids) else None))
    return AnswerDelta.join([delta for delta in deltas if delta.token_ids or delta.finish])


@pytest.mark.parametrize("step_len", [1, 2, 1000])
@pytest.mark.parametrize(("stops", "text", "expected", "matched"), CASES)
def test_where_an_answer_ends(byte_level, stops, text, expected, matched, step_len):
    answer = read(byte_level, text, step_len, stop=stops)
    assert answer.text == expected
    assert answer.finish == (LENGTH if matched is None else FinishReason(FinishType.STOP, matched))
    kept = read(byte_level, text, step_len, stop=stops, no_stop_trim=True)
    assert kept.text == expected + (matched or "")
    for each in (answer, kept):
        found = parse_tool_calls(each.text, FORM.dialect, FORM.names, str, is_cut=matched is None)
        parts = join_deltas(each.parts)
        assert parts.content == found.content
        assert [(call.name, call.arguments) for call in parts.calls] == [
            (call.name, call.arguments) for call in found.calls
        ]


@pytest.mark.parametrize("step_len", [1, 1000])
def test_what_comes_too_early_does_not_count(byte_level, step_len):
    num_tokens = len(byte_level.encode("a END b", add_special_tokens=False))
    answer = read(byte_level, "a END b END c", step_len, stop=("END",), min_new_tokens=num_tokens)
    assert (answer.text, answer.finish) == ("a END b ", FinishReason(FinishType.STOP, "END"))
    assert join_deltas(answer.parts).content == "a END b "


def test_tokens_do_not_depend_on_the_steps(byte_level):
    text = f"It is {CALL} the END. More"
    counts = {len(read(byte_level, text, step_len, stop=("END",)).token_ids) for step_len in (1, 2, 3, 5, 1000)}
    assert len(counts) == 1


def test_nothing_is_shown_that_may_be_cut(byte_level):
    """Each piece stays: the text only grows, and never beyond a stop string that is found later."""
    params = SamplingParams(stop=("END",))
    stream = AnswerStream(byte_level, params, calls=FORM)
    said, finish = "", None
    for token in byte_level.encode(f"a{CALL}b EN\nEN <tool_ END", add_special_tokens=False):
        delta = stream.push((token,), None)
        said, finish = said + delta.text, finish or delta.finish
        assert f"a{CALL}b EN\nEN <tool_ ".startswith(said)
    assert finish is not None
