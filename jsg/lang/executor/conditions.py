"""Conditions of `cond` and `loop`: whether they hold."""

import functools
from collections.abc import Callable, Iterator
from typing import assert_never

from jsg.errors import GrammarError, RequestError
from jsg.lang.graphs.nodes import AllOf, AnyOf, Condition, Contains, Equals, Matches, Not, TextValue, parts
from jsg.types import GrammarSpec

MAX_MATCHED_BYTES = 100_000


def holds(condition: Condition, text_of: Callable[[TextValue], str]) -> bool:
    """Says whether a condition holds.

    Args:
        condition: The condition.
        text_of: Gives the text of a value that the condition reads.

    Raises:
        RequestError: A pattern is refused, or its match exceeds a limit.
    """
    match condition:
        case Equals(value, text):
            return text_of(value).strip() == text_of(text).strip()
        case Contains(value, text):
            return text_of(text) in text_of(value)
        case Matches(value, pattern):
            return _matches(text_of(value), pattern)
        case Not(inner):
            return not holds(inner, text_of)
        case AllOf(conditions):
            return all(holds(inner, text_of) for inner in conditions)
        case AnyOf(conditions):
            return any(holds(inner, text_of) for inner in conditions)
        case _:
            assert_never(condition)


def texts_of(condition: Condition) -> Iterator[TextValue]:
    """Gives all texts that a condition reads."""
    return (part for part in parts(condition) if isinstance(part, TextValue))


def patterns_of(condition: Condition | None) -> Iterator[str]:
    """Gives all patterns in a condition."""
    return (part.pattern for part in parts(condition) if isinstance(part, Matches))


def check_pattern(pattern: str) -> None:
    """Compiles a pattern. Raises RequestError where it is refused."""
    _tables(pattern)


def _matches(text: str, pattern: str) -> bool:
    # The automata of constrained decoding take time linear in the text, and read the dialect of gen(regex=...).
    from jsg.constrained.report import check_text
    from jsg.constrained.run.machine import Machine

    data = text.encode()
    if len(data) > MAX_MATCHED_BYTES:
        raise RequestError(
            f"matches() reads {MAX_MATCHED_BYTES} bytes at most, but the text has {len(data)}; use contains()"
        )
    report = check_text(Machine(_tables(pattern)), data)
    if report.num_readings_dropped and not report.is_match:
        raise RequestError(f"the pattern {pattern!r} is too ambiguous to be matched; simplify it")
    return report.is_match


@functools.lru_cache(maxsize=64)
def _tables(pattern: str):  # noqa: ANN202 - its type is imported below only
    from jsg.constrained.compiler import compile_tables

    try:
        return compile_tables(GrammarSpec("regex", pattern))
    except GrammarError as error:
        raise RequestError(f"the pattern {pattern[:100]!r} of matches() is refused: {error}") from None
