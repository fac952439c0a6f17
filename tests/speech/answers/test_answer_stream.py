from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.answer_stream import AnswerDelta, AnswerStream
from jsg.types import FinishReason, FinishType, SamplingParams

LENGTH = FinishReason(FinishType.LENGTH)
PROPERTY = settings(deadline=None, derandomize=True, max_examples=50)


def _reference(tokenizer: Tokenizer, sampling: SamplingParams, ids: Sequence[int]) -> tuple[str, int, str | None]:
    """Text, number of tokens and stop string by decoding every beginning of the ids whole.

    The first character at which some stop string ends, counting only those that end after the text of the first
    `min_new_tokens - 1` tokens; the longest of those that end there.
    """

    def settled(num_tokens: int) -> str:
        # A character that is not whole yet is no text; a whole one outside it does not change any more.
        text = tokenizer.decode(ids[:num_tokens], skip_special_tokens=sampling.skip_special_tokens)
        return text if num_tokens == len(ids) else text.rstrip("\ufffd")

    text = settled(len(ids))
    if len(ids) < sampling.min_new_tokens:
        return text, len(ids), None
    first_end = len(settled(max(sampling.min_new_tokens - 1, 0))) + 1
    for end in range(first_end, len(text) + 1):
        matches = [stop for stop in sampling.stop if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            num_tokens = next(n for n in range(len(ids) + 1) if len(settled(n)) >= end)
            return text[: end if sampling.no_stop_trim else end - len(stop)], num_tokens, stop
    return text, len(ids), None


def _stream(
    tokenizer: Tokenizer, sampling: SamplingParams, ids: Sequence[int], cuts: Sequence[int], finish: FinishReason
) -> list[AnswerDelta]:
    """Pushes the ids in parts of the given lengths, the rest with the finish."""
    stream = AnswerStream(tokenizer, sampling)
    deltas = []
    for length in cuts:
        if length >= len(ids):
            break
        deltas.append(stream.push(ids[:length], None))
        ids = ids[length:]
    deltas.append(stream.push(ids, finish))
    assert stream.push([1, 2], finish) == AnswerDelta()
    return deltas


TEXTS = st.text("abE ND😀é", max_size=20)
STOPS = st.lists(st.text("abE ND😀é", min_size=1, max_size=4), max_size=3).map(tuple)


@PROPERTY
@given(
    text=TEXTS,
    stop=STOPS,
    cuts=st.lists(st.integers(0, 3), max_size=12),
    min_new_tokens=st.integers(0, 8),
    no_stop_trim=st.booleans(),
)
def test_any_cut_gives_what_the_whole_text_gives(
    tokenizer: Tokenizer, text: str, stop: tuple[str, ...], cuts: list[int], min_new_tokens: int, no_stop_trim: bool
) -> None:
    sampling = SamplingParams(stop=stop, min_new_tokens=min_new_tokens, no_stop_trim=no_stop_trim)
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected_text, num_tokens, matched = _reference(tokenizer, sampling, ids)
    deltas = _stream(tokenizer, sampling, ids, cuts, LENGTH)
    assert "".join(delta.text for delta in deltas) == expected_text
    assert [i for delta in deltas for i in delta.token_ids] == ids[:num_tokens]
    finish = [delta.finish for delta in deltas if delta.finish is not None]
    assert finish == [LENGTH if matched is None else FinishReason(FinishType.STOP, matched=matched)]
    # Nothing is shown that a stop string could still take back.
    shown = ""
    for delta in deltas:
        shown += delta.text
        assert expected_text.startswith(shown)


@PROPERTY
@given(data=st.data(), cuts=st.lists(st.integers(0, 3), max_size=8), skip=st.booleans())
def test_random_ids_without_stops_are_decoded_whole(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=12))
    sampling = SamplingParams(skip_special_tokens=skip)
    deltas = _stream(tokenizer, sampling, ids, cuts, LENGTH)
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(ids, skip_special_tokens=skip)
    assert [i for delta in deltas for i in delta.token_ids] == ids


@pytest.fixture(scope="module")
def byte_level(all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers["byte_level"]


def _letters(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each ASCII character."""
    return [tokenizer.token_id("Ġ" if char == " " else char) or 0 for char in text]


def test_holds_back_only_what_may_begin_a_stop_string(byte_level: Tokenizer) -> None:
    stream = AnswerStream(byte_level, SamplingParams(stop=("END",)))
    texts = [stream.push([i], None).text for i in _letters(byte_level, "aENEx")]
    assert texts == ["a", "", "", "EN", "Ex"]
    last = stream.push(_letters(byte_level, "yEN"), LENGTH)
    assert (last.text, last.finish) == ("yEN", LENGTH)


def test_the_string_that_is_complete_first_wins_then_the_longest(byte_level: Tokenizer) -> None:
    ids = _letters(byte_level, "xabcd")
    deltas = _stream(byte_level, SamplingParams(stop=("abcd", "bc")), ids, [], LENGTH)
    assert deltas == [AnswerDelta("xa", tuple(ids[:4]), FinishReason(FinishType.STOP, matched="bc"))]
    deltas = _stream(byte_level, SamplingParams(stop=("c", "bc", "abc")), ids, [], LENGTH)
    assert deltas == [AnswerDelta("x", tuple(ids[:4]), FinishReason(FinishType.STOP, matched="abc"))]


def test_a_stop_string_counts_from_the_token_with_number_min_new_tokens(byte_level: Tokenizer) -> None:
    ids = _letters(byte_level, "abab")
    for min_new_tokens, expected in {0: "", 2: "", 3: "ab", 4: "ab", 5: "abab"}.items():
        sampling = SamplingParams(stop=("ab",), min_new_tokens=min_new_tokens)
        assert "".join(delta.text for delta in _stream(byte_level, sampling, ids, [1], LENGTH)) == expected


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_the_stop_token_is_cut_off_unless_asked_for(byte_level: Tokenizer, stop: tuple[str, ...]) -> None:
    *_, last = ids = _letters(byte_level, "ab!")
    finish = FinishReason(FinishType.STOP, matched=last)
    for no_stop_trim, expected in {False: "ab", True: "ab!"}.items():
        sampling = SamplingParams(stop=stop, stop_token_ids=(last,), no_stop_trim=no_stop_trim)
        deltas = _stream(byte_level, sampling, ids, [1], finish)
        assert "".join(delta.text for delta in deltas) == expected
        assert deltas[-1].token_ids == tuple(ids[1:])
        assert deltas[-1].finish == finish
    eos = byte_level.eos_token_id
    assert eos is not None
    for skip, trim, expected in [(True, True, "a"), (False, True, "a"), (True, False, "a"), (False, False, "a</s>")]:
        sampling = SamplingParams(stop=stop, skip_special_tokens=skip, no_stop_trim=not trim)
        finish = FinishReason(FinishType.STOP, matched=eos)
        deltas = _stream(byte_level, sampling, [ids[0], eos], [], finish)
        assert deltas == [AnswerDelta(expected, (ids[0], eos), finish)]


def test_a_stop_string_before_the_stop_token_wins(byte_level: Tokenizer) -> None:
    ids = _letters(byte_level, "abEND!")
    finish = FinishReason(FinishType.STOP, matched=ids[-1])
    [delta] = _stream(byte_level, SamplingParams(stop=("END",)), ids, [], finish)
    assert delta == AnswerDelta("ab", tuple(ids[:5]), FinishReason(FinishType.STOP, matched="END"))


def test_a_finish_without_tokens_flushes(byte_level: Tokenizer) -> None:
    stream = AnswerStream(byte_level, SamplingParams(stop=("END",)))
    assert stream.push(_letters(byte_level, "xEN"), None).text == "x"
    abort = FinishReason(FinishType.ABORT)
    assert stream.push([], abort) == AnswerDelta("EN", (), abort)


def test_a_broken_character_at_the_end_is_shown(byte_level: Tokenizer) -> None:
    half = next(i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == b"\xf0")
    [delta] = _stream(byte_level, SamplingParams(stop=("END",)), [half], [], LENGTH)
    assert delta.text == "\ufffd"
