"""Expressions over characters as expressions over bytes.

`lower` is told how a set of characters is written where the expression stands: `utf8` in plain text, something longer
inside a JSON string.
"""

from collections.abc import Callable, Sequence

from jsg.constrained.ir import (
    EMPTY,
    NEVER,
    Alt,
    Automaton,
    Bag,
    BagItem,
    CharRanges,
    Chars,
    Expr,
    Literal,
    Repeat,
    Seq,
    Words,
    seq,
)
from jsg.constrained.utf8 import utf8


def lower(expr: Expr, encode: Callable[[CharRanges], Expr] = utf8) -> Expr:
    """The expression with every `Chars` replaced by what `encode` makes of its set; neighbouring literals are joined.

    What stands in several places of `expr` as one object is one object in the result.
    """
    return _lower(expr, encode, {})


def _lower(expr: Expr, encode: Callable[[CharRanges], Expr], done: dict[int, Expr]) -> Expr:
    # By identity: the hash of a deep expression costs as much as a walk through it. `expr` as a whole keeps all alive.
    known = done.get(id(expr))
    if known is not None:
        return known
    result: Expr
    match expr:
        case Chars(ranges):
            result = encode(ranges)
        case Seq(parts):
            result = _join([_lower(part, encode, done) for part in parts])
        case Alt(options):
            result = _merge([_lower(option, encode, done) for option in options])
        case Repeat(item, least, most, separator):
            result = _repeat(_lower(item, encode, done), least, most, _lower(separator, encode, done))
        case Bag(items, separator, least, most):
            lowered = [BagItem(_lower(item.expr, encode, done), item.is_once, item.is_required) for item in items]
            result = Bag(tuple(lowered), _lower(separator, encode, done), least, most)
        case Automaton(edges, accepting):
            # There are far more edges than labels.
            labels = {id(label): label for row in edges for label, _ in row}
            lowered_labels = {key: _lower(label, encode, done) for key, label in labels.items()}
            kept = {key: label for key, label in lowered_labels.items() if label != NEVER}
            rows = [tuple([(kept[id(label)], to) for label, to in row if id(label) in kept]) for row in edges]
            result = Automaton(tuple(rows), accepting)
        case _:
            result = expr
    done[id(expr)] = result
    return result


def _repeat(item: Expr, least: int, most: int | None, separator: Expr) -> Expr:
    if item == NEVER:
        return EMPTY if least == 0 else NEVER
    return Repeat(item, least, most, separator)


def _join(parts: Sequence[Expr]) -> Expr:
    """The parts in a row, with neighbouring literals as one."""
    joined: list[Expr] = []
    run: list[bytes] = []
    row = seq(*parts)
    for part in row.parts if isinstance(row, Seq) else (row,):
        if isinstance(part, Literal):
            run.append(part.value)
            continue
        if run:
            joined.append(Literal(b"".join(run)))
            run = []
        joined.append(part)
    if run:
        joined.append(Literal(b"".join(run)))
    return joined[0] if len(joined) == 1 else Seq(tuple(joined))


def _merge(options: Sequence[Expr]) -> Expr:
    """Any of the options, with those that are literals as one set of words."""
    words: set[bytes] = set()
    others: list[Expr] = []
    has_empty = False
    flat: list[Expr] = []
    for option in options:
        flat.extend(option.options if isinstance(option, Alt) else (option,))
    for option in flat:
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
    return others[0] if len(others) == 1 else Alt(tuple(others))
