"""Builds the tables of a grammar (`StaticTables`): each rule becomes a position automaton (Glushkov's construction).

A position is a place where a byte may be. An expression becomes a fragment, which says whether the expression may be
empty, which positions begin it, and which end it. Joining two fragments lets the positions that begin the second follow
those that end the first. Expressions are folded from the leaves up and without recursion, so deep ones need no stack.

Expressions that never match are left out first (`analysis.py`), so that no position is a dead end.
"""

import functools
import itertools
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

from jsg.constrained import ir, tables
from jsg.constrained.automata import live_states
from jsg.constrained.build.ambiguity import several_counts
from jsg.constrained.build.analysis import Facts, analyse, with_skips
from jsg.constrained.build.finish import MOST_COPIED, Loop, Parts, Positions, Rows, finish, first_bytes
from jsg.constrained.build.one_count import Backwards
from jsg.constrained.build.repeats import Plan, Repeats, is_single
from jsg.constrained.limits import LIMITS, Limits, check
from jsg.constrained.tables import StaticTables
from jsg.errors import GrammarError


class Fragment(NamedTuple):
    """An expression that is built: whether it may be empty, and the positions that begin and end it."""

    nullable: bool
    first: Positions
    last: Positions


class Arc(NamedTuple):
    """A label of an automaton, the state that it leads to, and the states from which it leads there."""

    label: ir.Expr
    target: int
    sources: list[int]


NOTHING = Fragment(True, (), ())
_LEAVES = (ir.Literal, ir.ByteSet, ir.Words, ir.Call)


def build(grammar: ir.Grammar, limits: Limits = LIMITS) -> StaticTables:
    """The tables of a grammar.

    Raises:
        GrammarError: The grammar matches no text, is left-recursive, calls a rule that does not exist, or is too large.
    """
    library = grammar.library
    facts = analyse(grammar, limits, _nullable_rules(library) if library else {})
    if not facts.is_rule_productive(grammar.start):
        raise GrammarError(
            grammar.contradiction
            or f"the grammar matches no text: rule {grammar.start!r} can never be completed; give it an end"
        )
    taken = _taken(library, tuple(facts.built)) if library else None
    written_out: dict[int, ir.Repeat] = {}
    while True:
        builder = _Builder(facts, limits, written_out, taken)
        for name in facts.rules:
            builder.add_rule(name)
        parts = builder.parts(grammar.start)
        firsts = first_bytes(parts)
        counted = {number: loop.origin for number, loop in enumerate(parts.loops) if loop.origin is not None}
        several = several_counts(parts, firsts, counted, taken.backwards if taken else None)
        ambiguous = {id(repeat): repeat for number, repeat in counted.items() if number in several}
        if not ambiguous:
            is_nullable = facts.is_rule_nullable(grammar.start)
            return finish(parts, firsts, is_nullable, limits, taken.rows if taken else None)
        written_out |= ambiguous
        if taken and any(id(loop.origin) in ambiguous for loop in taken.parts.loops):
            facts, taken = analyse(grammar, limits), None  # a rule of the library must be built in another way


class Taken(NamedTuple):
    """Rules of a library that are built. They come first in each grammar that has these rules of the library.

    Attributes:
        parts: Their positions.
        rows: Their rows of the tables.
        backwards: What may come before each of the positions.
        num_branches, num_edges: What the builder counts.
    """

    parts: Parts
    rows: Rows
    backwards: Backwards
    num_branches: int
    num_edges: int


@functools.lru_cache(maxsize=64)
def _taken(library: ir.Library, names: tuple[str, ...]) -> Taken | None:
    """Rules of a library, which call no others; None if there are none."""
    if not names:
        return None
    rules = {name: library.rules[name] for name in names}
    builder = _Builder(analyse(ir.Grammar("", rules | {"": ir.either(*map(ir.Call, names))}), LIMITS), LIMITS, {}, None)
    return builder.taken(names)


@functools.lru_cache(maxsize=64)
def _nullable_rules(library: ir.Library) -> dict[str, bool]:
    """For each rule of a library whether it may be empty."""
    every = ir.Grammar("", {**library.rules, "": ir.either(*map(ir.Call, library.rules))})
    facts = analyse(every, LIMITS)
    return {name: facts.is_rule_nullable(name) for name in library.rules}


class _Builder:
    """Collects the positions of all rules."""

    def __init__(self, facts: Facts, limits: Limits, written_out: Mapping[int, ir.Repeat], taken: Taken | None):
        """Makes a builder; `written_out` has the repeats that may not be counted, by identity."""
        self._facts = facts
        self._limits = limits
        self._kinds = [tables.END_RULE]  # no rule ends in position 0
        self._arguments = [0]
        self._follow: list[list[Positions]] = [[]]
        self._loops: list[Loop] = []
        self._rules: list[tuple[str, Positions, int]] = []
        self._repeats = Repeats(facts, written_out)
        self._arcs: dict[int, list[Arc]] = {}
        self._branches = 0
        self._edges = 0
        if taken is not None:
            parts, self._branches, self._edges = taken.parts, taken.num_branches, taken.num_edges
            self._kinds, self._arguments, self._follow = [*parts.kinds], [*parts.arguments], [*parts.follow]
            self._loops, self._rules = [*parts.loops], [*parts.rules]
        names = [*facts.built, *(name for name in facts.rules if name not in facts.built)]
        self._numbers = {name: number for number, name in enumerate(names)}

    def parts(self, start: str) -> Parts:
        """Everything collected."""
        return Parts(self._kinds, self._arguments, self._follow, self._loops, self._rules, self._numbers[start])

    def add_rule(self, name: str) -> None:
        """Builds the rule, unless it is built. Rules must be added in the order of `Facts.rules`."""
        if name in self._facts.built:
            return
        root = self._facts.rules[name]
        if not self._facts.is_productive(root):
            self._rules.append((name, (), 0))  # nothing calls it
            return
        try:
            fragment = self._fold(root)
        except GrammarError as error:
            raise GrammarError(f"{error} (in rule {name!r})" if len(self._facts.rules) > 1 else str(error)) from error
        end = self._position(tables.END_RULE, 0)
        self._join(fragment.last, (end,))
        self._rules.append((name, fragment.first, end))

    def taken(self, names: Sequence[str]) -> Taken:
        """Builds these rules for grammars that take them from a library."""
        self._numbers = {name: number for number, name in enumerate(names)}
        for name in names:
            self.add_rule(name)
        parts = self.parts(names[0])
        rows = Rows(self._limits)
        rows.fill(parts, first_bytes(parts))
        return Taken(parts, rows, Backwards(parts), self._branches, self._edges)

    # -- Folding

    def _fold(self, root: ir.Expr) -> Fragment:
        """The fragment of an expression."""
        order: list[tuple[ir.Expr, int]] = []
        todo, most = [root], 4 * self._limits.positions
        while todo:  # parents before children, the last child first; reversed, children come first and in order
            expr = todo.pop()
            children = () if isinstance(expr, _LEAVES) else self._children(expr)
            order.append((expr, len(children)))
            todo.extend(children)
            if len(order) + len(todo) > most:
                check(len(order) + len(todo), most, "parts")
        values: list[Fragment] = []
        for expr, num_children in reversed(order):
            if not num_children and isinstance(expr, _LEAVES):
                values.append(self._leaf_of(expr))
                continue
            split = len(values) - num_children
            parts = values[split:]
            del values[split:]
            values.append(self._combine(expr, parts))
        return values[0]

    def _children(self, expr: ir.Expr) -> list[ir.Expr]:
        """The expressions whose fragments `_combine` takes, once for each use. All of them match something."""
        match expr:
            case ir.Seq(parts):
                return list(parts)
            case ir.Alt(options):
                return [o for o in options if not is_single(o) and self._facts.is_productive(o)]
            case ir.Repeat():
                plan = self._repeats.plan(expr)
                body = [expr.separator, expr.item] if plan.has_separator else [expr.item]
                if plan.is_separator_first:
                    return [expr.item, *(body * plan.copies)]
                return (body * plan.copies)[plan.has_separator and not plan.is_turning :]
            case ir.Bag():
                kept = [item.expr for item in self._items_of(expr)]
                return [*kept, expr.separator] if kept and self._facts.is_productive(expr.separator) else kept
            case ir.Automaton():
                return [arc.label for arc in self._arcs_of(expr)]
            case _:
                return []

    def _combine(self, expr: ir.Expr, parts: list[Fragment]) -> Fragment:
        """The fragment of an expression from those of its `_children`."""
        match expr:
            case ir.Seq():
                return self._sequence(parts)
            case ir.Alt(options):
                return self._choice(options, parts)
            case ir.Repeat():
                return self._repeat(expr, parts)
            case ir.Bag():
                return self._bag(expr, parts)
            case ir.Automaton():
                return self._automaton(expr, parts)
            case _:
                raise AssertionError("a leaf, or a set of characters, which analyse() refuses")

    def _leaf_of(self, expr: ir.Literal | ir.ByteSet | ir.Words | ir.Call) -> Fragment:
        """The fragment of an expression that has no parts."""
        if isinstance(expr, ir.Literal):
            return self._literal(expr.value)
        if isinstance(expr, ir.ByteSet):
            return self._leaf(tables.BYTE, _bits(expr))
        if isinstance(expr, ir.Words):
            return self._trie(expr.words)
        position = (self._position(tables.CALL, self._numbers[expr.rule]),)
        return Fragment(self._facts.is_nullable(expr), position, position)

    # -- Leaves and joints

    def _position(self, kind: int, argument: int) -> int:
        self._kinds.append(kind)
        self._arguments.append(argument)
        self._follow.append([])
        if len(self._kinds) > self._limits.positions:
            check(len(self._kinds), self._limits.positions, "positions")
        return len(self._kinds) - 1

    def _leaf(self, kind: int, argument: int) -> Fragment:
        position = (self._position(kind, argument),)
        return Fragment(False, position, position)

    def _join(self, last: Sequence[int], first: Positions) -> None:
        """Lets each of `first` follow each of `last`."""
        if first:
            self._spend(len(last))
            for position in last:
                self._follow[position].append(first)

    def _spend(self, amount: int) -> None:
        """Counts work that is more than linear in the grammar."""
        self._edges += amount
        check(self._edges, self._limits.transitions, "transitions")

    def _literal(self, value: bytes) -> Fragment:
        if len(value) == 1:
            return self._leaf(tables.BYTE, 1 << value[0])
        begin, end = len(self._kinds), len(self._kinds) + len(value)
        check(end, self._limits.positions, "positions")
        self._kinds.extend([tables.BYTE] * len(value))
        self._arguments.extend([1 << byte for byte in value])
        self._follow.extend([[(following,)] for following in range(begin + 1, end)])
        self._follow.append([])
        return Fragment(False, (begin,), (end - 1,))

    def _trie(self, words: tuple[bytes, ...]) -> Fragment:
        """The words as a tree in which they share their prefixes."""
        first: list[int] = []
        last: list[int] = []
        path: list[int] = []  # positions of the previous word
        children: dict[int, list[int]] = {}
        previous = b""
        for word in words:
            shared = 0
            for byte, other in zip(word, previous, strict=False):
                if byte != other:
                    break
                shared += 1
            del path[shared:]
            for byte in word[shared:]:
                position = self._position(tables.BYTE, 1 << byte)
                (children.setdefault(path[-1], []) if path else first).append(position)
                path.append(position)
            last.append(path[-1])
            previous = word
        for position, following in children.items():
            self._follow[position].append(tuple(following))
        return Fragment(False, tuple(first), tuple(last))

    # -- Combinations

    def _sequence(self, parts: list[Fragment]) -> Fragment:
        if len(parts) == 1:
            return parts[0]
        nullable, ends = True, list[Positions]()
        first: Positions = ()  # of the parts from here on
        for part in reversed(parts):
            self._join(part.last, first)
            if nullable:
                ends.append(part.last)
            nullable = nullable and part.nullable
            if not part.nullable:
                first = part.first
            elif part.first:
                first = part.first + self._linked(first)
        return Fragment(nullable, first, self._last(ends[::-1]))

    def _linked(self, positions: Positions) -> Positions:
        """The positions, or a link to them if they are many."""
        if len(positions) <= MOST_COPIED:
            return positions
        link = (self._position(tables.LINK, 0),)
        self._join(link, positions)
        return link

    def _last(self, ends: list[Positions]) -> Positions:
        """The positions that may end an expression, or a link that follows them if they are many and of several parts.

        What comes after each part then also follows the link only.
        """
        last = tuple(itertools.chain.from_iterable(ends))
        if len(last) <= MOST_COPIED or len(last) == max(map(len, ends)):
            return last
        link = (self._position(tables.LINK, 0),)
        for end in ends:
            self._join(end, link)
        return link

    def _choice(self, options: tuple[ir.Expr, ...], parts: list[Fragment]) -> Fragment:
        """All parts, and one position for all options that are a single byte."""
        bits = 0
        for option in options:
            bits |= _bits(option) if is_single(option) else 0
        if bits:
            parts = [self._leaf(tables.BYTE, bits), *parts]
        return Fragment(
            any(part.nullable for part in parts),
            tuple(itertools.chain.from_iterable(part.first for part in parts)),
            tuple(itertools.chain.from_iterable(part.last for part in parts)),
        )

    def _arcs_of(self, automaton: ir.Automaton) -> list[Arc]:
        """Every arc on a path from state 0 to an accepting state.

        An arc stands for all edges with one label to one target: however many states they leave, what follows them is
        the same. (Where states are skipped, it stands for one edge.) Where a label is one of several options, each
        option is an arc of its own, because many labels share some of them.
        """
        known = self._arcs.get(id(automaton))
        if known is not None:
            return known
        options: dict[int, list[ir.Expr]] = {}
        for row in automaton.edges:
            for label, _ in row:
                if id(label) not in options:
                    options[id(label)] = self._options_of(label)
        live = self._live_states_of(automaton, options)
        sources: dict[tuple[int, int, int], tuple[ir.Expr, list[int]]] = {}
        for state, out in enumerate(automaton.edges):
            only = state if automaton.skips else 0  # what begins a label must then be its own, for `_beside`
            for label, target in out if state in live else ():
                if target in live:
                    edge = sources.get((id(label), target, only))
                    if edge is None:
                        sources[id(label), target, only] = (label, [state])
                    else:
                        edge[1].append(state)
        arcs: dict[tuple[int, int, int], Arc] = {}
        for (number, target, only), (_, states) in sources.items():
            for option in options[number]:
                arc = arcs.get((id(option), target, only))
                if arc is None:
                    arcs[id(option), target, only] = Arc(option, target, [*states])
                else:
                    arc.sources.extend(states)
        self._arcs[id(automaton)] = found = list(arcs.values())
        return found

    def _live_states_of(self, automaton: ir.Automaton, options: Mapping[int, Collection[ir.Expr]]) -> Set[int]:
        """The states on a way from state 0 to an accepting one, where `options` has what matches of each label."""
        known = self._facts.live.get(id(automaton))
        if known is not None:
            return known
        rows = [tuple([target for label, target in out if options[id(label)]]) for out in automaton.edges]
        return set(live_states(with_skips(rows, automaton.skips), automaton.accepting))

    def _options_of(self, label: ir.Expr) -> list[ir.Expr]:
        """The options of a label that match something. Single bytes stay together, because they are one position."""
        options = label.options if isinstance(label, ir.Alt) else (label,)
        if sum(map(is_single, options)) > 1:
            options = (label,)
        return [option for option in options if self._facts.is_productive(option)]

    def _automaton(self, automaton: ir.Automaton, parts: list[Fragment]) -> Fragment:
        into: dict[int, list[int]] = {}
        arcs = self._arcs_of(automaton)
        for arc, part in zip(arcs, parts, strict=True):
            into.setdefault(arc.target, []).extend(part.last)
        if not automaton.skips:
            starts: dict[int, list[int]] = {}
            for arc, part in zip(arcs, parts, strict=True):
                for state in arc.sources:
                    starts.setdefault(state, []).extend(part.first)
            for state, first in starts.items():
                self._join(into.get(state, ()), tuple(first))
            last = [position for state in sorted(automaton.accepting) for position in into.get(state, ())]
            return Fragment(0 in automaton.accepting, tuple(starts.get(0, ())), tuple(last))
        out: dict[int, list[tuple[ir.Expr, Positions]]] = {}
        for arc, part in zip(arcs, parts, strict=True):
            for state in arc.sources:
                out.setdefault(state, []).append((arc.label, part.first))
        skips, accepting = dict(automaton.skips), set(automaton.accepting)
        open_ends = {position for last in into.values() for position in last}
        begins: dict[int, Positions] = {}
        for state in sorted({*out, *skips}, reverse=True):  # a skip leads to a higher state
            own = out.get(state, ())
            if state not in skips:
                begins[state] = tuple(itertools.chain.from_iterable(first for _, first in own))
            else:
                begins[state] = begins.get(skips[state], ())
                accepting |= {state} if skips[state] in accepting else set()
                for label, first in own:
                    begins[state] = self._beside(first, _num_literal(label), begins[state], open_ends)
            self._join(into.get(state, ()), begins[state])
        last = [position for state in sorted(accepting) for position in into.get(state, ())]
        return Fragment(0 in accepting, begins.get(0, ()), tuple(last))

    def _beside(self, first: Positions, num_own: int, others: Positions, open_ends: Set[int]) -> Positions:
        """The positions that begin an expression, and others that may come in its place, as one group.

        The names of a thousand members, each of which may be left out, are one tree at each place between two of them.
        So a byte that begins the expression and one of the others is read once: what may come after it for the others
        may also come after it for the expression, whose positions nothing but this group leads to. Nothing changes for
        groups that were made before.

        Args:
            first: The positions that begin the expression.
            num_own: How many bytes it begins with, each at the place after the one before.
            others: The other positions.
            open_ends: Positions that are not joined yet with what comes after them.
        """
        if not num_own:
            return first + self._linked(others)
        (position,) = first
        end = position + num_own
        found: Positions | None = None
        while True:
            self._spend(len(others))
            bits = self._arguments[position]
            twin = next((o for o in others if self._is_byte(o, bits) and o not in open_ends), None)
            group = (position, *[other for other in others if other != twin])
            if found is None:
                found = group
            else:
                self._follow[position - 1] = [group]
            if twin is None:
                return found
            position += 1
            if position == end:
                self._follow[position - 1] += self._follow[twin]
                return found
            groups = self._follow[twin]
            others = groups[0] if len(groups) == 1 else tuple(dict.fromkeys(itertools.chain.from_iterable(groups)))

    def _is_byte(self, position: int, bits: int) -> bool:
        return self._kinds[position] == tables.BYTE and self._arguments[position] == bits

    # -- Repeats

    def _repeat(self, repeat: ir.Repeat, parts: list[Fragment]) -> Fragment:
        plan = self._repeats.plan(repeat)
        if plan.copies == 0:
            return NOTHING
        head, separators = NOTHING, [NOTHING] * plan.copies
        if plan.is_separator_first:
            head = parts[0]
            parts = [self._sequence(parts[i : i + 2]) for i in range(1, len(parts), 2)]
        elif plan.has_separator:
            parts = parts if plan.is_turning else [NOTHING, *parts]
            separators, parts = parts[0::2], parts[1::2]
        if plan.is_counted:
            high = tables.UNBOUNDED if plan.max is None else plan.max
            repeated = self._loop([(parts[0], 0)], separators[0], plan.min, high, 0, repeat)
        else:
            repeated = self._unrolled(plan, parts, separators)
        return self._sequence([head, repeated]) if plan.is_separator_first else repeated

    def _unrolled(self, plan: Plan, bodies: list[Fragment], separators: list[Fragment]) -> Fragment:
        """Copies in a row. Any from number `plan.min` on may be the last. Without a maximum the last copy repeats."""
        last: list[int] = []
        for number, body in enumerate(bodies, 1):
            if number > 1:
                self._join_over(bodies[number - 2].last, separators[number - 1], body.first)
                self._join(separators[number - 1].last, body.first)
            if number >= plan.min:
                last.extend(body.last)
        if plan.max is None:
            self._join_over(bodies[-1].last, separators[-1], bodies[-1].first)
            if len(bodies) == 1:
                self._join(separators[0].last, bodies[0].first)
        return Fragment(plan.min == 0, bodies[0].first, tuple(last))

    def _join_over(self, last: Positions, separator: Fragment, first: Positions) -> None:
        """Lets the separator follow `last`, and `first` too where the separator may be empty."""
        self._join(last, separator.first)
        if separator.nullable:
            self._join(last, first)

    def _items_of(self, bag: ir.Bag) -> list[ir.BagItem]:
        """The items that can occur in the bag."""
        return [] if bag.max == 0 else [item for item in bag.items if self._facts.is_productive(item.expr)]

    def _bag(self, bag: ir.Bag, parts: list[Fragment]) -> Fragment:
        items = self._items_of(bag)
        if not items:
            return NOTHING
        high = tables.UNBOUNDED if bag.max is None else bag.max
        separator = parts.pop() if len(parts) > len(items) else NOTHING
        if not self._facts.is_productive(bag.separator):
            high = 1
        branches: list[tuple[Fragment, int]] = []
        bit, required = 1, 0
        for item, part in zip(items, parts, strict=True):
            is_once = item.is_once or item.is_required
            branches.append((part, bit if is_once else 0))
            required |= bit if item.is_required else 0
            bit <<= 1 if is_once else 0
        return self._loop(branches, separator, bag.min, high, required)

    def _loop(
        self,
        branches: list[tuple[Fragment, int]],
        separator: Fragment,
        low: int,
        high: int,
        required: int,
        origin: ir.Repeat | None = None,
    ) -> Fragment:
        """A repeat or bag whose items are counted while a text is read. It is a single position."""
        number, is_once = len(self._loops), all(bit for _, bit in branches)
        first_end = len(self._kinds)
        for part, _ in branches:
            self._join(part.last, (self._position(tables.END_BRANCH, self._branches),))
            self._branches += 1
        kind = tables.NO_SEPARATOR
        if separator.first:
            kind = tables.EMPTY_SEPARATOR if separator.nullable else tables.PLAIN_SEPARATOR
            self._join(separator.last, (self._position(tables.END_SEPARATOR, number),))
        self._loops.append(
            Loop(
                min=max(low, required.bit_count()),
                max=min(high, len(branches)) if is_once else high,
                required=required,
                branches=[(part.first, bit) for part, bit in branches],
                separator=separator.first,
                separator_kind=kind,
                once=sum(bit for _, bit in branches) if is_once else 0,
                first_end=first_end,
                origin=origin,
            )
        )
        fragment = self._leaf(tables.LOOP, number)
        return fragment._replace(nullable=low == 0 and not required)


def _num_literal(expr: ir.Expr) -> int:
    """How many bytes an expression begins with that are known and are nowhere else."""
    while isinstance(expr, ir.Seq) and expr.parts:
        expr = expr.parts[0]
    return len(expr.value) if isinstance(expr, ir.Literal) else 0


def _bits(expr: ir.Expr) -> int:
    """The bytes of a `is_single` expression, one bit each."""
    if isinstance(expr, ir.Literal):
        return 1 << expr.value[0]
    bits = 0
    for low, high in expr.ranges if isinstance(expr, ir.ByteSet) else ():
        if not 0 <= low <= high <= 255:
            raise GrammarError(f"a byte is in 0..255, but got {low}..{high}")
        bits |= (1 << (high + 1)) - (1 << low)
    return bits
