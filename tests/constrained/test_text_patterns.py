"""Patterns that plain Python reads, against `re`: what they match, what they cost, and what is refused."""

import random
import re
import string
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.constrained import text_patterns
from jsg.constrained.text_patterns import PatternSet, TextPatterns, pattern_tables
from jsg.errors import GrammarError
from tests.constrained.work import work

ATOMS = st.sampled_from(["a", "b", "ab", "[ab]", "[^a]", ".", r"\d", "é", "(?:a|bb)", "(?:ab|c)", "(?:a?b?)"])
COUNTS = st.sampled_from(["", "", "+", "*", "?", "{2}", "{1,3}", "{0}"])
PATTERN = st.lists(st.tuples(ATOMS, COUNTS).map("".join), max_size=4).map("".join)
TEXT = st.text("abc1é\n", max_size=9)
CYCLES = [string.ascii_letters[i:] + string.ascii_letters[:i] for i in range(16)]


def compiled(*patterns: str) -> TextPatterns:
    return TextPatterns(patterns, pattern_tables(PatternSet("matches", patterns)))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(patterns=st.lists(PATTERN, min_size=1, max_size=3, unique=True).map(tuple), texts=st.lists(TEXT, max_size=4))
def test_each_pattern_of_a_set_matches_what_it_matches_alone(patterns: tuple[str, ...], texts: list[str]) -> None:
    made = compiled(*patterns)
    for pattern in patterns:
        for text in texts:
            assert made.reader(pattern, text).read() is (re.fullmatch(pattern, text) is not None)


def test_a_text_is_read_in_parts_of_bounded_work() -> None:
    """The pattern is one that would take a backtracking engine 2^n steps, and has 2^n states."""
    pattern, text = "(?:.{0,60}|x.{0,60}abc)*.*a.{60}", "".join(random.Random(0).choices("abcx", k=2000))
    reader, num_parts = compiled(pattern).reader(pattern, text), 0
    while (found := reader.read(1000)) is None:
        num_parts += 1
    assert found is (re.fullmatch(".*a.{60}", text) is not None)
    assert num_parts > 20 and reader.num_steps < (num_parts + 1) * 5000


def test_one_character_of_a_text_is_read_in_parts_too() -> None:
    pattern = f"({'.?' * 150}a?){{2}}"  # where almost each position may follow each, and a character is at most of them
    reader, num_parts, steps = compiled(pattern).reader(pattern, "aab"), 0, 0
    while (found := reader.read(2000)) is None:
        num_parts += 1
        assert reader.num_steps - steps < 6000
        steps = reader.num_steps
    assert found is True and num_parts > 20


def test_work_is_linear_in_the_text_and_ends_where_nothing_can_match() -> None:
    made = compiled("(a|aa)+b", "(a*)*")
    short, long = (work(lambda n=n: made.reader("(a|aa)+b", "a" * n).read()) for n in (300, 3000))
    assert long < 12 * short
    reader = made.reader("(a*)*", "b" * 100_000)
    assert reader.read() is False and reader.num_steps < 100
    assert made.reader("(a*)*", "").read() is True


def test_the_memory_of_an_automaton_is_bounded_and_forgetting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = ".*a.{60}"
    text = "".join(random.Random(0).choices("abc\u4e00\u4e01", k=1000))
    monkeypatch.setattr(text_patterns, "MAX_BYTES", 2**16)
    reader = compiled(pattern).reader(pattern, text)
    tracemalloc.start()
    try:
        found = reader.read()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2**17
    assert found is (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    ("patterns", "index", "why"),
    [
        (("fine", "(a"), 1, "not closed"),
        ((r"\bword",), 0, "word boundaries"),
        ((r"a[^\s\S]",), 0, "no text at all"),
        (("a{4000}", "b{4000}", "c{4000}"), 2, "at most 8192 states"),
        (tuple(f"({'?'.join(cycle)}?){{2}}" for cycle in CYCLES), 12, "at most 65536 pairs of characters"),
        (("fine", "".join(rf"[^\W{chr(0x400 + i)}]" for i in range(30))), 1, "at most 16384 ranges"),
        (("(" * 300 + "a" + ")" * 300,), 0, "levels of nesting"),
    ],
)
def test_what_is_refused_is_named_and_limits_hold_for_the_whole_set(patterns, index, why) -> None:
    with pytest.raises(GrammarError, match=why) as refused:
        pattern_tables(PatternSet("matches", patterns))
    assert str(refused.value).startswith(f"the pattern {patterns[index][:100]!r} of matches() is refused: ")
    assert refused.value.param == patterns[index]


def test_sets_differ_by_their_use_and_by_each_pattern() -> None:
    sets = [PatternSet("matches", ("a", "b")), PatternSet("matches", ('a", "b',)), PatternSet("stop_regex", ("a", "b"))]
    assert len({each.key for each in sets}) == 3
    assert PatternSet("matches", ("\ud800",)).key
