"""The bytes of characters against Python's codec, through `re` over bytes."""

import random
import re

import pytest

from jsg.constrained.chars import charset
from jsg.constrained.chars.lower import lower
from jsg.constrained.ir import (
    EMPTY,
    NEVER,
    Alt,
    Automaton,
    Bag,
    BagItem,
    ByteSet,
    Call,
    Chars,
    Literal,
    Repeat,
    Seq,
    Words,
)
from jsg.constrained.utf8 import utf8


def byte_pattern(expr):
    """An expression over bytes as a pattern of Python's `re`."""
    match expr:
        case Literal(value):
            return re.escape(value)
        case ByteSet(ranges):
            return b"[" + b"".join(b"\\x%02x-\\x%02x" % pair for pair in ranges) + b"]"
        case Words(words):
            return b"(?:" + b"|".join(map(re.escape, sorted(words, key=len, reverse=True))) + b")"
        case Seq(parts):
            return b"".join(map(byte_pattern, parts))
        case Alt(options):
            return b"(?:" + b"|".join(map(byte_pattern, options)) + b")" if options else b"(?!)"
        case Repeat(item, least, most, Seq(())):
            return b"(?:%s){%d,%s}" % (byte_pattern(item), least, b"" if most is None else b"%d" % most)
    raise TypeError(expr)


def positions(expr):
    match expr:
        case Literal(value):
            return len(value)
        case ByteSet():
            return 1
        case Seq(inner) | Alt(inner):
            return sum(map(positions, inner))
    raise TypeError(expr)


def sets():
    rng = random.Random(7)
    edges = [0x7F, 0x80, 0x7FF, 0x800, 0xFFF, 0x1000, 0xD7FF, 0xE000, 0xFFFF, 0x10000, 0x3FFFF, 0x40000, 0x10FFFF]
    for _ in range(6):
        starts = [rng.choice([*edges, rng.randrange(0x110000)]) for _ in range(5)]
        yield charset.of_ranges((s, min(s + rng.choice([0, 1, 63, 500, 70000]), 0x10FFFF)) for s in starts)


@pytest.mark.parametrize("ranges", [charset.UNIVERSE, ((0x4E00, 0x9FFF),), "L", *sets()])
def test_utf8_holds_exactly_the_characters_of_the_set(ranges):
    if ranges == "L":  # made here, because that takes long
        ranges = charset.general_category("L")
    matches = re.compile(byte_pattern(utf8(ranges)), re.DOTALL).fullmatch
    points = {point for low, high in ranges for point in range(low, high + 1)}
    rng = random.Random(3)
    near = {p + d for low, high in ranges for p in (low, high) for d in (-64, -1, 0, 1, 64)}
    for point in {*near, *rng.choices(range(0x110000), k=20_000)}:
        if 0 <= point <= 0x10FFFF and not 0xD800 <= point <= 0xDFFF:
            assert bool(matches(chr(point).encode())) == (point in points), hex(point)


def test_utf8_holds_nothing_that_is_no_utf8():
    matches = re.compile(byte_pattern(utf8(charset.UNIVERSE)), re.DOTALL).fullmatch
    for first in range(256):
        for second in range(0, 256, 3):
            for tail in (b"", b"\x80", b"\xbf\xbf", b"\x90\x80", b"a"):
                data = bytes([first, second]) + tail
                try:
                    expected = len(data.decode()) == 1
                except UnicodeDecodeError:
                    expected = False
                assert bool(matches(data)) == expected, data
    assert not matches("\ud800".encode(errors="surrogatepass"))


def test_utf8_is_small():
    assert positions(utf8(charset.UNIVERSE)) <= 17 and positions(utf8(((0, 0x7F),))) == 1
    assert positions(utf8(((0x4E00, 0x9FFF),))) <= 8
    assert utf8(charset.of("é")) == Literal("é".encode()) and utf8(charset.NONE) == NEVER


def test_lower_joins_literals_and_gathers_words():
    text = Seq(tuple(Chars(charset.of(c)) for c in "aéz"))
    assert lower(text) == Literal("aéz".encode())
    assert lower(Alt((text, Literal(b"b"), EMPTY, Literal(b"b")))) == Alt((Words((b"a\xc3\xa9z", b"b")), EMPTY))
    assert lower(Seq((Literal(b"x"), Call("r"), Literal(b"y"), text))) == Seq(
        (Literal(b"x"), Call("r"), Literal(b"ya\xc3\xa9z"))
    )


def test_lower_reaches_every_kind_of_expression():
    a, never = Chars(charset.of("a")), Chars(charset.NONE)
    assert lower(Repeat(a, 2, 5, a)) == Repeat(Literal(b"a"), 2, 5, Literal(b"a"))
    assert lower(Repeat(never, 0, 3)) == EMPTY and lower(Repeat(never, 1, 3)) == NEVER
    assert lower(Seq((a, never))) == NEVER
    assert lower(Bag((BagItem(a, is_once=True),), a, 1, 2)) == Bag(
        (BagItem(Literal(b"a"), is_once=True),), Literal(b"a"), 1, 2
    )
    automaton = Automaton((((a, 1), (never, 0)), ()), frozenset([1]))
    assert lower(automaton) == Automaton((((Literal(b"a"), 1), (NEVER, 0)), ()), frozenset([1]))


def test_lower_uses_the_encoding_and_keeps_shared_parts_shared():
    calls = []

    def encode(ranges):
        calls.append(ranges)
        return Literal(b"<" + chr(ranges[0][0]).encode() + b">")

    shared = Repeat(Chars(charset.of("a")), 0, None)
    lowered = lower(Seq((shared, Literal(b"-"), shared)), encode)
    assert lowered.parts[0] is lowered.parts[2] and lowered.parts[0].item == Literal(b"<a>")
    assert len(calls) == 1
