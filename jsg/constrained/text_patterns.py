"""Regular expressions that read text in plain Python: those of `stop_regex`, and those of the conditions of programs.

    PatternSet ──pattern_tables──▶ PatternTables ──PatternAutomaton──▶ states, made when a text first needs them
                 costs much: a process that can be killed     costs little: the front and users' processes

Only the tables depend on how large the patterns are once their repeats are written out, so limits bound them, for all
patterns of a set together. No numba is needed, which would cost the front hundreds of megabytes.
"""

import hashlib
import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from typing import Literal, NamedTuple, final

from jsg.constrained.chars.char_nfa import Nfa, NfaBuilder
from jsg.constrained.ir import NEVER, Expr
from jsg.constrained.limits import Limits, check
from jsg.errors import GrammarError

PatternUse = Literal["stop_regex", "matches"]

MAX_POSITIONS: dict[PatternUse, int] = {"stop_regex": 512, "matches": 8192}
"""Positions of all patterns of a set together."""
MAX_TRANSITIONS: dict[PatternUse, int] = {"stop_regex": 4096, "matches": 65_536}
"""Pairs of positions that may follow each other. They bound what a character of the text costs."""
MAX_RANGES = 16_384
"""Ranges of characters in the different sets of a set of patterns; a class such as \\w has less than a thousand."""
MAX_BYTES = 2**20
"""About how much an automaton remembers of its work; beyond it, it forgets everything."""
_STATE_BYTES = 400  # an empty one, its places in two dicts included
_MOVE_BYTES = 300
_INDEX_BYTES = 40  # a place in a tuple, and an integer that is none of the small ones
_CHARACTER_BYTES = 300
_PIECE = 200
"""Steps of one move before a pause."""


class PatternSet(NamedTuple):
    """Patterns that are compiled together.

    Attributes:
        kind: What they are for.
        patterns: The patterns, in Python's dialect.
    """

    kind: PatternUse
    patterns: tuple[str, ...]

    @property
    def key(self) -> str:
        """A digest. Equal sets have equal keys; no grammar has the key of a set."""
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()


class PatternTables(NamedTuple):
    """The position automaton of a set of patterns, as arrays of 32-bit integers in the order of bytes of the machine.

    Attributes:
        bounds: The sets of characters, one after the other: where each range begins, and the character after it.
        bounds_start: Where each set begins in `bounds`, and the end of the last.
        label: For each position its set. Position 0 is the end of a match.
        follow: The positions that may come next, of one position after those of the other.
        follow_start: Where those of each position begin in `follow`, and the end of the last.
        starts: For "stop_regex" the positions that a match may begin with anywhere, and those that it may only begin
            with where the text begins. For "matches" those of each pattern.
        pattern_end: For each pattern the position after its last one. The next pattern has the positions from there.
    """

    bounds: bytes
    bounds_start: bytes
    label: bytes
    follow: bytes
    follow_start: bytes
    starts: tuple[bytes, ...]
    pattern_end: bytes

    @staticmethod
    def of(nfa: Nfa, starts: Sequence[Iterable[int]], pattern_end: Iterable[int]) -> "PatternTables":
        """The tables of an automaton; `starts` and `pattern_end` are the fields of these names."""
        bounds = [[bound for low, high in ranges for bound in (low, high + 1)] for ranges in nfa.sets]
        follow = [sorted(following) for following in nfa.follow]
        all_starts = tuple(_bytes(sorted(start)) for start in starts)
        return PatternTables(*_joined(bounds), _bytes(nfa.label), *_joined(follow), all_starts, _bytes(pattern_end))


def _joined(lists: Sequence[Sequence[int]]) -> tuple[bytes, bytes]:
    ends = [0]
    for items in lists:
        ends.append(ends[-1] + len(items))
    return _bytes([item for items in lists for item in items]), _bytes(ends)


def _bytes(numbers: Iterable[int]) -> bytes:
    return array("I", numbers).tobytes()


def _numbers(data: bytes) -> "memoryview[int]":
    return memoryview(data).cast("I")


# Compiling


def pattern_tables(given: PatternSet) -> PatternTables:
    """Compiles patterns.

    Raises:
        GrammarError: A pattern is wrong, not supported, or too large with those before it. The message quotes it, and
            `param` is the pattern itself if the kind is "matches".
    """
    limits = Limits(char_states=MAX_POSITIONS[given.kind])
    builder = NfaBuilder(limits)
    roles: list[int] = []  # the index in `starts` of each expression
    pattern_end: list[int] = []
    for index, pattern in enumerate(given.patterns):
        try:
            for role, expr in _parts(given.kind, index, pattern):
                builder.add(expr)
                roles.append(role)
            nfa = builder.nfa()
            _check_size(nfa, MAX_TRANSITIONS[given.kind])
            pattern_end.append(len(nfa.label))
        except GrammarError as error:
            raise _refused(given.kind, pattern, str(error)) from None
        except RecursionError:
            raise _refused(given.kind, pattern, "it is nested too deeply to be read; nest less") from None
    nfa = builder.nfa()
    starts: list[set[int]] = [set() for _ in range(2 if given.kind == "stop_regex" else len(given.patterns))]
    for role, start in zip(roles, nfa.starts, strict=True):
        starts[role] |= start
    return PatternTables.of(nfa, starts, pattern_end)


def _parts(kind: PatternUse, index: int, pattern: str) -> list[tuple[int, Expr]]:
    """The expressions of a pattern, and the index of the field `starts` that each belongs to."""
    from jsg.constrained.regex.parse import parse_piece, parse_regex

    if kind == "matches":
        expr = parse_regex(pattern, search=False)
        if expr == NEVER:
            raise GrammarError("it matches no text at all; correct it")
        return [(index, expr)]
    plain, starts, ends, spans = parse_piece(pattern).parts
    # `$` is the end of the text so far, where every match ends that is found.
    given = [(role, part) for role, part in ((0, plain), (0, ends), (1, starts), (1, spans)) if part is not None]
    if not given:
        raise GrammarError("it matches no text at all; correct it")
    if any(part.is_nullable for _, part in given):
        raise GrammarError("it matches the empty text, so it would end every answer at once; correct it")
    return [(role, part.expr) for role, part in given]


def _check_size(nfa: Nfa, max_transitions: int) -> None:
    num_transitions = sum(map(len, nfa.follow))
    check(num_transitions, max_transitions, "pairs of characters that may follow each other, repeats written out")
    check(sum(map(len, nfa.sets)), MAX_RANGES, "ranges of characters")


def _refused(kind: PatternUse, pattern: str, why: str) -> GrammarError:
    if kind == "stop_regex":
        return GrammarError(f"the stop pattern {pattern[:100]!r} is refused: {why}", param=kind)
    return GrammarError(f"the pattern {pattern[:100]!r} of matches() is refused: {why}", param=pattern)


# Reading


class State:
    """Positions at which the next character may be. Those of matches that began earlier come first.

    Attributes:
        moves: That of each class of characters. A class is a bit for each set that has the character.
    """

    __slots__ = ("moves", "positions")

    def __init__(self, positions: tuple[int, ...]):
        self.positions = positions
        self.moves: dict[int, Move] = {}


Move = tuple[State, tuple[int, ...], int | None]
"""The next state; for each position of it, the index of the position that it is reached from, -1 where a match begins;
and the index of the position from which the longest match ends, None where no match ends."""


@final
class PatternAutomaton:
    """Reads texts with patterns. It makes states when a text first needs them, and keeps them up to a bound.

    Attributes:
        num_steps: Work done so far, in steps of less than a tenth of a microsecond. What is remembered costs one step a
            character.
    """

    def __init__(self, tables: PatternTables, begin: int | None = None):
        """Takes almost no time.

        Args:
            tables: The tables of `pattern_tables`.
            begin: The index in `tables.starts` of the positions that a match may begin with anywhere.
        """
        self.num_steps = 0
        self._bounds, self._bounds_start = _numbers(tables.bounds), _numbers(tables.bounds_start)
        self._label = _numbers(tables.label)
        self._follow, self._follow_start = _numbers(tables.follow), _numbers(tables.follow_start)
        self._starts = tables.starts
        self._pattern_end = _numbers(tables.pattern_end)
        self._begin = () if begin is None else tuple(_numbers(tables.starts[begin]))
        self._states: dict[tuple[int, ...], State] = {}
        self._with_moves: list[State] = []  # also states that were forgotten while readers are in them
        self._class_of: dict[str, int] = {}
        self._num_bytes = 0

    def start(self, index: int) -> State:
        """The state before a text, with the positions of one of `tables.starts`, after those of `begin`."""
        return self._state((*self._begin, *_numbers(self._starts[index])))

    def move(self, state: State, char: str) -> Move:
        """The move that a character makes."""
        char_class = self.class_of(char)
        move = state.moves.get(char_class)
        if move is None:
            for _ in self.make_move(state, char_class):
                pass
            move = state.moves[char_class]
        return move

    def pattern_of(self, position: int) -> int:
        """The index of the pattern that has a position."""
        return bisect_right(self._pattern_end, position)

    def class_of(self, char: str) -> int:
        """The class of a character; see `State.moves`."""
        self.num_steps += 1
        char_class = self._class_of.get(char)
        return self._classify(char) if char_class is None else char_class

    def _classify(self, char: str) -> int:
        starts, bounds, code = self._bounds_start, self._bounds, ord(char)
        num_sets = len(starts) - 1
        self.num_steps += 8 * num_sets
        self._make_room(_CHARACTER_BYTES + num_sets // 8)
        # A character is in a set if an odd number of its bounds are not above it.
        of_sets = (
            1 << index
            for index in range(num_sets)
            if (bisect_right(bounds, code, starts[index], starts[index + 1]) - starts[index]) & 1
        )
        char_class = self._class_of[char] = sum(of_sets)
        return char_class

    def make_move(self, state: State, char_class: int) -> Generator[None, None, None]:
        """Makes the move that `state` has not yet for a class of characters, with a pause after each piece of work.

        From a large state it visits up to `MAX_TRANSITIONS` pairs, for which a server has no time at once.
        """
        follow, follow_start = self._follow, self._follow_start
        reached: dict[int, int] = {}
        ending: int | None = None
        num_left = _PIECE
        for index, position in enumerate(state.positions):
            if num_left < 0:
                self.num_steps += _PIECE - num_left
                num_left = _PIECE
                yield
            num_left -= 2
            if not char_class >> self._label[position] & 1:
                continue
            following = follow[follow_start[position] : follow_start[position + 1]]
            num_left -= len(following)
            for target in following:
                if target:
                    reached.setdefault(target, index)
                elif ending is None:
                    ending = index
        for position in self._begin:
            reached.setdefault(position, -1)
        self.num_steps += _PIECE - num_left + 4 * len(reached)
        self._make_room(_MOVE_BYTES + _INDEX_BYTES * len(reached))
        if not state.moves:
            self._with_moves.append(state)
        state.moves[char_class] = self._state(tuple(reached)), tuple(reached.values()), ending

    def _state(self, positions: tuple[int, ...]) -> State:
        state = self._states.get(positions)
        if state is None:
            self._num_bytes += _STATE_BYTES + _INDEX_BYTES * len(positions)
            state = self._states[positions] = State(positions)
        return state

    def _make_room(self, num_bytes: int) -> None:
        """Counts memory that is going to be kept, and forgets everything else where that would be too much."""
        if self._num_bytes + num_bytes > MAX_BYTES:
            self._states.clear()  # readers keep the states they are in
            for state in self._with_moves:
                state.moves.clear()
            self._with_moves.clear()
            self._class_of.clear()
            self._num_bytes = 0
        self._num_bytes += num_bytes


@final
class TextPatterns:
    """The patterns of the conditions of a program, compiled. They share one automaton."""

    def __init__(self, patterns: Sequence[str], tables: PatternTables):
        """`tables` are those of `pattern_tables` for a set of kind "matches" with these patterns."""
        self._index_of = {pattern: index for index, pattern in enumerate(patterns)}
        self._automaton = PatternAutomaton(tables)

    def reader(self, pattern: str, text: str) -> "TextReader":
        """A reader of a text with one of the patterns."""
        return TextReader(self._automaton, self._index_of[pattern], text)


@final
class TextReader:
    """Finds out whether all of a text matches a pattern, in time linear in the text.

    Attributes:
        num_steps: Work that this reader has done, as `PatternAutomaton` counts it.
    """

    def __init__(self, automaton: PatternAutomaton, index: int, text: str):
        """`index` is that of the pattern."""
        self.num_steps = 0
        self._automaton = automaton
        self._reading = self._read_all(automaton.start(index), text)

    def read(self, max_steps: float = math.inf) -> bool | None:
        """Reads on. Says whether all of the text matches; None if that takes more than about `max_steps` steps.

        Once it has said so, there is nothing more to read.
        """
        before = self._automaton.num_steps
        try:
            while self._automaton.num_steps - before < max_steps:
                next(self._reading)
        except StopIteration as said:
            return said.value
        finally:
            self.num_steps += self._automaton.num_steps - before
        return None

    def _read_all(self, state: State, text: str) -> Generator[None, None, bool]:
        """Reads a text, with a pause after each character and each piece of a move."""
        automaton, may_end = self._automaton, 0 in state.positions
        for char in text:
            if not state.positions:
                return False
            char_class = automaton.class_of(char)
            if char_class not in state.moves:
                yield from automaton.make_move(state, char_class)
            state, _, ending = state.moves[char_class]
            may_end = ending is not None
            yield
        return may_end
