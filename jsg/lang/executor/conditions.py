"""Conditions of `cond` and `loop`: whether they hold."""

import functools
from collections.abc import Callable, Iterator
from typing import assert_never

from jsg.constrained.text_patterns import PatternSet, TextPatterns, TextReader, pattern_tables
from jsg.errors import RequestError
from jsg.lang.graphs.nodes import AllOf, AnyOf, Condition, Contains, Equals, Matches, Not, TextValue, parts

MAX_MATCHED_BYTES = 100_000


def holds(
    condition: Condition, text_of: Callable[[TextValue], str], matches: Callable[[str, str], bool] | None = None
) -> bool:
    """Says whether a condition holds.

    Args:
        condition: The condition.
        text_of: Gives the text of a value that the condition reads.
        matches: Says whether all of a text, the first argument, matches a pattern. None compiles the pattern here.

    Raises:
        RequestError: A pattern is refused, or a text is too long for it.
    """
    match condition:
        case Equals(value, text):
            return text_of(value).strip() == text_of(text).strip()
        case Contains(value, text):
            return text_of(text) in text_of(value)
        case Matches(value, pattern):
            return (matches or _matches)(text_of(value), pattern)
        case Not(inner):
            return not holds(inner, text_of, matches)
        case AllOf(conditions):
            return all(holds(inner, text_of, matches) for inner in conditions)
        case AnyOf(conditions):
            return any(holds(inner, text_of, matches) for inner in conditions)
        case _:
            assert_never(condition)


def texts_of(condition: Condition) -> Iterator[TextValue]:
    """Gives all texts that a condition reads."""
    return (part for part in parts(condition) if isinstance(part, TextValue))


def matches_of(condition: Condition | None) -> Iterator[Matches]:
    """Gives all conditions in a condition that have a pattern."""
    return (part for part in parts(condition) if isinstance(part, Matches))


def reader_of(text: str, pattern: str, patterns: TextPatterns | None = None) -> TextReader:
    """Gives a reader of a text with a pattern, which is one of `patterns`. None compiles it here, which may take long.

    Raises:
        RequestError: The pattern is refused, or the text is too long.
    """
    num_bytes = len(text.encode())
    if num_bytes > MAX_MATCHED_BYTES:
        raise RequestError(
            f"matches() reads {MAX_MATCHED_BYTES} bytes at most, but the text has {num_bytes}; use contains()"
        )
    return (patterns or _compiled(pattern)).reader(pattern, text)


def _matches(text: str, pattern: str) -> bool:
    return reader_of(text, pattern).read() is True


@functools.lru_cache(maxsize=32)
def _compiled(pattern: str) -> TextPatterns:
    return TextPatterns((pattern,), pattern_tables(PatternSet("matches", (pattern,))))
