"""Deterministic automata over characters, for conjunctions and negations of patterns.

An automaton is built completely, so its size is limited (`Limits.char_states`). Callers should try the cheap way first:
`as_repeat` and `fit_length` turn a length beside a simple pattern into a count, however large the numbers are.
"""

import dataclasses
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence

from jsg.constrained.automata import DEAD, live_states, merge_equivalent, targets_first
from jsg.constrained.chars import charset
from jsg.constrained.chars.char_nfa import STATES, STEPS, WORK_PER_STATE, Nfa, char_nfa
from jsg.constrained.ir import (
    EMPTY,
    NEVER,
    Alt,
    Automaton,
    CharRanges,
    Chars,
    Expr,
    Literal,
    Repeat,
    Seq,
    Words,
    seq,
)
from jsg.constrained.limits import LIMITS, Limits, check

_WORK_PER_STEP = 8
"""Positions that the subset construction can merge in the time of one step of an intersection."""


@dataclasses.dataclass(frozen=True, slots=True)
class CharDfa:
    """An automaton. State 0 is the start, and -1 is the dead state, from which no text is accepted.

    Attributes:
        classes: Disjoint sets of characters, none of them empty. Other characters lead to the dead state.
        rows: For each state its target by class.
        accepting: The states in which a text may end.
        limits: The limits of this automaton and of all automata that are made of it.
        is_trimmed: Whether `trimmed` made this automaton, so that it need not be trimmed again.
    """

    classes: tuple[CharRanges, ...]
    rows: tuple[tuple[int, ...], ...]
    accepting: frozenset[int]
    limits: Limits = LIMITS
    is_trimmed: bool = dataclasses.field(default=False, compare=False)

    @staticmethod
    def of(expr: Expr, limits: Limits = LIMITS) -> "CharDfa":
        """The automaton of an expression over characters, where literals and words are UTF-8 text.

        Raises:
            GrammarError: It needs more than `limits.char_states` states.
        """
        return _determinise(char_nfa(expr, limits), limits)

    @staticmethod
    def words(strings: Iterable[str], limits: Limits = LIMITS) -> "CharDfa":
        """The automaton of these strings."""
        rows: list[dict[str, int]] = [{}]
        accepting: set[int] = set()
        for string in strings:
            state = 0
            for character in string:
                target = rows[state].get(character)
                if target is None:
                    target = rows[state][character] = len(rows)
                    rows.append({})
                    check(len(rows), limits.char_states, STATES)
                state = target
            accepting.add(state)
        alphabet = sorted(set(itertools.chain.from_iterable(rows)))
        check(len(alphabet) * len(rows), limits.char_states * WORK_PER_STATE, STEPS)
        table = tuple([tuple([row.get(character, DEAD) for character in alphabet]) for row in rows])
        return CharDfa(tuple([charset.of(c) for c in alphabet]), table, frozenset(accepting), limits)

    @staticmethod
    def length(least: int, most: int | None, limits: Limits = LIMITS) -> "CharDfa":
        """The automaton of all texts of `least` to `most` characters (None: without end)."""
        count = least if most is None else most
        check(count + 1, limits.char_states, STATES)
        last = count if most is None else DEAD
        rows = [(state + 1 if state < count else last,) for state in range(count + 1)]
        return CharDfa((charset.UNIVERSE,), tuple(rows), frozenset(range(least, count + 1)), limits)

    def accepts(self, text: str) -> bool:
        """Whether the automaton matches the whole text."""
        state = 0
        for character in text:
            of_character = (i for i, ranges in enumerate(self.classes) if charset.contains(ranges, character))
            i = next(of_character, None)
            state = DEAD if i is None else self.rows[state][i]
            if state == DEAD:
                return False
        return state in self.accepting

    def complement(self) -> "CharDfa":
        """The automaton of all texts that this one does not match."""
        known = charset.union(*self.classes)
        rest = charset.complement(known)
        sink = len(self.rows)
        classes = (*self.classes, rest) if rest else self.classes
        tail = [sink] if rest else []
        rows = [tuple([sink if target == DEAD else target for target in row] + tail) for row in self.rows]
        rows.append(tuple([sink] * len(classes)))
        return CharDfa(classes, tuple(rows), frozenset(range(sink + 1)) - self.accepting, self.limits)

    def intersect(self, other: "CharDfa") -> "CharDfa":
        """The automaton of all texts that both match.

        Raises:
            GrammarError: It needs more than `limits.char_states` states.
        """
        pairs, classes = _common_classes(self.classes, other.classes)
        columns, other_columns = [i for i, _ in pairs], [j for _, j in pairs]
        numbers = _Pairs()
        order = numbers.order
        rows: list[tuple[int, ...]] = []
        work = 0
        for left, right in order:  # `order` grows while it is walked.
            left_row, right_row = self.rows[left], other.rows[right]
            targets = zip([left_row[i] for i in columns], [right_row[j] for j in other_columns], strict=True)
            rows.append(tuple(map(numbers.__getitem__, targets)))
            work += len(pairs)
            self.limits.spend(len(pairs))
            if len(order) > self.limits.char_states or work > self.limits.char_states * WORK_PER_STATE:
                check(len(order), self.limits.char_states, STATES)
                check(work, self.limits.char_states * WORK_PER_STATE, STEPS)
        accepting = [n for n, (a, b) in enumerate(order) if a in self.accepting and b in other.accepting]
        return CharDfa(classes, tuple(rows), frozenset(accepting), self.limits).trimmed()

    def union(self, other: "CharDfa") -> "CharDfa":
        """The automaton of all texts that at least one of the two matches."""
        return self.complement().intersect(other.complement()).complement().trimmed()

    def difference(self, other: "CharDfa") -> "CharDfa":
        """The automaton of all texts that this one matches and the other does not."""
        return self.intersect(other.complement())

    def trimmed(self) -> "CharDfa":
        """The same automaton without states that no matching text visits, and with as few classes as possible."""
        if self.is_trimmed:
            return self
        live = live_states(self.rows, self.accepting)
        if 0 not in live:
            return CharDfa((), ((),), frozenset(), self.limits, is_trimmed=True)
        numbers = [DEAD] * (len(self.rows) + 1)  # the last is that of DEAD
        for number, state in enumerate(live):
            numbers[state] = number
        dead = (DEAD,) * len(live)
        merged: dict[tuple[int, ...], list[CharRanges]] = {}
        columns = zip(*[self.rows[state] for state in live], strict=True)
        for ranges, targets in zip(self.classes, columns, strict=True):
            column = tuple([numbers[target] for target in targets])
            if column != dead:
                merged.setdefault(column, []).append(ranges)
        rows = tuple(zip(*merged, strict=True)) if merged else ((),) * len(live)
        classes = tuple([charset.union(*sets) for sets in merged.values()])
        accepting = frozenset([numbers[state] for state in self.accepting if numbers[state] != DEAD])
        return CharDfa(classes, rows, accepting, self.limits, is_trimmed=True)

    def minimised(self) -> "CharDfa":
        """The smallest automaton of the same texts. Automata of the same texts then have the same number of states."""
        dfa = self.trimmed()
        rows, accepting = merge_equivalent(dfa.rows, dfa.accepting)
        return CharDfa(dfa.classes, rows, accepting, self.limits)

    def is_empty(self) -> bool:
        """Whether it matches no text at all."""
        return not self.trimmed().accepting

    def lengths(self) -> tuple[int, int | None] | None:
        """The lengths of the shortest and the longest matching text; None if no text matches.

        The second length is None if there is no longest text. A schema's bounds on the length change nothing if both
        lengths lie within them.
        """
        dfa = self.trimmed()
        if not dfa.accepting:
            return None
        successors = [set(row) - {DEAD} for row in dfa.rows]
        frontier, seen, least = {0}, {0}, 0
        while not frontier & dfa.accepting:
            frontier = set().union(*(successors[state] for state in frontier)) - seen
            seen |= frontier
            least += 1
        order = targets_first(dfa.rows)
        if order is None:
            return least, None
        longest = [0] * len(dfa.rows)  # the longest text from each state; all states lead to an accepting one
        for state in order:
            longest[state] = max((1 + longest[target] for target in successors[state]), default=0)
        return least, longest[0]

    def has_lengths(self, least: int, most: int | None) -> bool:
        """Whether every matching text has `least` to `most` characters (None: without end)."""
        lengths = self.lengths()
        if lengths is None:
            return True
        return least <= lengths[0] and (most is None or (lengths[1] is not None and lengths[1] <= most))

    def to_expr(self) -> Expr:
        """An expression over `Chars` for the same texts: an automaton without dead states, or something simpler."""
        dfa = self.trimmed()
        if not dfa.accepting:
            return NEVER
        if len(dfa.rows) == 1:
            return Repeat(Chars(charset.union(*dfa.classes)), 0, None) if dfa.classes else EMPTY
        edges: list[tuple[tuple[Expr, int], ...]] = []
        labels: dict[tuple[int, ...], Expr] = {}
        for row in dfa.rows:
            by_target: dict[int, list[int]] = {}
            for i, target in enumerate(row):
                if target != DEAD:
                    by_target.setdefault(target, []).append(i)
            out: list[tuple[Expr, int]] = []
            for target, members in by_target.items():
                key = tuple(members)
                if key not in labels:
                    labels[key] = Chars(charset.union(*(dfa.classes[i] for i in members)))
                out.append((labels[key], target))
            edges.append(tuple(out))
        return Automaton(tuple(edges), dfa.accepting)


class _Pairs(dict[tuple[int, int], int]):
    """The number of each pair of states, in the order in which they are first asked for. DEAD in a pair makes it DEAD.

    Attributes:
        order: The pairs that are not dead.
    """

    def __init__(self) -> None:
        super().__init__({(0, 0): 0})
        self.order = [(0, 0)]

    def __missing__(self, pair: tuple[int, int]) -> int:
        number = DEAD
        if DEAD not in pair:
            number = len(self.order)
            self.order.append(pair)
        self[pair] = number
        return number


def as_repeat(expr: Expr) -> tuple[CharRanges, int, int | None] | None:
    """(characters, least, most) if the expression is a run of characters of one set, else None.

    With it, a pattern such as `^[a-z]+$` beside a length becomes a count, however large the length is.
    """
    match expr:
        case Chars(ranges):
            return ranges, 1, 1
        case Repeat(Chars(ranges), least, most, Seq(())):
            return ranges, least, most
        case Seq(parts) if parts:
            runs = [as_repeat(part) for part in parts]
            first = runs[0]
            if first is None or any(run is None or run[0] != first[0] for run in runs):
                return None
            known = [run for run in runs if run is not None]
            most = None if any(run[2] is None for run in known) else sum(run[2] or 0 for run in known)
            return first[0], sum(run[1] for run in known), most
        case _:
            return None


def fit_length(expr: Expr, least: int, most: int | None) -> Expr | None:
    """The texts of an expression that are `least` to `most` characters long; None if this needs more than a count.

    A count suffices if every part has a fixed length, except for one that repeats an item of a fixed length.
    """
    run = as_repeat(expr)
    if run is not None:
        return _counted(Chars(run[0]), max(run[1], least), _least_of(run[2], most))
    parts = list(expr.parts) if isinstance(expr, Seq) else [expr]
    fixed = 0
    varying: list[int] = []
    for i, part in enumerate(parts):
        length = fixed_length(part)
        if length is None:
            varying.append(i)
        else:
            fixed += length
    if not varying:
        return expr if fixed >= least and (most is None or fixed <= most) else NEVER
    part = parts[varying[0]]
    item = fixed_length(part.item) if isinstance(part, Repeat) and part.separator == EMPTY else None
    if len(varying) > 1 or not isinstance(part, Repeat) or not item:
        return None
    fewest = max(part.min, -(-(least - fixed) // item))
    limit = None if most is None else (most - fixed) // item
    run_of_items = _counted(part.item, fewest, _least_of(part.max, limit))
    return seq(*parts[: varying[0]], run_of_items, *parts[varying[0] + 1 :])


def fixed_length(expr: Expr) -> int | None:
    """How many characters every text of the expression has; None if texts differ in length, or may do so."""
    match expr:
        case Chars():
            return 1
        case Literal(value):
            return len(value.decode())
        case Words(words):
            return _only(len(word.decode()) for word in words)
        case Seq(parts):
            lengths = [fixed_length(part) for part in parts]
            known = [length for length in lengths if length is not None]
            return sum(known) if len(known) == len(lengths) else None
        case Alt(options) if options:
            return _only(fixed_length(option) for option in options)
        case Repeat(item, least, most, Seq(())) if least == most:
            length = fixed_length(item)
            return None if length is None else length * least
        case _:
            return None


def _only(lengths: Iterable[int | None]) -> int | None:
    values = set(lengths)
    return values.pop() if len(values) == 1 else None


def _least_of(left: int | None, right: int | None) -> int | None:
    return right if left is None else left if right is None else min(left, right)


def _counted(item: Expr, least: int, most: int | None) -> Expr:
    if most is not None and most < max(least, 0):
        return NEVER
    return Repeat(item, max(least, 0), most)


def _determinise(nfa: Nfa, limits: Limits) -> CharDfa:
    """The subset construction."""
    classes = charset.partition(nfa.sets)
    starts = {ranges[0][0]: i for i, ranges in enumerate(classes)}
    lows = sorted((low, starts[ranges[0][0]]) for ranges in classes for low, _ in ranges)
    points = [low for low, _ in lows]
    # Every set is a union of classes. They are the classes with an interval that begins inside the set.
    members = [
        sorted({i for low, high in ranges for _, i in lows[bisect_right(points, low - 1) : bisect_right(points, high)]})
        for ranges in nfa.sets
    ]
    (start,) = nfa.starts
    numbers = {start: 0}
    order = [start]
    rows: list[tuple[int, ...]] = []
    work = 0
    for state in order:  # `order` grows while it is walked.
        targets: dict[int, set[int]] = {}
        before = work
        for position in state:
            follow = nfa.follow[position]
            for i in members[nfa.label[position]]:
                targets.setdefault(i, set()).update(follow)
            work += len(follow) * len(members[nfa.label[position]]) + 1
        row = [DEAD] * len(classes)
        for i, target in targets.items():
            key = frozenset(target)
            if key not in numbers:
                numbers[key] = len(order)
                order.append(key)
            row[i] = numbers[key]
        rows.append(tuple(row))
        work += len(classes)
        limits.spend((work - before) // _WORK_PER_STEP + 1)
        check(len(order), limits.char_states, STATES)
        check(work, limits.char_states * WORK_PER_STATE, STEPS)
    accepting = [number for number, state in enumerate(order) if nfa.end in state]
    return CharDfa(tuple(classes), tuple(rows), frozenset(accepting), limits).trimmed()


def _common_classes(
    left: Sequence[CharRanges], right: Sequence[CharRanges]
) -> tuple[list[tuple[int, int]], tuple[CharRanges, ...]]:
    """The pairs of classes that have characters in common, and these characters."""
    marked = [(low, high, i) for i, ranges in enumerate(left) for low, high in ranges]
    others = [(low, high, i) for i, ranges in enumerate(right) for low, high in ranges]
    marked.sort()
    others.sort()
    shared: dict[tuple[int, int], list[tuple[int, int]]] = {}
    i = j = 0
    while i < len(marked) and j < len(others):
        low, high = max(marked[i][0], others[j][0]), min(marked[i][1], others[j][1])
        if low <= high:
            shared.setdefault((marked[i][2], others[j][2]), []).append((low, high))
        if marked[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return list(shared), tuple(map(tuple, shared.values()))
