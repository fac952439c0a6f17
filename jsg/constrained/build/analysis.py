"""Finds out for each expression, before anything is built, whether it may be empty and whether it matches any text.

Both properties are least fixpoints over all rules. They are found in time linear in the size of the grammar: every
expression is a node, and every way in which the property can hold for it is a clause.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Set
from types import MappingProxyType

from jsg.constrained import ir
from jsg.constrained.automata import live_states
from jsg.constrained.limits import Limits, check
from jsg.errors import GrammarError


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """Facts about every expression that the start rule reaches. Expressions are compared by identity.

    Attributes:
        rules: The rules that the start rule reaches, in the order in which they were found.
        nullable: Identities of expressions that match the empty text.
        productive: Identities of expressions that match some text.
        expressions: All expressions. They are kept alive here, so that no other object gets the identity of one.
        built: The rules that are built already, in the library's order, each with whether it may be empty. Their
            expressions are not among the others.
        live: For automata, by identity, the states on a way from state 0 to an accepting one; an automaton of which
            that is not known yet is left out.
    """

    rules: dict[str, ir.Expr]
    nullable: frozenset[int]
    productive: frozenset[int]
    expressions: list[ir.Expr]
    built: Mapping[str, bool]
    live: Mapping[int, Set[int]]

    def is_nullable(self, expr: ir.Expr) -> bool:
        """Whether an expression matches the empty text."""
        return id(expr) in self.nullable

    def is_productive(self, expr: ir.Expr) -> bool:
        """Whether an expression matches some text."""
        return id(expr) in self.productive

    def is_rule_nullable(self, name: str) -> bool:
        """Whether a rule matches the empty text."""
        return self.built[name] if name in self.built else self.is_nullable(self.rules[name])

    def is_rule_productive(self, name: str) -> bool:
        """Whether a rule matches some text."""
        return name in self.built or self.is_productive(self.rules[name])


def analyse(grammar: ir.Grammar, limits: Limits, built: Mapping[str, bool] = MappingProxyType({})) -> Facts:
    """The facts of a grammar. `built` has the rules of its library that are built already; see `Facts`.

    Raises:
        GrammarError: A rule that is called does not exist, or an expression cannot be built.
    """
    rules, expressions, index = _reachable(grammar, limits, built)
    built = {name: is_nullable for name, is_nullable in built.items() if name in rules}
    roots = {name: index[id(expr)] for name, expr in rules.items() if name not in built}
    roots |= {name: number for number, name in enumerate(built, len(expressions))}
    clauses = _Properties(expressions, index, roots, built)
    nullable, productive = clauses.solve()
    facts = Facts(rules, nullable, productive, expressions, built, clauses.live)
    _check_empty_parts(facts)
    return facts


def _reachable(
    grammar: ir.Grammar, limits: Limits, built: Collection[str]
) -> tuple[dict[str, ir.Expr], list[ir.Expr], dict[int, int]]:
    """The rules that the start rule reaches, the expressions of those that are not built, and their numbers."""
    rules: dict[str, ir.Expr] = {}
    expressions: list[ir.Expr] = []
    index: dict[int, int] = {}
    num_edges = 0
    wanted = [(grammar.start, "the start")]
    while wanted:
        name, caller = wanted.pop()
        if name in rules:
            continue
        if name not in grammar.rules:
            raise GrammarError(f"rule {name!r}, which {caller} calls, does not exist; define it")
        rules[name] = grammar.rules[name]
        if name in built and grammar.library is not None:
            rules |= {callee: grammar.rules[callee] for callee in grammar.library.reached[name]}
            continue
        todo = [rules[name]]
        while todo:
            expr = todo.pop()
            if id(expr) in index:
                continue
            index[id(expr)] = len(expressions)
            expressions.append(expr)
            if len(expressions) > 4 * limits.positions:
                check(len(expressions), 4 * limits.positions, "parts")
            if isinstance(expr, ir.Automaton):
                num_edges += sum(map(len, expr.edges))
                check(num_edges, limits.positions, f"edges of automata (in rule {name!r})")  # each takes its time
                todo.extend({id(label): label for row in expr.edges for label, _ in row}.values())
                continue
            if isinstance(expr, ir.Call):
                wanted.append((expr.rule, f"rule {name!r}"))
            elif not isinstance(expr, _LEAVES):
                todo.extend(ir.parts_of(expr))
    return rules, expressions, index


class _Properties:
    """The clauses that say when an expression may be empty, and when it matches something.

    Attributes:
        solid: The nodes of which both are known from their parts: they match something, and it is never empty. Most
            expressions are, and cost no clause.
        live: See `Facts`. It is known of the automata whose labels are solid.
    """

    def __init__(
        self,
        expressions: list[ir.Expr],
        index: Mapping[int, int],
        roots: Mapping[str, int],
        built: Mapping[str, bool],
    ):
        num_nodes = len(expressions) + len(built)
        self.empty, self.some = _Clauses(num_nodes), _Clauses(num_nodes)
        self.solid = {roots[name] for name, is_nullable in built.items() if not is_nullable}
        self.live: dict[int, Set[int]] = {}
        self._expressions, self._index, self._roots = expressions, index, roots
        self._added: set[int] = set()
        for name, is_nullable in built.items():
            if is_nullable:
                self.empty.add(roots[name])
                self.some.add(roots[name])
        others: list[int] = []
        for i, expr in enumerate(expressions):
            if _is_solid_leaf(expr) or (isinstance(expr, ir.Call) and roots[expr.rule] in self.solid):
                self.solid.add(i)
            else:
                others.append(i)
        for i in reversed(others):  # mostly parts before the whole
            self._add(i)

    def solve(self) -> tuple[frozenset[int], frozenset[int]]:
        """The identities of the expressions that may be empty, and of those that match something."""
        ids = [*map(id, self._expressions)]
        empty, some = self.empty.solve(), self.some.solve(self.solid)
        return frozenset([ids[i] for i in empty if i < len(ids)]), frozenset([ids[i] for i in some if i < len(ids)])

    def _add(self, i: int) -> None:
        """Adds the clauses of an expression."""
        if i in self._added or i in self.solid:
            return
        self._added.add(i)
        expr, index, solid = self._expressions[i], self._index, self.solid
        match expr:
            case ir.Chars():
                raise GrammarError("a set of characters must be lowered to bytes before a grammar is built")
            case ir.Seq(parts):
                others = [number for part in parts if (number := index[id(part)]) not in solid]
                if parts and not others:
                    solid.add(i)
                    return
                self.some.add(i, others)
                if len(others) == len(parts):
                    self.empty.add(i, others)
            case ir.Alt(options):
                others = [number for option in options if (number := index[id(option)]) not in solid]
                if options and not others:
                    solid.add(i)
                    return
                if len(others) < len(options):
                    self.some.add(i)
                for other in others:
                    self.empty.add(i, [other])
                    self.some.add(i, [other])
            case ir.Repeat(item, low, high, separator):
                if high is None or low <= high:
                    body = [[], [index[id(item)]], [index[id(item)], index[id(separator)]]][min(low, 2)]
                    self.empty.add(i, body)
                    self.some.add(i, body)
            case ir.Bag():
                _add_bag(expr, i, index, self.empty, self.some)
            case ir.Automaton():
                self._add_automaton(expr, i)
            case ir.Call(rule):
                if self._roots[rule] in solid:
                    solid.add(i)
                    return
                self.empty.add(i, [self._roots[rule]])
                self.some.add(i, [self._roots[rule]])
            case _:
                pass  # a set without bytes or words

    def _add_automaton(self, automaton: ir.Automaton, i: int) -> None:
        some, solid = self.some, self.solid
        if automaton.may_be_empty:
            self.empty.add(i)
        labels = {self._index[id(label)] for row in automaton.edges for label, _ in row}
        for number in labels - solid - self._added:
            self._add(number)  # another automaton has it too
        if labels <= solid:
            rows = with_skips([tuple([target for _, target in row]) for row in automaton.edges], automaton.skips)
            self.live[id(automaton)] = live = set(live_states(rows, automaton.accepting))
            if live and not automaton.may_be_empty:
                solid.add(i)
            elif live:
                some.add(i)
            return
        states = [some.new() for _ in automaton.edges] or [some.new()]
        some.add(i, states[:1])
        for state in automaton.accepting:
            some.add(states[state])
        for state, out in enumerate(automaton.edges):
            for label, target in out:
                number = self._index[id(label)]
                some.add(states[state], [states[target]] if number in solid else [number, states[target]])
        for state, target in automaton.skips:
            some.add(states[state], [states[target]])


def _is_solid_leaf(expr: ir.Expr) -> bool:
    """Whether an expression without parts matches something; none of these is empty."""
    if isinstance(expr, ir.ByteSet):
        return expr.ranges != ()
    return isinstance(expr, ir.Literal) or (isinstance(expr, ir.Words) and expr.words != ())


def with_skips(rows: list[tuple[int, ...]], skips: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The targets of the edges of each state, and the states to which a text may go on without a byte."""
    for state, target in skips:
        rows[state] += (target,)
    return rows


def _add_bag(bag: ir.Bag, i: int, index: Mapping[int, int], empty: "_Clauses", some: "_Clauses") -> None:
    """A bag may be empty if it needs no item. It matches something if enough of its items do."""
    once = [index[id(item.expr)] for item in bag.items if item.is_once or item.is_required]
    if len(once) > ir.MAX_ONCE:
        raise GrammarError(
            f"a set of items in any order may have at most {ir.MAX_ONCE} items that occur only once, but this one has "
            f"{len(once)}; fix their order"
        )
    required = [index[id(item.expr)] for item in bag.items if item.is_required]
    least = max(bag.min, len(required))
    if bag.max is not None and bag.max < least:
        return
    if least == 0:
        empty.add(i)
        some.add(i)
        return
    needed = required + ([index[id(bag.separator)]] if least > 1 else [])
    if bag.min <= len(required):
        some.add(i, needed)
        return
    enough = some.new()
    some.add(enough, once, bag.min)
    for item in bag.items:
        if not item.is_once and not item.is_required:
            some.add(enough, [index[id(item.expr)]])
    some.add(i, [*needed, enough])


def _check_empty_parts(facts: Facts) -> None:
    """Raises GrammarError where an item of a bag or a label of an automaton may be empty."""
    for expr in facts.expressions:
        if isinstance(expr, ir.Bag) and any(facts.is_nullable(item.expr) for item in expr.items):
            raise GrammarError("an item of a set in any order may not be empty; make it one byte long at least")
        if isinstance(expr, ir.Automaton) and any(facts.is_nullable(label) for label in ir.parts_of(expr)):
            raise GrammarError("a label of an automaton may not be empty; make it one byte long at least")


_LEAVES = (ir.Literal, ir.ByteSet, ir.Words)


class _Clauses:
    """Finds the nodes that are true. A clause makes its head true once enough nodes of its body are true."""

    def __init__(self, num_nodes: int):
        self.num_nodes = num_nodes
        self.heads: list[int] = []
        self.missing: list[int] = []
        self.uses: dict[int, list[int]] = {}

    def new(self) -> int:
        """Adds a node and gives its number."""
        self.num_nodes += 1
        return self.num_nodes - 1

    def add(self, head: int, body: Iterable[int] = (), enough: int | None = None) -> None:
        """Adds a clause: `head` is true if `enough` nodes of `body` are true; without `enough`, all of them."""
        clause, length = len(self.heads), 0
        for node in body:
            if node in self.uses:
                self.uses[node].append(clause)
            else:
                self.uses[node] = [clause]
            length += 1
        self.heads.append(head)
        self.missing.append(length if enough is None else enough)

    def solve(self, known: Iterable[int] = ()) -> set[int]:
        """Every node that is true, those that are known to be so among them."""
        true = {head for head, missing in zip(self.heads, self.missing, strict=True) if missing <= 0}
        true.update(known)
        todo = list(true)
        missing, heads, uses = list(self.missing), self.heads, self.uses
        while todo:
            for clause in uses.get(todo.pop(), ()):
                missing[clause] -= 1
                if missing[clause] == 0 and heads[clause] not in true:
                    true.add(heads[clause])
                    todo.append(heads[clause])
        return true
