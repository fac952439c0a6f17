"""Stop patterns against Python's `re` at every character, and against `regex` for partial matches."""

import gc
import random
import re
import tracemalloc

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.constrained import stop_patterns as module
from jsg.constrained import text_patterns
from jsg.constrained.stop_patterns import stop_patterns
from jsg.constrained.text_patterns import MAX_POSITIONS, PatternAutomaton
from jsg.errors import RequestError
from jsg.parameters import MAX_STOP_PATTERN_CHARS, MAX_STOP_PATTERNS
from jsg.types import SamplingParams
from tests.constrained.work import work

ATOMS = st.sampled_from(["a", "b", "ab", "[ab]", "[^a]", ".", r"\d", "é", "(?:a|bb)", "(?:ab|c)"])
COUNTS = st.sampled_from(["", "", "+", "*", "?", "{2}", "{1,3}", "*?"])
PATTERN = st.lists(st.tuples(ATOMS, COUNTS).map("".join), min_size=1, max_size=4).map("".join)
PATTERNS = st.lists(st.one_of(PATTERN, PATTERN.map("^{}".format)), min_size=1, max_size=3).map(tuple)
TEXT = st.text("abc1é\n", max_size=16)


def finder_of(*patterns: str) -> module.StopPatternFinder:
    make = stop_patterns(SamplingParams(stop_regex=patterns))
    assert make is not None
    return make()


def starts_of(pattern: str, end: int) -> range:
    return range(0, 1) if pattern.startswith("^") else range(end)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(patterns=PATTERNS, text=TEXT)
def test_state_equals_brute_force_after_every_character(patterns: tuple[str, ...], text: str) -> None:
    patterns = tuple(p for p in patterns if not re.fullmatch(p, ""))  # which are refused
    if not patterns:
        return
    finder = finder_of(*patterns)
    for end, char in enumerate(text, start=1):
        seen = text[:end]
        begins = [(p, s) for p in patterns for s in starts_of(p, end)]
        found = [end - start for p, start in begins if re.fullmatch(p, seen[start:])]
        partial = [end - start for p, start in begins if begins_longer(p, seen[start:])]
        assert finder.advance(char) == max(found, default=0) and finder.held_len == max(partial, default=0)
    assert finder.finish() == 0


def begins_longer(pattern: str, text: str) -> bool:
    """Whether a match of the pattern goes on behind this text."""
    return any(regex.fullmatch(pattern, text + char, partial=True) for char in "abc1é\nx")


def test_the_match_that_is_complete_first_counts_and_of_those_the_longest() -> None:
    finder = finder_of("b", "ab", "abc")
    assert [finder.advance(char) for char in "xab"] == [0, 0, 2]
    finder = finder_of(r"\n+#", r"\d+")
    assert [finder.advance(char) for char in "a\n\n\n#"] == [0, 0, 0, 0, 4]


def test_a_pattern_may_be_bound_to_the_beginning_of_the_answer() -> None:
    finder = finder_of("^ab")
    assert [finder.advance(char) for char in "ab"] == [0, 2]
    finder = finder_of("^ab")
    assert [finder.advance(char) for char in "xab"] == [0, 0, 0] and finder.held_len == 0


def test_the_end_of_the_text_so_far_is_where_every_match_ends() -> None:
    finder = finder_of(r"[.!]\s*$", "^ab$")
    assert [finder.advance(char) for char in "ab!"] == [0, 2, 1]


def test_it_names_the_first_pattern_that_the_match_has() -> None:
    finder = finder_of("c+", "b|bb", "^(?:a|b)+", "b+")
    found = {}
    for char in "cbb":
        finder.advance(char)
        found[char] = finder.pattern
    assert found == {"c": "c+", "b": "b|bb"}
    finder = finder_of("c+", "^(?:a|b)+", "b+")
    assert finder.advance("a") == 1 and finder.pattern == "^(?:a|b)+"


def test_finders_of_the_same_patterns_do_not_meet() -> None:
    make = stop_patterns(SamplingParams(stop_regex="aab"))
    assert make is not None
    first, second = make(), make()
    assert [first.advance(char) for char in "aa"] == [0, 0]
    assert second.advance("b") == 0
    assert first.advance("b") == 3


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("a*", "empty text"),
        ("a|", "empty text"),
        ("^", "empty text"),
        ("a*$", "empty text"),
        ("a$b", "no text at all"),
        ("a(b", "not closed"),
        (r"(a)\1", "back-references"),
        (r"\bend", "word boundaries"),
        ("(?=a)b", "not supported"),
        (r"[^\s\S]", "no text at all"),
        ("a{600}", f"at most {MAX_POSITIONS['stop_regex']}"),
        ("(?:a?b?c?d?){60}e", "at most"),
        ("x" * 200 + "[ab]{400}", "at most"),
    ],
)
def test_what_cannot_be_found_is_refused_by_name(pattern: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as refused:
        stop_patterns(SamplingParams(stop_regex=("fine", pattern)))
    assert refused.value.param == "stop_regex"


def test_without_patterns_there_is_no_finder() -> None:
    assert stop_patterns(SamplingParams()) is None


def test_number_and_length_of_patterns_are_bounded() -> None:
    with pytest.raises(RequestError, match=f"at most {MAX_STOP_PATTERNS}"):
        SamplingParams(stop_regex=("a",) * (MAX_STOP_PATTERNS + 1))
    for wrong in ("", "a" * (MAX_STOP_PATTERN_CHARS + 1), 5):
        with pytest.raises(RequestError, match="patterns of 1 to"):
            SamplingParams(stop_regex=(wrong,))  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="a list"):
        SamplingParams(stop_regex=5)  # pyright: ignore[reportArgumentType]


def test_what_is_kept_is_bounded_and_forgetting_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    patterns = ("a[ab]{12}y", "xaay")  # the first has a state for each of 2^12 ends of a text
    text = "".join(chr(0x4E00 + i % 300) + "".join(rng.choices("ab", k=40)) for i in range(100)) + "abbbbbbbbbbbby"

    def automaton() -> PatternAutomaton:
        return finder_of(*patterns)._automaton

    def lengths() -> list[int]:
        module._automaton.cache_clear()
        finder = finder_of(*patterns)
        return [finder.advance(char) for char in text]

    free = lengths()
    assert (free[-1], len(automaton()._states) > 200) == (14, True)
    monkeypatch.setattr(text_patterns, "MAX_BYTES", 20_000)
    assert lengths() == free
    assert len(automaton()._states) <= 50 and len(automaton()._class_of) <= 66


def test_s4_what_all_answers_keep_is_bounded_in_bytes() -> None:
    """Many positions at once make moves of many kilobytes."""
    rng = random.Random(0)
    letters = "abcdefgh"
    module._automaton.cache_clear()
    finders = [finder_of("(?:a|bb|ccc|dddd)[a-h]{480}x") for _ in range(4)]
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(600):
            for finder in finders:
                finder.advance(rng.choice(letters))
        # What other threads allocate meanwhile is none of this.
        ours = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, text_patterns.__file__)])
        kept = sum(part.size for part in ours.statistics("filename"))
    finally:
        tracemalloc.stop()
    assert kept < 1.5 * 2**20 + len(finders) * 2**16


def test_s4_few_automata_are_kept() -> None:
    for number in range(100):
        finder_of(f"a{number}")
    assert module._automaton.cache_info().currsize == module.MAX_AUTOMATA <= 32


def test_time_is_linear_where_backtracking_never_ends() -> None:
    """(a|aa)+$-like patterns take a backtracking engine 2^n steps: here n characters are n moves."""
    finder = finder_of("(?:a|aa)+(?:a|aa)+b", "(?:a+){20}c")

    def read(text: str) -> None:
        for char in text:
            assert finder.advance(char) == 0

    begun, rest = (work(lambda count=count: read("a" * count)) for count in (200, 2_000))
    assert rest < 12 * begun
    assert finder.held_len == 2_200 and finder.advance("b") == 2_201
