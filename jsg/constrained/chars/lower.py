"""Turns expressions over characters into expressions over bytes.

The caller tells `lower` how to encode a set of characters. In plain text the encoding is `utf8`; inside a JSON string a
character may also be escaped.
"""

import itertools
from collections.abc import Callable, Sequence

from jsg.constrained.ir import (
    EMPTY,
    NEVER,
    Alt,
    CharRanges,
    Chars,
    Expr,
    Literal,
    Repeat,
    Seq,
    Words,
    either,
    seq,
    with_parts,
)
from jsg.constrained.utf8 import utf8


def lower(expr: Expr, encode: Callable[[CharRanges], Expr] = utf8) -> Expr:
    """The expression with `encode` applied to the set of every `Chars`. Neighbouring literals are joined.

    An object that occurs several times in `expr` becomes one object in the result.
    """
    # The keys are identities, because to hash a deep expression is to walk through it. `expr` keeps its parts alive.
    done: dict[int, Expr] = {}

    def lowered(part: Expr) -> Expr:
        known = done.get(id(part))
        if known is None:
            known = done[id(part)] = changed(part)
        return known

    def changed(part: Expr) -> Expr:
        match part:
            case Chars(ranges):
                return encode(ranges)
            case Seq(parts):
                return _join([lowered(each) for each in parts])
            case Alt(options):
                return _merge([lowered(option) for option in options])
            case Repeat(item, least) if lowered(item) == NEVER:
                return EMPTY if least == 0 else NEVER
            case _:
                return with_parts(part, lowered)

    return lowered(expr)


def _join(parts: Sequence[Expr]) -> Expr:
    """The parts in a row, with neighbouring literals joined."""
    joined: list[Expr] = []
    row = seq(*parts)
    items = row.parts if isinstance(row, Seq) else (row,)
    for _, group in itertools.groupby(items, lambda part: isinstance(part, Literal)):
        neighbours = list(group)
        texts = [part.value for part in neighbours if isinstance(part, Literal)]
        joined.extend([Literal(b"".join(texts))] if texts else neighbours)
    return joined[0] if len(joined) == 1 else Seq(tuple(joined))


def _merge(options: Sequence[Expr]) -> Expr:
    """Any of the options, with all literals merged into one set of words."""
    words: set[bytes] = set()
    others: list[Expr] = []
    has_empty = False
    whole = either(*options)
    for option in whole.options if isinstance(whole, Alt) else (whole,):
        if isinstance(option, Literal):
            words.add(option.value)
        elif isinstance(option, Words):
            words.update(option.words)
        elif option == EMPTY:
            has_empty = True
        else:
            others.append(option)
    if len(words) > 1:
        others.append(Words(tuple(sorted(words))))
    elif words:
        others.append(Literal(words.pop()))
    if has_empty:
        others.append(EMPTY)
    return either(*others)
