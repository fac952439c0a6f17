"""Puts small rules in the places where they are called, so that they become part of their caller's automaton.

A call costs little while a text is read. But where two rules may begin with the same byte, the machine follows both at
once. In place, they share their beginning as any other alternatives do.
"""

from collections.abc import Mapping
from typing import final

from jsg.constrained.automata import components, is_cyclic
from jsg.constrained.ir import ByteSet, Call, CallRewriter, Expr, Literal, Repeat, Seq, Words, depth_of, parts_of

_MAX_SIZE = 256
_MAX_SHARED_SIZE = 64
_MAX_DELIMITED_SIZE = 8
_MAX_TOTAL = 20_000
_MAX_DEPTH = 40
_MAX_CIRCLE = 100


def inline_rules(rules: Mapping[str, Expr], start: str) -> dict[str, Expr]:
    """The rules that are still called when small ones are put in place. Of rules in a circle at least one stays.

    A rule that begins with a text of its own (a string and its quote) and is called from several places stays: nothing
    competes with it, and its states serve all places.
    """
    return _Inliner(rules).run(start)


@final
class _Inliner:
    """Goes from the rules that are called to those that call.

    Invariant: `_done` holds every rule that was visited, rewritten. Sizes are approximate numbers of positions.
    """

    def __init__(self, rules: Mapping[str, Expr]):
        self._rules = rules
        self._calls = {name: _count_calls(expr) for name, expr in rules.items()}
        self._uses: dict[str, int] = {}
        for calls in self._calls.values():
            for name, number in calls.items():
                self._uses[name] = self._uses.get(name, 0) + number
        self._done: dict[str, Expr] = {}
        self._in_place: dict[str, Expr] = {}
        self._total = 0

    def run(self, start: str) -> dict[str, Expr]:
        """All rules that the start rule still leads to."""
        rewrite = CallRewriter(lambda name: self._in_place.get(name, Call(name)))
        for names in components(self._calls):
            cyclic = is_cyclic(names, self._calls)
            for name in names:
                self._done[name] = rewrite(self._rules[name])
            if not cyclic:
                self._place(names[0])
            elif len(names) <= _MAX_CIRCLE:
                self._fold(names)
        kept: dict[str, Expr] = {}
        todo = [start]
        while todo:
            name = todo.pop()
            if name not in kept:
                kept[name] = self._done[name]
                todo.extend(reversed(_count_calls(kept[name])))
        return kept

    def _place(self, name: str) -> None:
        """Notes whether a rule outside circles is put in place of its calls."""
        if self._is_worth(self._done[name], self._uses.get(name, 0), _MAX_SIZE):
            self._in_place[name] = self._done[name]

    def _fold(self, names: list[str]) -> None:
        """Puts rules of a circle in place in its other rules, until each that is left calls itself or is too large."""
        inside = {name: sum(self._calls[other].get(name, 0) for other in names) for name in names}
        left = dict.fromkeys(sorted(names, key=lambda name: _size(self._done[name], _MAX_TOTAL)))
        placed: list[str] = []
        for name in list(left):
            expr = self._done[name]
            calls = {other: _count_calls(self._done[other]) for other in left}
            uses = sum(of_other.get(name, 0) for of_other in calls.values())
            uses += self._uses[name] - inside[name]
            if name in calls[name] or not self._is_worth(expr, uses, _MAX_SIZE if uses == 1 else _MAX_SHARED_SIZE):
                continue
            del left[name]
            rewrite = CallRewriter(lambda rule, name=name, expr=expr: expr if rule == name else Call(rule))
            for other in (*left, *placed):
                self._done[other] = rewrite(self._done[other])
            placed.append(name)
        self._in_place |= {name: self._done[name] for name in placed}

    def _is_worth(self, expr: Expr, uses: int, limit: int) -> bool:
        """Whether a rule may be put in place of its calls; what that adds is then counted."""
        size = _size(expr, limit + 1)
        if uses > 1 and _is_delimited(expr):
            limit = _MAX_DELIMITED_SIZE
        if size > limit or depth_of(expr) > _MAX_DEPTH or self._total + size * uses > _MAX_TOTAL:
            return False
        self._total += size * uses
        return True


def _count_calls(expr: Expr) -> dict[str, int]:
    """How often each rule is called, in the order of the first calls."""
    calls: dict[str, int] = {}
    todo = [expr]
    while todo:
        part = todo.pop()
        if isinstance(part, Call):
            calls[part.rule] = calls.get(part.rule, 0) + 1
        todo.extend(reversed(list(parts_of(part))))
    return calls


def _size(expr: Expr, enough: int) -> int:
    """About how many positions an expression has. Where they are more than `enough`, counting stops there."""
    total = 0
    todo = [(expr, 1)]
    while todo and total < enough:
        part, times = todo.pop()
        match part:
            case Literal(value):
                total += times * len(value)
            case Words(words):
                total += times * sum(map(len, words))
            case ByteSet() | Call():
                total += times
            case Repeat(item, least, most):
                todo.append((item, times * max(1, min(least if most is None else most, 8))))
            case _:
                total += 1  # so that no pile of empty parts goes on for ever
                todo.extend((inner, times) for inner in parts_of(part))
    return total


def _is_delimited(expr: Expr) -> bool:
    """Whether all texts of an expression begin with one literal."""
    return isinstance(expr, Literal) or (isinstance(expr, Seq) and bool(expr.parts) and _is_delimited(expr.parts[0]))
