"""Finds matches of regular expressions in a text that comes character by character, in time linear in the text.

The patterns become one position automaton, and it is followed from every character of the text at once. Where several
matches have come to the same position, only the one that began first is kept: it would be the longest, and the others
could not end elsewhere. So there are never more of them than positions, whatever the pattern is. The text must be held
back as far as the oldest of them reaches.

    pattern a+b, text x a a       positions: a (again), b        both began at the first a: two characters are held
"""

import functools
from collections.abc import Callable
from typing import final

from jsg.constrained.chars import charset
from jsg.constrained.chars.char_nfa import Nfa, char_nfa
from jsg.constrained.ir import Alt, Expr
from jsg.constrained.limits import Limits
from jsg.errors import GrammarError, RequestError
from jsg.types import SamplingParams

PARAM = "stop_regex"
MAX_POSITIONS = 512
"""Positions of all patterns of a request together. They bound what a character of the text costs."""
MAX_TRANSITIONS = 4096
MAX_AUTOMATA = 32
"""Automata that are kept for later requests."""
MAX_BYTES = 2**20
"""About how much an automaton remembers of its work; beyond it, it forgets everything."""
_STATE_BYTES = 400  # an empty one, its places in two dicts included
_MOVE_BYTES = 300
_POSITION_BYTES = 8
_INDEX_BYTES = 40  # a place in a tuple, and an integer that is none of the small ones
_CHARACTER_BYTES = 300
_LIMITS = Limits(char_states=MAX_POSITIONS)


def stop_patterns(sampling: SamplingParams) -> "Callable[[], StopPatternFinder] | None":
    """A function that makes a finder for each answer with these parameters; None where they have no patterns.

    Raises:
        RequestError: A pattern is wrong, not supported, too large, or matches the empty text.
    """
    return _compile(sampling.stop_regex).finder if sampling.stop_regex else None


def warm_patterns() -> None:
    """Loads the parser and makes the large classes of characters, which takes a third of a second once in a process."""
    stop_patterns(SamplingParams(stop_regex=(r"\d\w\s\p{L}", "(?i:a)")))


@functools.lru_cache(maxsize=MAX_AUTOMATA)
def _compile(patterns: tuple[str, ...]) -> "_Automaton":
    anywhere: list[Expr] = []
    at_start: list[Expr] = []
    for pattern in patterns:
        try:
            found = _parts(pattern)
        except GrammarError as error:
            raise RequestError(f"the stop pattern {pattern[:100]!r} is refused: {error}", param=PARAM) from None
        anywhere += found[0]
        at_start += found[1]
    try:
        return _Automaton(char_nfa(Alt(tuple(anywhere)), _LIMITS, also=Alt(tuple(at_start))))
    except GrammarError as error:
        raise RequestError(f"the stop patterns are refused: {error}", param=PARAM) from None


def _parts(pattern: str) -> tuple[list[Expr], list[Expr]]:
    """The parts of a pattern that may begin anywhere, and those that only begin where the answer begins."""
    from jsg.constrained.regex.parse import parse_piece

    plain, starts, ends, spans = parse_piece(pattern).parts
    if ends is not None or spans is not None:
        raise GrammarError("the end of an answer ($) is not known while it grows; leave it out")
    given = [part for part in (plain, starts) if part is not None]
    if not given:
        raise GrammarError("it matches no text at all; correct it")
    if any(part.is_nullable for part in given):
        raise GrammarError("it matches the empty text, so it would end every answer at once; correct it")
    return [] if plain is None else [plain.expr], [] if starts is None else [starts.expr]


class _State:
    """Positions at which the next character may stand. Those of matches that began earlier come first.

    Attributes:
        moves: For each class of characters three things: the next state; for each position of it, the index of the
            position that it is reached from, -1 where a match begins; and the index of the position from which the
            longest match ends, None where no match ends. A class is a bit for each set that has the character.
    """

    __slots__ = ("moves", "positions")

    def __init__(self, positions: tuple[int, ...]):
        self.positions = positions
        self.moves: dict[int, tuple[_State, tuple[int, ...], int | None]] = {}


@final
class _Automaton:
    """The automaton of some patterns, which all answers with them share. It keeps what it worked out, up to a bound."""

    def __init__(self, nfa: Nfa):
        """`nfa` is that of the patterns that may begin anywhere, and of those that only begin where an answer does."""
        self._sets, self._label, self._end = nfa.sets, nfa.label, nfa.end
        self._follow = [tuple(sorted(follow)) for follow in nfa.follow]
        num_transitions = sum(map(len, self._follow))
        if num_transitions > MAX_TRANSITIONS:
            raise RequestError(
                f"stop_regex may have at most {MAX_TRANSITIONS} pairs of characters that may follow each other, "
                f"repeated ones counted as often as they may stand there, but has {num_transitions}; simplify the "
                "patterns",
                param=PARAM,
            )
        self._begin = tuple(sorted(nfa.start))
        first = self._begin + tuple(sorted(nfa.also_start))
        self._states: dict[tuple[int, ...], _State] = {}
        self._with_moves: list[_State] = []  # also states that were forgotten while finders are in them
        self._class_of: dict[str, int] = {}
        self._num_bytes = 0
        self.first = self._state(first)

    def finder(self) -> "StopPatternFinder":
        """A finder that has read nothing yet."""
        return StopPatternFinder(self)

    def move(self, state: _State, char: str) -> tuple[_State, tuple[int, ...], int | None]:
        """The move that a character makes; see `_State.moves`."""
        char_class = self._class_of.get(char)
        if char_class is None:
            char_class = self._classify(char)
        move = state.moves.get(char_class)
        if move is None:
            move = self._make_move(state, char_class)
        return move

    def _classify(self, char: str) -> int:
        self._make_room(_CHARACTER_BYTES + len(self._sets) // 8)
        of_sets = (1 << index for index, ranges in enumerate(self._sets) if charset.contains(ranges, char))
        char_class = self._class_of[char] = sum(of_sets)
        return char_class

    def _make_move(self, state: _State, char_class: int) -> tuple[_State, tuple[int, ...], int | None]:
        reached: dict[int, int] = {}
        ending: int | None = None
        for index, position in enumerate(state.positions):
            if not char_class >> self._label[position] & 1:
                continue
            for following in self._follow[position]:
                if following != self._end:
                    reached.setdefault(following, index)
                elif ending is None:
                    ending = index
        for position in self._begin:
            reached.setdefault(position, -1)
        self._make_room(_MOVE_BYTES + _INDEX_BYTES * len(reached))
        if not state.moves:
            self._with_moves.append(state)
        move = state.moves[char_class] = self._state(tuple(reached)), tuple(reached.values()), ending
        return move

    def _state(self, positions: tuple[int, ...]) -> _State:
        state = self._states.get(positions)
        if state is None:
            self._num_bytes += _STATE_BYTES + _POSITION_BYTES * len(positions)
            state = self._states[positions] = _State(positions)
        return state

    def _make_room(self, num_bytes: int) -> None:
        """Counts memory that is going to be kept, and forgets everything else where that would be too much."""
        if self._num_bytes + num_bytes > MAX_BYTES:
            self._states.clear()  # finders keep the states they are in
            for state in self._with_moves:
                state.moves.clear()
            self._with_moves.clear()
            self._class_of.clear()
            self._num_bytes = 0
        self._num_bytes += num_bytes


@final
class StopPatternFinder:
    """Finds matches in one answer; a `jsg.processing.stop_strings.StopFinder`.

    Invariant: `_starts` has for each position of the state where its way began, and never descends.
    """

    behind_len = 0

    def __init__(self, automaton: _Automaton) -> None:
        self._automaton = automaton
        self._state = automaton.first
        self._starts = [0] * len(automaton.first.positions)
        self._num_chars = 0

    @property
    def held_len(self) -> int:
        """Characters at the end of the text that may be the beginning of a match."""
        return self._num_chars - self._starts[0] if self._starts else 0

    def advance(self, char: str) -> int:
        """Takes one character; the length of the longest match that ends with it, 0 for none."""
        self._state, sources, ending = self._automaton.move(self._state, char)
        starts = self._starts
        self._num_chars += 1
        found = 0 if ending is None else self._num_chars - starts[ending]
        self._starts = [self._num_chars if index < 0 else starts[index] for index in sources]
        return found

    def finish(self) -> int:
        """Ends the text; no match is found late."""
        return 0
