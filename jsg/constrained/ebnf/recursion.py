"""Turns left recursion into repeats.

The rule `sum ::= sum "+" term | term` calls itself before it has read a byte, and a machine that enters it never reads
one. The rule `sum ::= term ("+" term)*` matches the same texts. The rewriting also works for rules that call each other
in a circle, and where what comes before the call may be empty. A circle that cannot be rewritten is refused with the
names of its rules.
"""

from collections.abc import Collection
from typing import final

from jsg.constrained.automata import components, is_cyclic
from jsg.constrained.build.analysis import Facts
from jsg.constrained.ebnf.lexer import PARAM
from jsg.constrained.ir import EMPTY, NEVER, Alt, Call, Expr, Repeat, Seq, either, parts_of, seq
from jsg.constrained.limits import Limits, check
from jsg.errors import GrammarError

_MAX_EMPTY_PARTS = 16

Head = tuple[str, Expr]
"""A rule that is called before anything is read, and the expression that follows the call."""


@final
class LeftRecursion:
    """Rewrites rules until none calls itself before it has read something.

    Invariants: every rule matches the same texts all the time, so a rule that may be empty stays so.
    """

    def __init__(self, facts: Facts, limits: Limits):
        self._exprs = dict(facts.rules)
        self._empty_rules = {name for name, expr in facts.rules.items() if facts.is_nullable(expr)}
        self._limits = limits
        self._work = 0
        # By identity, with the expressions so that identities stay theirs.
        self._nullable: dict[int, tuple[Expr, bool]] = {id(e): (e, facts.is_nullable(e)) for e in facts.expressions}
        self._left: dict[int, tuple[Expr, frozenset[str]]] = {}

    def removed(self) -> dict[str, Expr]:
        """The rules without left recursion.

        Raises:
            GrammarError: A circle cannot be rewritten, or a rule in it never ends.
        """
        edges = self._edges()
        circles = [names for names in components(edges) if is_cyclic(names, edges)]
        for names in circles:
            position = {name: i for i, name in enumerate(self._exprs)}
            self._solve(sorted(names, key=position.__getitem__))
        if circles:
            edges = self._edges()
            for names in components(edges):
                if is_cyclic(names, edges):
                    raise _refusal(names)
        return self._exprs

    def _edges(self) -> dict[str, frozenset[str]]:
        return {name: self._left_calls(expr) for name, expr in self._exprs.items()}

    def _is_nullable(self, expr: Expr) -> bool:
        known = self._nullable.get(id(expr))
        if known is None:
            match expr:
                case Seq(parts):
                    result = all(map(self._is_nullable, parts))
                case Alt(options):
                    result = any(map(self._is_nullable, options))
                case Repeat(item, least):
                    result = least == 0 or self._is_nullable(item)
                case Call(rule):
                    result = rule in self._empty_rules
                case _:
                    result = False
            known = self._nullable[id(expr)] = (expr, result)
        return known[1]

    def _left_calls(self, expr: Expr) -> frozenset[str]:
        """Rules that may be called before the expression has read anything."""
        known = self._left.get(id(expr))
        if known is None:
            found: frozenset[str] = frozenset()
            match expr:
                case Call(rule):
                    found = frozenset((rule,))
                case Seq(parts):
                    for part in parts:
                        found |= self._left_calls(part)
                        if not self._is_nullable(part):
                            break
                case Alt() | Repeat():
                    found = frozenset().union(*map(self._left_calls, parts_of(expr)))
                case _:
                    pass
            known = self._left[id(expr)] = (expr, found)
        return known[1]

    def _solve(self, names: list[str]) -> None:
        """Rewrites the rules of one circle: none then begins with a call of itself or of a rule before it."""
        circle = frozenset(names)
        for i, name in enumerate(names):
            earlier = set(names[:i])
            heads, others = self._split(self._exprs[name], circle)
            waiting = heads
            heads = []
            while waiting:
                rule, rest = waiting.pop()
                self._spend()
                if rule not in earlier:
                    heads.append((rule, rest))
                    continue
                more, other = self._split(seq(self._exprs[rule], rest), circle)
                waiting.extend(more)
                others = either(others, other)
            self._exprs[name] = self._without_own_heads(name, heads, others)

    def _without_own_heads(self, name: str, heads: list[Head], others: Expr) -> Expr:
        """The expression of the rule `name`, which begins with one of `heads` or is one of `others`."""
        later = [(rule, rest) for rule, rest in heads if rule != name]
        first = either(others, *(seq(Call(rule), rest) for rule, rest in later))
        loops = [self._not_empty(rest, frozenset()) for rule, rest in heads if rule == name]
        loop = either(*loops)
        if first == NEVER:
            raise GrammarError(
                f"{PARAM}: a rule must have a way to end, but {name!r} does nothing but call itself first; add an "
                "alternative without that call",
                PARAM,
            )
        if loop == NEVER:
            return first
        # `e ::= e "+" e | x` is `x ("+" e)*`. But there the e at the end could take what the loop takes too, and each
        # further "+" would double the ways to read a text. Whatever is there is x with the loop, whose turns are
        # turns of the outer loop as well: so x alone will do.
        if later:
            return seq(first, Repeat(loop, 0, None))
        if isinstance(first, Call):
            return seq(first, Repeat(self._with_tail(loop, name, first.rule), 0, None))
        base = f"{name} (first)"
        if name in self._empty_rules and self._is_nullable(first):
            self._empty_rules.add(base)
        self._exprs[base] = self._with_tail(first, name, base)
        return seq(Call(base), Repeat(self._with_tail(loop, name, base), 0, None))

    def _with_tail(self, expr: Expr, name: str, other: str) -> Expr:
        """The expression with a call of `other` in place of a call of `name` at its end."""
        match expr:
            case Call(rule) if rule == name:
                return Call(other)
            case Seq(parts) if parts:
                last = self._with_tail(parts[-1], name, other)
                return expr if last is parts[-1] else seq(*parts[:-1], last)
            case Alt(options):
                return Alt(tuple(self._with_tail(option, name, other) for option in options))
            case _:
                return expr

    def _split(self, expr: Expr, circle: frozenset[str]) -> tuple[list[Head], Expr]:
        """Ways to begin with a call of a rule of the circle, and an expression for all other ways."""
        self._spend()
        if not self._left_calls(expr) & circle:
            return [], expr
        match expr:
            case Call(rule):
                return [(rule, EMPTY)], NEVER
            case Alt(options):
                split = [self._split(option, circle) for option in options]
                return [head for heads, _ in split for head in heads], either(*(other for _, other in split))
            case Seq(parts):
                self._spend(len(parts))
                heads, other = self._split(parts[0], circle)
                rest = seq(*parts[1:])
                heads = [(rule, seq(after, rest)) for rule, after in heads]
                if not (self._is_nullable(other) and self._left_calls(rest) & circle):
                    return heads, seq(other, rest)
                more, rest_other = self._split(rest, circle)
                return [*heads, *more], either(seq(self._not_empty(other, circle), rest), rest_other)
            case Repeat(item, least, most):
                if self._is_nullable(item):
                    item, least = self._not_empty(item, circle), 0
                if most == 0:
                    return [], EMPTY
                more_items = EMPTY if most == 1 else Repeat(item, max(0, least - 1), None if most is None else most - 1)
                heads, other = self._split(item, circle)
                heads = [(rule, seq(after, more_items)) for rule, after in heads]
                return heads, either(seq(other, more_items), *([EMPTY] if least == 0 else []))
            case _:
                raise _refusal(circle)

    def _not_empty(self, expr: Expr, open_rules: frozenset[str]) -> Expr:
        """The same texts without the empty one."""
        self._spend()
        if not self._is_nullable(expr):
            return expr
        match expr:
            case Seq(parts):
                check(len(parts), _MAX_EMPTY_PARTS, "parts in a row that may all be empty in a left recursion", PARAM)
                return either(
                    *(seq(self._not_empty(part, open_rules), *parts[i + 1 :]) for i, part in enumerate(parts))
                )
            case Alt(options):
                return either(*(self._not_empty(option, open_rules) for option in options))
            case Repeat(item, _, most):
                return NEVER if most == 0 else Repeat(self._not_empty(item, open_rules), 1, most)
            case Call(rule) if rule not in open_rules:
                return self._not_empty(self._exprs[rule], open_rules | {rule})
            case Call(rule):
                raise _refusal([rule])
            case _:
                raise AssertionError(f"{type(expr).__name__} is never empty")

    def _spend(self, amount: int = 1) -> None:
        self._work += amount
        check(self._work, self._limits.positions // 4, "steps to remove its left recursion", PARAM)


def _refusal(names: Collection[str]) -> GrammarError:
    shown = " → ".join([*sorted(names)[:6], *(["…"] if len(names) > 6 else [])])
    return GrammarError(
        f"{PARAM}: no rule may call itself before it has read anything, but {shown} does and cannot be rewritten; "
        "write it with a repeat, such as term (op term)*",
        PARAM,
    )
