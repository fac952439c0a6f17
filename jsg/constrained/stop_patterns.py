"""Finds matches of regular expressions in a text that comes character by character, in time linear in the text.

The patterns become one position automaton, and it is followed from every character of the text at once. Where several
matches have come to the same position, only the one that began first is kept: it would be the longest, and the others
could not end elsewhere. So there are never more of them than positions, whatever the pattern is. The text must be held
back as far as the oldest of them reaches.

    pattern a+b, text x a a       positions: a (again), b        both began at the first a: two characters are held
"""

import functools
from collections.abc import Callable, Sequence
from typing import final

from jsg.constrained.text_patterns import PatternAutomaton, PatternSet, PatternTables, pattern_tables
from jsg.types import SamplingParams

MAX_AUTOMATA = 32
"""Automata that are kept for later requests."""
_ANYWHERE, _AT_START = range(2)  # the fields `starts` of tables


def pattern_set(sampling: SamplingParams) -> PatternSet | None:
    """The stop patterns of these parameters; None where they have none."""
    return PatternSet("stop_regex", sampling.stop_regex) if sampling.stop_regex else None


def stop_patterns(sampling: SamplingParams) -> "Callable[[], StopPatternFinder] | None":
    """Compiles the stop patterns in this process.

    Returns:
        A function that makes a finder for each answer with these parameters; None where they have no patterns.

    Raises:
        GrammarError: A pattern is wrong, not supported, too large, or matches the empty text.
    """
    given = pattern_set(sampling)
    return None if given is None else finders(given.patterns, _compile(given))


def finders(patterns: Sequence[str], tables: PatternTables) -> "Callable[[], StopPatternFinder]":
    """A function that makes finders of patterns, with the tables of their set. Equal tables share their work."""
    automaton = _automaton(tables)
    return lambda: StopPatternFinder(patterns, automaton)


_compile = functools.lru_cache(maxsize=MAX_AUTOMATA)(pattern_tables)


@functools.lru_cache(maxsize=MAX_AUTOMATA)
def _automaton(tables: PatternTables) -> PatternAutomaton:
    return PatternAutomaton(tables, _ANYWHERE)


@final
class StopPatternFinder:
    """Finds matches in one answer; a `jsg.processing.stop_strings.StopFinder`.

    Invariant: `_starts` has for each position of the state where its way began, and never descends.
    """

    len_after = 0

    def __init__(self, patterns: Sequence[str], automaton: PatternAutomaton) -> None:
        self.pattern: str | None = None
        self._patterns = patterns
        self._automaton = automaton
        self._state = automaton.start(_AT_START)
        self._starts = [0] * len(self._state.positions)
        self._num_chars = 0

    @property
    def held_len(self) -> int:
        """Characters at the end of the text that may be the beginning of a match."""
        return self._num_chars - self._starts[0] if self._starts else 0

    def advance(self, char: str) -> int:
        """Takes one character; the length of the longest match that ends with it, 0 for none."""
        positions, starts, found = self._state.positions, self._starts, 0
        self._state, sources, ending = self._automaton.move(self._state, char)
        self._num_chars += 1
        if ending is not None:
            self.pattern = self._patterns[self._automaton.pattern_of(positions[ending])]
            found = self._num_chars - starts[ending]
        self._starts = [self._num_chars if index < 0 else starts[index] for index in sources]
        return found

    def finish(self) -> int:
        """Ends the text; no match is found late."""
        return 0
