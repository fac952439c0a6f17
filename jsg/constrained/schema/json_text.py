r"""The spellings of the characters of a JSON string: unescaped, as a short escape such as `\n`, and as `\uXXXX`.

Known text should have one spelling, because jump-forward needs forced text. But texts that `json.dumps` writes must be
allowed. So the spellings of a character depend on the set of characters that may be in its place:

- A character of a key or of a constant is written unescaped where JSON allows that, else as its short escape, else as
  `\u00xx`. In a pattern that leaves no choice, a character beyond ASCII may also be written `\uXXXX`.
- In a set, characters beyond ASCII and control characters may be written `\uXXXX`. The quote, the backslash and the
  slash have their short escapes.
- In the set of all characters, each may be written `\uXXXX`.

Each code point has its own spellings. So a string that is excluded is excluded in all its spellings.
"""

import functools
import json
from collections.abc import Iterable

from jsg.constrained.chars import charset
from jsg.constrained.ir import EMPTY, NEVER, ByteSet, CharRanges, Expr, Literal, Words, alt, literal, seq
from jsg.constrained.schema.rules import RuleBook
from jsg.constrained.utf8 import by_rest, utf8

_PLAIN: CharRanges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, charset.MAX_CODE_POINT))
"""The characters that JSON allows unescaped."""
_PRINTABLE: CharRanges = ((0x20, 0x7E),)
_UNESCAPED: CharRanges = ((0x20, 0x21), (0x23, 0x2E), (0x30, 0x5B), (0x5D, 0x7E))
"""The printable ASCII characters that are never escaped, of which any set is one byte."""
_SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_FEW_RANGES = 2


@functools.lru_cache(maxsize=1024)
def character(ranges: CharRanges) -> Expr:
    """The spellings of one character out of the set in a JSON string; NEVER for the empty set."""
    if charset.size(ranges) == 1:
        return _known_character(chr(ranges[0][0]))
    escaped = ranges if ranges == charset.UNIVERSE else charset.difference(ranges, _PRINTABLE)
    letters = "".join(letter for sign, letter in _SHORT.items() if charset.contains(ranges, sign))
    return alt(
        utf8(charset.intersect(ranges, _PLAIN)),
        seq(Literal(b"\\"), alt(_one_of(letters), seq(Literal(b"u"), _code_units(escaped)))),
    )


class CharacterRules:
    """Character sets for grammars with many of them. The long part of each set is a rule, which all its uses share."""

    def __init__(self, book: RuleBook) -> None:
        self._book = book
        self._known: dict[CharRanges, Expr] = {}

    def character(self, ranges: CharRanges) -> Expr:
        r"""The spellings of one character out of the set, in two or three positions of the grammar.

        No printable ASCII character is written `\uXXXX`.
        """
        known = self._known.get(ranges)
        if known is None:
            others, known, printable = _in_parts(ranges)
            if known is None:
                call = self._book.call(("characters", others), "characters", lambda: character(others))
                known = alt(call, printable) if printable is not None else call
            self._known[ranges] = known
        return known


@functools.lru_cache(maxsize=4096)
def _in_parts(ranges: CharRanges) -> tuple[CharRanges, Expr | None, Expr | None]:
    """The set in parts: (characters that may be escaped or are not ASCII, whole set, characters never escaped).

    The whole set is given where the first part is small, and is None otherwise. The last part is None where the whole
    set is given, or where there are no such characters.
    """
    others = charset.difference(ranges, _UNESCAPED)
    if len(others) <= _FEW_RANGES and charset.size(others) <= _FEW_RANGES:
        return others, character(ranges), None
    printable = charset.intersect(ranges, _UNESCAPED)
    return others, None, character(printable) if printable else None


def string_words(text: str) -> tuple[bytes]:
    """The one spelling of a known string with its quotes, in which characters beyond ASCII are unescaped."""
    return (json.dumps(text, ensure_ascii=False).encode(),)


def words(texts: Iterable[bytes]) -> Expr:
    """Any of the texts, none of which is empty."""
    ordered = tuple(sorted(set(texts)))
    return literal(ordered[0]) if len(ordered) == 1 else Words(ordered) if ordered else NEVER


def _known_character(sign: str) -> Expr:
    if sign in _SHORT and sign != "/":
        return literal("\\" + _SHORT[sign])
    if ord(sign) < 0x20:
        return literal(f"\\u{ord(sign):04x}")
    if ord(sign) < 0x7F:
        return literal(sign)
    return alt(literal(sign), seq(Literal(b"\\u"), _code_units(((ord(sign), ord(sign)),))))


def _code_units(ranges: CharRanges) -> Expr:
    r"""The text after `\u`: four digits, or the four digits of a surrogate, `\u`, and those of the other surrogate."""
    basic = charset.intersect(ranges, ((0, 0xFFFF),))
    others = charset.intersect(ranges, ((0x10000, charset.MAX_CODE_POINT),))
    options: list[Expr] = [_digits(basic, 4)] if basic else []
    for rest, leads in by_rest(_shifted(others, -0x10000), 1 << 10).items():
        high, low = _digits(_shifted(leads, 0xD800), 4), _digits(_shifted(rest, 0xDC00), 4)
        options.append(seq(high, Literal(b"\\u"), low))
    return alt(*options)


def _shifted(ranges: CharRanges, by: int) -> CharRanges:
    return tuple([(low + by, high + by) for low, high in ranges])


@functools.lru_cache(maxsize=4096)
def _digits(ranges: CharRanges, count: int) -> Expr:
    """The numbers of the intervals, written with `count` hexadecimal digits of either case."""
    if count == 0:
        return EMPTY
    return alt(
        *(
            seq(_hex_digit(leads), _digits(rest, count - 1))
            for rest, leads in by_rest(ranges, 16 ** (count - 1)).items()
        )
    )


def _hex_digit(leads: CharRanges) -> Expr:
    digits = "".join(f"{digit:x}" for low, high in leads for digit in range(low, high + 1))
    return _one_of("".join(dict.fromkeys(digits + digits.upper())))


def _one_of(signs: str) -> Expr:
    """One of these ASCII characters."""
    if not signs:
        return NEVER
    if len(signs) == 1:
        return literal(signs)
    return ByteSet(charset.of(signs))
