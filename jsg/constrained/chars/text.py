"""Characters as bytes: the UTF-8 of a character set, and the lowering of an expression over characters to bytes.

`lower` is told how a set of characters is written where the expression stands: `utf8` in plain text, something longer
inside a JSON string.
"""

import functools
from collections.abc import Callable, Sequence

from jsg.constrained.ir import (
    EMPTY,
    NEVER,
    Alt,
    Automaton,
    Bag,
    BagItem,
    ByteSet,
    CharRanges,
    Chars,
    Expr,
    Literal,
    Repeat,
    Seq,
    Words,
    alt,
    literal,
    seq,
)

_CONTINUATION = ByteSet(((0x80, 0xBF),))
_BLOCKS = (  # first and last code point of each length, and what is added to the bits of the lead byte
    (0x80, 0x7FF, 0xC0),
    (0x800, 0xFFFF, 0xE0),
    (0x10000, 0x10FFFF, 0xF0),
)


@functools.lru_cache(maxsize=4096)
def utf8(ranges: CharRanges) -> Expr:
    """The UTF-8 of one character out of the set; NEVER for the empty set. Surrogates must not be in it."""
    if not ranges:
        return NEVER
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return literal(chr(ranges[0][0]))
    ascii_part = _clip(ranges, 0, 0x7F)
    options: list[Expr] = [_byte_set(ascii_part, 0)] if ascii_part else []
    # complete[n]: beginnings after which any n continuation bytes may stand. They share these bytes, so that the set of
    # all characters takes 14 positions and not 24.
    complete: list[list[Expr]] = [[], [], [], []]
    for length, (low, high, lead) in enumerate(_BLOCKS, 2):
        part = _clip(ranges, low, high)
        if part:
            options.extend(_tails(part, length - 1, lead, (), complete))
    for depth in (3, 2, 1):
        if complete[depth]:
            rest = seq(alt(*complete[depth]), _CONTINUATION)
            (complete[depth - 1] if depth > 1 else options).append(rest)
    return alt(*options)


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


def _clip(ranges: CharRanges, low: int, high: int) -> CharRanges:
    return tuple((max(a, low), min(b, high)) for a, b in ranges if a <= high and b >= low)


def _byte_set(ranges: CharRanges, base: int) -> Expr:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return Literal(bytes([base + ranges[0][0]]))
    return ByteSet(tuple((base + low, base + high) for low, high in ranges))


def _tails(
    values: CharRanges, depth: int, base: int, prefix: tuple[Expr, ...], complete: list[list[Expr]]
) -> list[Expr]:
    """The bytes of `values`: one that is `base` + the upper bits, and `depth` continuation bytes of 6 bits each.

    What is better written with shared continuation bytes is appended to `complete` and not returned.
    """
    if depth == 0:
        return [_byte_set(values, base)]
    full = ((0, (1 << 6 * depth) - 1),)
    options: list[Expr] = []
    for rest, leads in _by_rest(values, depth).items():
        head = _byte_set(leads, base)
        if rest == full and len(prefix) < depth:
            complete[depth].append(seq(*prefix, head))
        elif rest == full:
            options.append(seq(head, *[_CONTINUATION] * depth))
        else:
            shared = _tails(rest, depth - 1, 0x80, (*prefix, head), complete)
            if shared:
                options.append(seq(head, alt(*shared)))
    return options


def _by_rest(values: CharRanges, depth: int) -> dict[CharRanges, CharRanges]:
    """The upper bits of the values, grouped by the set of lower bits that may stand with them."""
    shift = 6 * depth
    last = (1 << shift) - 1
    spans: list[tuple[int, int, tuple[int, int]]] = []  # first and last upper bits, and an interval of lower bits
    for low, high in values:
        first, final = low >> shift, high >> shift
        if first == final:
            spans.append((first, first, (low & last, high & last)))
            continue
        if low & last:
            spans.append((first, first, (low & last, last)))
            first += 1
        if high & last != last:
            if first < final:
                spans.append((first, final - 1, (0, last)))
            spans.append((final, final, (0, high & last)))
        else:
            spans.append((first, final, (0, last)))
    groups: dict[CharRanges, list[tuple[int, int]]] = {}
    position = 0
    while position < len(spans):
        first, final, interval = spans[position]
        rest = [interval]
        position += 1
        while position < len(spans) and spans[position][0] == first:
            rest.append(spans[position][2])
            position += 1
        leads = groups.setdefault(tuple(rest), [])
        if leads and leads[-1][1] + 1 == first:
            leads[-1] = (leads[-1][0], final)
        else:
            leads.append((first, final))
    return {rest: tuple(leads) for rest, leads in groups.items()}
