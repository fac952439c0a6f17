"""The dialects of tool calls: what a chat template writes, a parser reads again, in any pieces; and what is no call."""

import random
from collections.abc import Sequence

import pytest

from jsg.constrained.call_styles import ArgumentTypes
from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.speech.answers.tool_calls import MAX_HELD_LEN, ParsedAnswer, ToolCallParser, nameable_tokens
from jsg.speech.dialects import DIALECTS
from tests.server.byte_tokenizer import write_byte_tokenizer
from tests.speech.dialects import NAMES, PARAMETERS, Calls, random_calls, same_json, written
from tests.speech.parsed import join_deltas

TYPES = ArgumentTypes.read(PARAMETERS)

each_dialect = pytest.mark.parametrize("dialect", list(DIALECTS))


def parser_of(dialect: str) -> ToolCallParser:
    return ToolCallParser(DIALECTS[dialect], NAMES, "call{}".format, types=dict.fromkeys(NAMES, TYPES))


def parse(dialect: str, pieces: list[str]) -> ParsedAnswer:
    parser = parser_of(dialect)
    deltas = [delta for piece in pieces for delta in parser.push(piece)]
    return join_deltas([*deltas, *parser.finish()])


def assert_calls(answer: ParsedAnswer, calls: Calls, content: str | None) -> None:
    assert [call.name for call in answer.calls] == [name for name, _ in calls]
    assert all(same_json(call.arguments, expected) for call, (_, expected) in zip(answer.calls, calls, strict=True))
    assert (answer.content or "").strip() == (content or "")


def check_round_trips(dialect: str, tokenizers: Sequence[Tokenizer], seed: int, count: int) -> None:
    """Random calls: template → text → tokens → text in pieces → calls."""
    random_ = random.Random(seed)
    calls = random_calls(dialect, seed, count)
    num_texts = 0
    while calls:
        num = random_.choice((1, 1, 2, 3))
        part, calls = calls[:num], calls[num:]
        content = random_.choice(("", "", "Let me see: a < b, [x] {y}."))
        text = written(dialect, part, content)
        whole = parse(dialect, [text])
        assert_calls(whole, part, content)
        for tokenizer in tokenizers:
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
            by_tokens = [detokenizer.push((id,)) for id in tokenizer.encode(text, add_special_tokens=False)]
            assert "".join(by_tokens) == text
            assert parse(dialect, by_tokens) == whole
        assert parse(dialect, list(text)) == whole
        num_texts += 1
        for cut in cuts(dialect, text, are_all=num_texts < 3):
            assert parse(dialect, [text[:cut], text[cut:]]) == whole


def cuts(dialect: str, text: str, *, are_all: bool) -> list[int]:
    """The beginning and the end of every marker of a text, and with `are_all` every boundary in it."""
    found: set[int] = set()
    for mark in DIALECTS[dialect].markers:
        start = text.find(mark)
        while start >= 0:
            end = start + len(mark)
            found.update(range(start, end + 1) if are_all else (start, end))
            start = text.find(mark, start + 1)
    return sorted(found)


@pytest.fixture(scope="module")
def special_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Dialect → a tokenizer of bytes in which its markers are special tokens."""
    found = {}
    for name, dialect in DIALECTS.items():
        directory = tmp_path_factory.mktemp(name)
        write_byte_tokenizer(directory, None, ["<|im_start|>", "<|im_end|>", "<s>", *dialect.markers])
        found[name] = load_tokenizer(directory)
    return found


@each_dialect
def test_round_trips(
    dialect: str, special_tokenizers: dict[str, Tokenizer], all_tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizers = special_tokenizers[dialect], all_tokenizers["byte_level"]
    check_round_trips(dialect, tokenizers, seed=1, count=20)


@pytest.mark.slow
@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.long)])
@each_dialect
def test_many_round_trips(
    dialect: str, count: int, special_tokenizers: dict[str, Tokenizer], all_tokenizers: dict[str, Tokenizer]
) -> None:
    tokenizers = special_tokenizers[dialect], all_tokenizers["byte_level"]
    check_round_trips(dialect, tokenizers, seed=count, count=count)


def test_special_tokens_that_a_grammar_may_name(special_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = special_tokenizers["harmony"]
    call, size = tokenizer.token_id("<|call|>"), 1000
    assert call is not None
    assert set(nameable_tokens(tokenizer, size, [call]).values()) == set(DIALECTS["harmony"].markers) - {"<|call|>"}


@each_dialect
def test_little_is_held_back_of_prose_that_looks_like_a_call(dialect: str) -> None:
    """Whatever an answer writes that begins like a call, at most `MAX_HELD_LEN` characters wait for what follows."""
    single = written(dialect, [("f", {"a": "b"})])
    beginnings = [single[:end] for end in range(1, single.index("b"))]
    for beginning in beginnings[:: len(beginnings) // 4 or 1]:
        for filler in ("words ", " ", '{"a": "', DIALECTS[dialect].openings(NAMES)[-1]):
            parser = parser_of(dialect)
            for char in beginning + filler * (MAX_HELD_LEN // len(filler) + 1):
                parser.push(char)
                assert parser.held_len <= MAX_HELD_LEN


@each_dialect
def test_broken_calls_leak_no_marker(dialect: str) -> None:
    """A call is broken at any place, by other text or by a call that begins anew; the text behind it has no marker.

    Whole or character by character, such a text is the same answer.
    """
    single = written(dialect, [("f", {"a": [1, "b"]})])
    for cut in range(len(single) + 1):
        text = single + single[:cut] + ("", "x", "] and")[cut % 3] + single
        answer = parse(dialect, [text])
        assert parse(dialect, list(text)) == answer
        assert answer.calls[0].name == "f"
        assert not any(mark in (answer.content or "") for mark in DIALECTS[dialect].markers), single[:cut]


@each_dialect
def test_an_answer_that_is_cut_short_shows_no_part_of_a_call(dialect):
    """Wherever it is cut. Only what may still be prose, because no mark is complete, stands in the text."""
    content = "" if dialect == "harmony" else "Hi."
    openings = DIALECTS[dialect].openings(sorted(NAMES))
    text = written(
        dialect, [(NAMES[0], {"s0": "Bern"}), (NAMES[1], {"v0": [1]})][: 1 if dialect == "harmony" else 2], content
    )
    for cut in range(len(text)):
        parser = parser_of(dialect)
        found = join_deltas([*parser.push(text[:cut]), *parser.finish(is_cut=True)])
        rest = (found.content or "").removeprefix(content).strip()
        assert (
            content.startswith(found.content or "")
            or not rest
            or (not found.calls and any(opening.startswith(rest) for opening in openings))
        ), text[:cut]


def test_words_of_an_answer_of_gpt_oss_open_no_call():
    said = "Write to=functions.f here."
    rows = f"<|channel|>final<|message|>{said}<|end|><|start|>assistant<|channel|>final<|message|> More"
    assert parse("harmony", [rows]).content == parse("harmony", list(rows)).content == f"{said} More"
    header = f"<|channel|>commentary to=functions.{NAMES[0]} json<|message|>"
    assert parse("harmony", [header]) == ParsedAnswer("", ())
