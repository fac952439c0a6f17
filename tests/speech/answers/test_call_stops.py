"""Stop strings in answers with calls: found in what the answer says, never in a call."""

import pytest

from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.call_stops import CallForm, CallStops
from jsg.speech.answers.output import OutputStream
from jsg.speech.dialects import DIALECTS
from jsg.types import FinishReason, FinishType, SamplingParams

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


def read(tokenizer: Tokenizer, text: str, step_len: int, **sampling) -> tuple[str, int, FinishReason | None]:
    params = SamplingParams(**sampling)
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = OutputStream(tokenizer, params, stops=CallStops(params.stop, FORM))
    said, num_tokens, finish = "", 0, None
    for start in range(0, len(ids), step_len):
        step = ids[start : start + step_len]
        delta = stream.push(step, LENGTH if start + step_len >= len(ids) else None)
        said += delta.text
        num_tokens += len(delta.token_ids)
        finish = finish or delta.finish
    return said, num_tokens, finish


@pytest.mark.parametrize("step_len", [1, 2, 1000])
@pytest.mark.parametrize(("stops", "text", "expected", "matched"), CASES)
def test_where_an_answer_ends(byte_level, stops, text, expected, matched, step_len):
    said, _, finish = read(byte_level, text, step_len, stop=stops)
    assert said == expected
    assert finish == (LENGTH if matched is None else FinishReason(FinishType.STOP, matched))
    kept, _, _ = read(byte_level, text, step_len, stop=stops, no_stop_trim=True)
    assert kept == expected + (matched or "")


@pytest.mark.parametrize("step_len", [1, 1000])
def test_what_comes_too_early_does_not_count(byte_level, step_len):
    num_tokens = len(byte_level.encode("a END b", add_special_tokens=False))
    said, _, finish = read(byte_level, "a END b END c", step_len, stop=("END",), min_new_tokens=num_tokens)
    assert (said, finish) == ("a END b ", FinishReason(FinishType.STOP, "END"))


def test_tokens_do_not_depend_on_the_steps(byte_level):
    text = f"It is {CALL} the END. More"
    counts = {read(byte_level, text, step_len, stop=("END",))[1] for step_len in (1, 2, 3, 5, 1000)}
    assert len(counts) == 1


def test_nothing_is_shown_that_may_be_cut(byte_level):
    """Each piece stays: the text only grows, and never beyond a stop string that is found later."""
    params = SamplingParams(stop=("END",))
    stream = OutputStream(byte_level, params, stops=CallStops(params.stop, FORM))
    said, finish = "", None
    for token in byte_level.encode(f"a{CALL}b EN\nEN <tool_ END", add_special_tokens=False):
        delta = stream.push((token,), None)
        said, finish = said + delta.text, finish or delta.finish
        assert f"a{CALL}b EN\nEN <tool_ ".startswith(said)
    assert finish is not None
