"""Puts the rules of several grammars together into one grammar."""

from collections.abc import Callable

from jsg.constrained.ir import Call, Expr, Grammar, with_parts


def merge_rules(grammar: Grammar, prefix: str) -> tuple[str, dict[str, Expr]]:
    """The grammar's rules under names that begin with `prefix`, and the new name of its start rule."""
    names = {name: prefix + name for name in grammar.rules}
    rename = CallRewriter(lambda name: Call(names.get(name, prefix + name)))
    return prefix + grammar.start, {names[name]: rename(expr) for name, expr in grammar.rules.items()}


class CallRewriter:
    """Replaces every call in an expression. Parts that were shared stay shared."""

    def __init__(self, in_place_of: Callable[[str], Expr]):
        """Makes a rewriter; `in_place_of` gives the replacement of a call of a rule."""
        self._in_place_of = in_place_of
        # By identity: equal expressions may be large to compare. The expressions are kept, so ids stay theirs.
        self._done: dict[int, tuple[Expr, Expr]] = {}

    def __call__(self, expr: Expr) -> Expr:
        """The expression, rewritten."""
        if isinstance(expr, Call):
            return self._in_place_of(expr.rule)
        known = self._done.get(id(expr))
        if known is None:
            known = self._done[id(expr)] = (expr, with_parts(expr, self))
        return known[1]
