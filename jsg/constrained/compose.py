"""Puts grammars together into one."""

from collections.abc import Callable

from jsg.constrained.ir import (
    Alt,
    Automaton,
    Bag,
    BagItem,
    ByteSet,
    Call,
    Chars,
    Expr,
    Grammar,
    Literal,
    Repeat,
    Seq,
    Words,
    seq,
)


def merge_rules(grammar: Grammar, prefix: str) -> tuple[str, dict[str, Expr]]:
    """The grammar's rules under names that begin with `prefix`, and the new name of its start rule."""
    names = {name: prefix + name for name in grammar.rules}
    rename = CallRewriter(lambda name: Call(names.get(name, prefix + name)))
    return prefix + grammar.start, {names[name]: rename(expr) for name, expr in grammar.rules.items()}


class CallRewriter:
    """Gives an expression with something else in place of every call. What is shared stays shared."""

    def __init__(self, in_place_of: Callable[[str], Expr]):
        """Makes one; `in_place_of` gives what stands for a call of a rule."""
        self._in_place_of = in_place_of
        # By identity: equal expressions may be large to compare. The expressions are kept, so ids stay theirs.
        self._done: dict[int, tuple[Expr, Expr]] = {}

    def __call__(self, expr: Expr) -> Expr:
        """The expression, rewritten."""
        match expr:
            case Literal() | ByteSet() | Chars() | Words():
                return expr
            case Call(rule):
                return self._in_place_of(rule)
        known = self._done.get(id(expr))
        if known is None:
            known = self._done[id(expr)] = (expr, self._rewrite(expr))
        return known[1]

    def _rewrite(self, expr: Seq | Alt | Repeat | Bag | Automaton) -> Expr:
        match expr:
            case Seq(parts):
                return seq(*map(self, parts))
            case Alt(options):
                return Alt(tuple(map(self, options)))
            case Repeat(item, least, most, separator):
                return Repeat(self(item), least, most, self(separator))
            case Bag(items, separator, least, most):
                rewritten = tuple(BagItem(self(item.expr), item.is_once, item.is_required) for item in items)
                return Bag(rewritten, self(separator), least, most)
            case Automaton(edges, accepting):
                return Automaton(
                    tuple(tuple((self(label), target) for label, target in state) for state in edges), accepting
                )
