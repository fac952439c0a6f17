"""Position automata of expressions over characters, from which deterministic automata are made (`chardfa.py`)."""

import dataclasses
from collections.abc import Iterable, Sequence, Set

from jsg.constrained.chars import charset
from jsg.constrained.ir import EMPTY, Alt, Automaton, CharRanges, Chars, Expr, Literal, Repeat, Seq, Words
from jsg.constrained.limits import Limits, check
from jsg.errors import GrammarError

STATES = "states of the pattern"
STEPS = "steps to make the states of the pattern"
WORK_PER_STATE = 100
"""How many steps a construction may take for each state that the automaton may have."""


@dataclasses.dataclass(frozen=True, slots=True)
class Nfa:
    """Positions at which one character may be, and one for the end of the text.

    Attributes:
        sets: The different sets of characters.
        label: For each position the index of its set.
        follow: For each position the positions that may come after it.
        starts: For each expression the positions of the first character.
        end: The position of the end. Nothing follows it, and its label is an empty set.
    """

    sets: tuple[CharRanges, ...]
    label: tuple[int, ...]
    follow: tuple[frozenset[int], ...]
    starts: tuple[frozenset[int], ...]
    end: int


def char_nfa(expr: Expr, limits: Limits) -> Nfa:
    """The position automaton of an expression over characters; raises as `NfaBuilder.add`."""
    builder = NfaBuilder(limits)
    builder.add(expr)
    return builder.nfa()


class NfaBuilder:
    """Builds one position automaton of several expressions, which share nothing but the limits and the end.

    It builds from the end of the text to its start, so that what may come after a part is known.
    """

    def __init__(self, limits: Limits):
        """`limits` are those of all expressions together."""
        self._limits = limits
        self._starts: list[frozenset[int]] = []
        self._sets: dict[CharRanges, int] = {charset.NONE: 0}
        self._label = [0]
        self._follow: list[set[int]] = [set()]
        self._work = 0

    def add(self, expr: Expr) -> None:
        """Adds an expression over characters, where literals and words are UTF-8 text.

        Raises:
            GrammarError: The automaton has more than `limits.char_states` positions, or the expression has calls or
                bags, for which there is no such automaton.
        """
        self._starts.append(self._before(expr, frozenset((0,))))

    def nfa(self) -> Nfa:
        """The automaton of all expressions so far."""
        return Nfa(tuple(self._sets), tuple(self._label), tuple(map(frozenset, self._follow)), tuple(self._starts), 0)

    def _position(self, ranges: CharRanges, after: Iterable[int]) -> int:
        self._label.append(self._sets.setdefault(ranges, len(self._sets)))
        self._follow.append(set(after))
        check(len(self._label), self._limits.char_states, STATES)
        self._spend(len(self._follow[-1]))
        return len(self._label) - 1

    def _spend(self, steps: int) -> None:
        self._work += steps
        check(self._work, self._limits.char_states * WORK_PER_STATE, STEPS)

    def _before(self, expr: Expr, after: frozenset[int]) -> frozenset[int]:
        """The positions at which a text of `expr`, followed by `after`, may begin."""
        self._spend(1)
        match expr:
            case Chars(ranges):
                return frozenset((self._position(ranges, after),)) if ranges else frozenset()
            case Literal(value):
                return self._text(value.decode(), after)
            case Words(words):
                begin = frozenset[int]().union(*[self._text(word.decode(), after) for word in words])
                self._spend(len(begin))
                return begin
            case Seq(parts):
                for part in reversed(parts):
                    after = self._before(part, after)
                return after
            case Alt(options):
                begin = frozenset[int]().union(*[self._before(option, after) for option in options])
                self._spend(len(begin))
                return begin
            case Repeat():
                return self._repeat(expr, after)
            case Automaton():
                return self._automaton(expr, after)
            case _:
                raise GrammarError(
                    f"patterns are combined as automata over characters, but there is none for {type(expr).__name__}; "
                    "simplify the grammar"
                )

    def _text(self, text: str, after: frozenset[int]) -> frozenset[int]:
        for character in reversed(text):
            after = frozenset((self._position(charset.of(character), after),))
        return after

    def _repeat(self, expr: Repeat, after: frozenset[int]) -> frozenset[int]:
        """The items are built from the last to the first. `rest` is what may come after the items still to build."""
        if expr.max == 0:
            return after
        if expr.separator != EMPTY:
            most = None if expr.max is None else expr.max - 1
            others = Repeat(Seq((expr.separator, expr.item)), max(expr.min - 1, 0), most)
            begin = self._before(Seq((expr.item, others)), after)
            return begin | after if expr.min == 0 else begin
        rest, copies = after, max(expr.min, 1)
        if expr.max is None:
            rest = self._loop(expr.item, after)
            copies -= 1
        for _ in range((expr.max or 0) - copies):
            rest = self._before(expr.item, rest) | after
            self._spend(len(rest))
        for _ in range(copies):
            rest = self._before(expr.item, rest)
        return rest | after if expr.min == 0 else rest

    def _loop(self, item: Expr, after: frozenset[int]) -> frozenset[int]:
        """The beginning of one or more items."""
        gate = self._position(charset.NONE, ())
        begin = self._before(item, frozenset((gate,)))
        if gate in begin:
            begin = begin - {gate} | after
        self._open(gate, [begin | after])
        return begin

    def _automaton(self, automaton: Automaton, after: frozenset[int]) -> frozenset[int]:
        first = len(self._label)
        for _ in automaton.edges:
            self._position(charset.NONE, ())
        begins: list[set[int]] = []
        for state, row in enumerate(automaton.edges):
            begin = set(after) if state in automaton.accepting else set[int]()
            for label, target in row:
                begin |= self._before(label, frozenset((first + target,)))
            self._spend(len(begin))
            begins.append(begin)
        for state, target in sorted(automaton.skips, reverse=True):
            begins[state] |= begins[target]
            self._spend(len(begins[target]))
        self._open(first, begins)
        return frozenset(begins[0])

    def _open(self, first: int, begins: Sequence[Set[int]]) -> None:
        """Replaces gates by the positions that begin there.

        A gate is a placeholder for positions that are not built yet: what follows an item, or a state of an automaton.
        The gates are the positions from `first` on, one for each of `begins`. Only later positions lead to them.
        """
        last = first + len(begins)
        gates = set(range(first, last))
        self._spend(len(self._label) - first)
        for follow in self._follow[last:]:
            for gate in follow & gates:
                follow |= begins[gate - first]
                self._spend(len(begins[gate - first]))
            follow -= gates
