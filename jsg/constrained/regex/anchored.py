"""Anchors (`^` and `$`) of patterns, as expressions of a grammar.

An anchor matches no character. It asserts that the start or the end of the whole text is at its place, which no
expression of a grammar can say. So a piece of a pattern is kept as up to four expressions, by what their texts assert:
nothing, that they begin where the whole text begins, that they end where it ends, or both. Joining pieces joins these
expressions. When the pattern is complete, every assertion is resolved.

    (^|x)a    "xa" asserts nothing; "a" must be at the start
    a^        matches nothing, because "a" comes before the place that must be the start
"""

import dataclasses
import functools
from collections.abc import Sequence

from jsg.constrained.chars import charset
from jsg.constrained.ir import EMPTY, NEVER, Alt, CharRanges, Chars, Expr, Repeat, Seq, seq

AT_START = 1
AT_END = 2
_ALL = (0, AT_START, AT_END, AT_START | AT_END)
ANYTHING = Repeat(Chars(charset.UNIVERSE), 0, None)
MAX_COUNT = 2**31 - 1
"""The largest count that an automaton's tables hold."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """An expression, and whether it matches the empty text."""

    expr: Expr
    is_nullable: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a pattern.

    Attributes:
        parts: The texts by what they assert (0, AT_START, AT_END or both); None where there are none.
    """

    parts: tuple[Part | None, Part | None, Part | None, Part | None]

    @property
    def is_plain(self) -> bool:
        """Whether the piece asserts nothing."""
        return self.parts[1:] == (None, None, None)


def one_of(ranges: CharRanges) -> Piece:
    """One character out of a set."""
    return Piece((Part(Chars(ranges), False) if ranges else None, None, None, None))


@functools.cache
def anchor(asserted: int) -> Piece:
    """The empty text where AT_START or AT_END holds."""
    return _piece({asserted: [Part(EMPTY, True)]})


def concatenate(pieces: Sequence[Piece]) -> Piece:
    """The pieces in a row."""
    row: list[Piece] = []
    run: list[Part] = []
    for piece in pieces:
        plain = piece.parts[0]
        if piece.is_plain and plain is not None:
            run.append(plain)
            continue
        if run:
            row.append(_plain(run))
            run = []
        row.append(piece)
    if run or not row:
        row.append(_plain(run))
    # Neighbours are joined in pairs. Joining them one after another would nest the result as deep as the row is long.
    while len(row) > 1:
        row = [_pair(*row[i : i + 2]) if i + 1 < len(row) else row[i] for i in range(0, len(row), 2)]
    return row[0]


def any_of(pieces: Sequence[Piece]) -> Piece:
    """Any of the pieces."""
    return _piece({asserted: [part for piece in pieces if (part := piece.parts[asserted])] for asserted in _ALL})


def repeat(piece: Piece, least: int, most: int | None) -> Piece:
    """The piece `least` to `most` times; None for `most` means any number.

    Among the repetitions that are not empty, only the first can be at the start and only the last at the end. If the
    piece can be empty, empty repetitions make up for any number that is missing.
    """
    plain, starts, ends, spans = piece.parts
    if most == 0:
        return _piece({0: [Part(EMPTY, True)]})
    if piece.is_plain:
        return _piece({0: _times(plain, least, most)})

    def fewer(count: int, fillers: Sequence[Part | None]) -> int:
        has_empty = any(part is not None and part.is_nullable for part in fillers)
        return 0 if has_empty else max(least - count, 0)

    def more(count: int) -> int | None:
        return None if most is None else most - count

    found: dict[int, list[Part]] = {0: _times(plain, least, most)}
    found[AT_START] = [
        _in_row(first, rest) for first in _some(starts) for rest in _times(plain, fewer(1, (plain, starts)), more(1))
    ]
    found[AT_END] = [
        _in_row(rest, last) for last in _some(ends) for rest in _times(plain, fewer(1, (plain, ends)), more(1))
    ]
    both: list[Part] = []
    if most is None or most >= 2:
        inner = _times(plain, fewer(2, (plain, starts, ends)), more(2))
        both = [
            _in_row(_in_row(first, rest), last) for first in _some(starts) for rest in inner for last in _some(ends)
        ]
    if least <= 1 or fewer(1, piece.parts) == 0:
        both.extend(_some(spans))
    found[AT_START | AT_END] = both
    return _piece(found)


def matched(piece: Piece) -> Expr:
    """The texts that the piece matches from the first character to the last."""
    return _alt([part.expr for part in piece.parts if part is not None])


def found_in(piece: Piece) -> Expr:
    """The texts in which the piece is found somewhere."""
    plain, starts, ends, spans = piece.parts
    if plain is not None and plain.is_nullable:
        return ANYTHING
    options: list[Expr] = []
    if plain is not None:
        options.append(seq(ANYTHING, _shortest(_shortest(plain.expr, 0), -1), ANYTHING))
    if starts is not None:
        options.append(ANYTHING if starts.is_nullable else seq(_shortest(starts.expr, -1), ANYTHING))
    if ends is not None:
        options.append(ANYTHING if ends.is_nullable else seq(ANYTHING, _shortest(ends.expr, 0)))
    if spans is not None:
        options.append(spans.expr)
    return ANYTHING if any(option is ANYTHING for option in options) else _alt(options)


def _some(part: Part | None) -> list[Part]:
    return [] if part is None else [part]


def _plain(parts: Sequence[Part]) -> Piece:
    row = Part(seq(*[part.expr for part in parts]), all(part.is_nullable for part in parts))
    return Piece((row, None, None, None))


def _in_row(left: Part, right: Part) -> Part:
    return Part(seq(left.expr, right.expr), left.is_nullable and right.is_nullable)


def _pair(left: Piece, right: Piece) -> Piece:
    found: dict[int, list[Part]] = {}
    for before, first in enumerate(left.parts):
        for after, second in enumerate(right.parts):
            if first is None or second is None:
                continue
            # Nothing comes before a text at the start, and nothing after a text at the end.
            if (after & AT_START and not first.is_nullable) or (before & AT_END and not second.is_nullable):
                continue
            kept_first = Part(EMPTY, True) if after & AT_START else first
            kept_second = Part(EMPTY, True) if before & AT_END else second
            found.setdefault(before | after, []).append(_in_row(kept_first, kept_second))
    return _piece(found)


def _piece(found: dict[int, list[Part]]) -> Piece:
    merged: list[Part | None] = []
    for asserted in _ALL:
        parts = found.get(asserted, [])
        expr = _alt([part.expr for part in parts])
        merged.append(None if expr == NEVER else Part(expr, any(part.is_nullable for part in parts)))
    return Piece((merged[0], merged[1], merged[2], merged[3]))


def _alt(options: Sequence[Expr]) -> Expr:
    """Any of the options, with single characters merged into one set. Unlike `ir.alt` it compares no nested parts."""
    flat: list[Expr] = []
    for option in options:
        flat.extend(option.options if isinstance(option, Alt) else (option,))
    sets = [option.ranges for option in flat if isinstance(option, Chars)]
    has_empty = any(option == EMPTY for option in flat)
    others: list[Expr] = [option for option in flat if not isinstance(option, Chars) and option != EMPTY]
    if sets:
        others.append(Chars(charset.union(*sets)))
    if has_empty:
        others.append(EMPTY)
    return others[0] if len(others) == 1 else Alt(tuple(others))


def _times(part: Part | None, least: int, most: int | None) -> list[Part]:
    """The part `least` to `most` times; an empty list where there is no such text."""
    if part is None:
        return [Part(EMPTY, True)] if least == 0 else []
    return [Part(_repeated(part.expr, least, most), least == 0 or part.is_nullable)]


def _repeated(item: Expr, least: int, most: int | None) -> Expr:
    """The item `least` to `most` times. A repetition of a repetition becomes one where that matches the same texts."""
    if most == 0 or item == EMPTY:
        return EMPTY
    if (least, most) == (1, 1):
        return item
    if isinstance(item, Repeat) and item.separator == EMPTY:
        merged = _merged_counts((item.min, item.max), (least, most))
        if merged is not None:
            return Repeat(item.item, *merged)
    return Repeat(item, least, most)


def _merged_counts(inner: tuple[int, int | None], outer: tuple[int, int | None]) -> tuple[int, int | None] | None:
    """The counts with which x{counts} matches the same as x{inner}{outer}; None where there are none.

    There are none where x{inner}{outer} cannot repeat x some number of times between its least and its most.
    """
    least = inner[0] * outer[0]
    most = None if inner[1] is None or outer[1] is None else inner[1] * outer[1]
    if max(least, most or 0) > MAX_COUNT:
        return None
    if outer[0] != outer[1] and inner[1] is not None and inner[0] * (outer[0] + 1) > inner[1] * outer[0] + 1:
        return None
    if outer[0] != outer[1] and inner[1] is None and outer[0] == 0 and inner[0] > 1:
        return None
    return least, most


def _shortest(expr: Expr, end: int) -> Expr:
    """A smaller expression that does the same where any text may come before it (`end` 0) or after it (`end` -1)."""
    parts: list[Expr] = [*expr.parts] if isinstance(expr, Seq) else [expr]
    while parts and isinstance(part := parts[end], Repeat):
        if part.min > 0:
            parts[end] = _repeated(part.item, part.min, part.min)
            break
        del parts[end]
    return seq(*parts)
