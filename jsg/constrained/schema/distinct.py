"""Sorts names into disjoint kinds, so that a grammar can count members with different names.

A grammar cannot remember a name, so it cannot see that a name is written twice; a reader of JSON would count such
members once. But a grammar can remember kinds, and two names of different kinds are different names. The first and the
last character of a name decide its kind.
"""

import functools

from jsg.constrained.chars import charset
from jsg.constrained.ir import CharRanges

_FIRST, _LAST = 4, 8
MOST = _FIRST * _LAST
"""The number of kinds, and so the most different names that can be counted."""


@functools.cache
def kinds() -> tuple[str, ...]:
    """One pattern for each kind; exactly one of them matches any name."""
    first, last = (tuple(_characters(part, parts) for part in range(parts)) for parts in (_FIRST, _LAST))
    patterns: list[str] = []
    for one in first:
        for other in last:
            both = charset.intersect(one, other)
            short = f"{_written(both)}|" if both else ""
            empty = "" if patterns else "|"  # the empty name is of the first kind
            patterns.append(rf"^(?:{short}{_written(one)}[\s\S]*{_written(other)}{empty})$")
    return tuple(patterns)


def _characters(part: int, parts: int) -> CharRanges:
    """The set number `part` of `parts` disjoint sets that together have all characters."""
    runs: list[tuple[int, int]] = []
    for low, high, width in ((0, 0x7F, 1), (0x80, 0x7FF, 8), (0x800, 0xFFFF, 0x400)):
        runs.extend(
            (start, min(start + width - 1, high))
            for start in range(low, high + 1, width)
            if start // width % parts == part
        )
    if part == 0:
        runs.append((0x10000, charset.MAX_CODE_POINT))
    return charset.intersect(charset.union(tuple(runs)), charset.UNIVERSE)


def _written(ranges: CharRanges) -> str:
    return "[" + "".join(rf"\u{{{low:x}}}-\u{{{high:x}}}" for low, high in ranges) + "]"
