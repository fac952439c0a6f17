"""UTF-8: the bytes that may follow each other in a character, and the bytes of a set of characters.

`by_rest` splits numbers into leading and remaining digits. UTF-8 is written in groups of six bits that way, and
`schema/json_text.py` writes hexadecimal digits with it.
"""

import functools
import itertools
import operator

from jsg.constrained.ir import NEVER, ByteSet, CharRanges, Expr, Literal, alt, literal, seq

Rest = tuple[tuple[int, int], ...]
"""Ranges of the bytes that a character still lacks."""

_TAIL = (0x80, 0xBF)
_LEADS: tuple[tuple[tuple[int, int], Rest], ...] = (
    ((0xC2, 0xDF), (_TAIL,)),
    ((0xE0, 0xE0), ((0xA0, 0xBF), _TAIL)),
    ((0xE1, 0xEC), (_TAIL, _TAIL)),
    ((0xED, 0xED), ((0x80, 0x9F), _TAIL)),
    ((0xEE, 0xEF), (_TAIL, _TAIL)),
    ((0xF0, 0xF0), ((0x90, 0xBF), _TAIL, _TAIL)),
    ((0xF1, 0xF3), (_TAIL, _TAIL, _TAIL)),
    ((0xF4, 0xF4), ((0x80, 0x8F), _TAIL, _TAIL)),
)
"""The first bytes of characters of several bytes, and what a character lacks after each. Surrogates and overlong
spellings are left out (RFC 3629, section 4)."""
_CONTINUATION = ByteSet((_TAIL,))
_BLOCKS = (  # first and last code point of each length, and what is added to the bits of the lead byte
    (0x80, 0x7FF, 0xC0),
    (0x800, 0xFFFF, 0xE0),
    (0x10000, 0x10FFFF, 0xF0),
)


def next_bytes(rest: Rest) -> list[tuple[int, int, Rest]]:
    """Ranges of bytes that may come where a character lacks `rest`, ascending, and what it lacks after them."""
    if rest:
        return [(*rest[0], rest[1:])]
    ranges: list[tuple[int, int, Rest]] = [(*lead, tail) for lead, tail in _LEADS]
    return [(0x00, 0x7F, ()), *ranges]


@functools.lru_cache(maxsize=4096)
def utf8(ranges: CharRanges) -> Expr:
    """The UTF-8 of one character out of the set; NEVER for the empty set. Surrogates must not be in it."""
    if not ranges:
        return NEVER
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return literal(chr(ranges[0][0]))
    ascii_part = _clip(ranges, 0, 0x7F)
    options: list[Expr] = [_byte_set(ascii_part, 0)] if ascii_part else []
    # complete[n]: beginnings after which any n continuation bytes may come. They share these bytes, so that the set of
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

    Beginnings that share their continuation bytes with others are appended to `complete` and not returned.
    """
    if depth == 0:
        return [_byte_set(values, base)]
    full = ((0, (1 << 6 * depth) - 1),)
    options: list[Expr] = []
    for rest, leads in by_rest(values, 1 << 6 * depth).items():
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


def by_rest(values: CharRanges, size: int) -> dict[CharRanges, CharRanges]:
    """The quotients of the values by `size`, grouped by the set of remainders that may be with them."""
    spans: list[tuple[int, int, tuple[int, int]]] = []  # first and last quotient, and an interval of remainders
    for low, high in values:
        (first, start), (final, end) = divmod(low, size), divmod(high, size)
        if first == final:
            spans.append((first, first, (start, end)))
            continue
        if start:
            spans.append((first, first, (start, size - 1)))
            first += 1
        if end < size - 1:
            if first < final:
                spans.append((first, final - 1, (0, size - 1)))
            spans.append((final, final, (0, end)))
        else:
            spans.append((first, final, (0, size - 1)))
    groups: dict[CharRanges, list[tuple[int, int]]] = {}
    for first, same in itertools.groupby(spans, key=operator.itemgetter(0)):
        intervals = list(same)
        leads = groups.setdefault(tuple([interval for _, _, interval in intervals]), [])
        final = intervals[0][1]
        if leads and leads[-1][1] + 1 == first:
            leads[-1] = (leads[-1][0], final)
        else:
            leads.append((first, final))
    return {rest: tuple(leads) for rest, leads in groups.items()}
