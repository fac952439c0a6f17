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
)


def merge_rules(grammar: Grammar, prefix: str) -> tuple[str, dict[str, Expr]]:
    """The grammar's rules under names that begin with `prefix`, and the new name of its start rule."""
    names = {name: prefix + name for name in grammar.rules}
    rename = Renamer(lambda name: names.get(name, prefix + name))
    return prefix + grammar.start, {names[name]: rename(expr) for name, expr in grammar.rules.items()}


class Renamer:
    """Gives an expression with the rules it calls renamed. What is shared stays shared."""

    def __init__(self, new_name: Callable[[str], str]):
        self._new_name = new_name
        # By identity: equal expressions may be large to compare. The expressions are kept, so ids stay theirs.
        self._done: dict[int, tuple[Expr, Expr]] = {}

    def __call__(self, expr: Expr) -> Expr:
        """The expression, renamed."""
        match expr:
            case Literal() | ByteSet() | Chars() | Words():
                return expr
            case Call(rule):
                return Call(self._new_name(rule))
        known = self._done.get(id(expr))
        if known is None:
            known = self._done[id(expr)] = (expr, self._rename(expr))
        return known[1]

    def _rename(self, expr: Seq | Alt | Repeat | Bag | Automaton) -> Expr:
        match expr:
            case Seq(parts):
                return Seq(tuple(map(self, parts)))
            case Alt(options):
                return Alt(tuple(map(self, options)))
            case Repeat(item, least, most, separator):
                return Repeat(self(item), least, most, self(separator))
            case Bag(items, separator, least, most):
                renamed = tuple(BagItem(self(item.expr), item.is_once, item.is_required) for item in items)
                return Bag(renamed, self(separator), least, most)
            case Automaton(edges, accepting):
                return Automaton(
                    tuple(tuple((self(label), target) for label, target in state) for state in edges), accepting
                )
