"""Sets of characters against Python's own sets, and the sets that patterns name against `unicodedata` and `re`."""

import functools
import itertools
import random
import re
import unicodedata

import pytest

from jsg.constrained.chars import charset

DOTTED = "iI\u0131\u0130"


@functools.cache
def scalars():
    return [point for point in range(0x110000) if not 0xD800 <= point <= 0xDFFF]


@functools.cache
def by_category():
    found = {}
    for point, name in zip(scalars(), map(unicodedata.category, map(chr, scalars())), strict=True):
        found.setdefault(name, set()).add(point)
    return found


def members(ranges):
    return {point for low, high in ranges for point in range(low, high + 1)}


def random_set(rng):
    edges = [0, 0x7F, 0x80, 0xD7F0, 0xDFF0, 0xE000, 0xFFFF, 0x10FFF0]
    starts = [rng.choice([*edges, rng.randrange(0x300)]) for _ in range(rng.randrange(6))]
    return [(start, min(start + rng.choice([0, 1, 20, 3000]), 0x10FFFF)) for start in starts]


def is_canonical(ranges):
    gaps = itertools.pairwise(ranges)
    touching = any(a[1] + 1 >= b[0] and (a[1], b[0]) != (0xD7FF, 0xE000) for a, b in gaps)
    return (
        not touching and all(low <= high for low, high in ranges) and not members(ranges) & set(range(0xD800, 0xE000))
    )


def test_algebra_agrees_with_sets_of_code_points():
    rng = random.Random(1)
    universe = set(scalars())
    for _ in range(2):
        left_ranges, right_ranges = random_set(rng), random_set(rng)
        left, right = charset.of_ranges(left_ranges), charset.of_ranges(right_ranges)
        a, b = members(left_ranges) & universe, members(right_ranges) & universe
        for found, expected in (
            (left, a),
            (charset.union(left, right), a | b),
            (charset.intersect(left, right), a & b),
            (charset.difference(left, right), a - b),
            (charset.complement(left), universe - a),
        ):
            assert members(found) == expected
            assert is_canonical(found)
        assert charset.size(left) == len(a)


def test_contains_looks_at_the_edges():
    ranges = charset.of_ranges([(0x41, 0x43), (0x50, 0x50)])
    assert [point for point in range(0x60) if charset.contains(ranges, point)] == [0x41, 0x42, 0x43, 0x50]
    assert charset.contains(ranges, "P") and not charset.contains(charset.NONE, "P")


def test_of_takes_characters_and_code_points_and_drops_surrogates():
    assert charset.of(["b", 0x61, "z"]) == ((0x61, 0x62), (0x7A, 0x7A)) and charset.of("") == ()
    assert charset.of([0xD800]) == ()


def test_partition_is_the_coarsest():
    sets = [charset.of("abc"), charset.of("bcd"), charset.of("xyz"), charset.of("abc"), charset.NONE]
    parts = charset.partition(sets)
    assert sorted(parts) == sorted([charset.of("a"), charset.of("bc"), charset.of("d"), charset.of("xyz")])


@pytest.mark.parametrize("name", ["Lu", "L", "P", "Cn", "LC"])
def test_general_categories_are_those_of_unicodedata(name):
    wanted = ("Lu", "Ll", "Lt") if name == "LC" else (name,)
    assert members(charset.general_category(name)) == set().union(
        *(points for key, points in by_category().items() if key.startswith(wanted))
    )


def test_categories_have_long_names_and_aliases():
    assert charset.general_category("Uppercase_Letter") == charset.general_category("Lu")
    assert charset.general_category("General_Category=Decimal_Number") == charset.general_category("gc=Nd")
    assert charset.general_category("punct") == charset.general_category("P")
    assert charset.general_category("Any") == charset.UNIVERSE
    assert charset.general_category("ASCII") == ((0, 0x7F),) and charset.general_category("Cs") == ()
    for unknown in ("Script=Greek", "Greek", "lu", "", "gc=Any", "Lx"):
        assert charset.general_category(unknown) is None


@pytest.mark.parametrize("letter", ["w", "d", "s"])
def test_python_classes_are_those_of_re(letter):
    matches = re.compile(rf"\{letter}").fullmatch
    assert members(charset.python_classes()[letter]) == {point for point in scalars() if matches(chr(point))}


@pytest.mark.parametrize("is_ecma", [True, False])
def test_folding_adds_every_other_case(is_ecma):
    assert charset.fold(charset.of("k"), is_ecma) == charset.of("kK\N{KELVIN SIGN}")
    assert charset.fold(charset.of("s"), is_ecma) == charset.of("sS\N{LATIN SMALL LETTER LONG S}")
    assert charset.fold(charset.of("ß"), is_ecma) == charset.of("ßẞ")
    assert charset.fold(charset.of("ς"), is_ecma) == charset.of("\u03c3\u03c2\u03a3")
    assert charset.fold(charset.of("1-"), is_ecma) == charset.of("1-")
    assert charset.fold(charset.of("i"), is_ecma) == charset.of("iI" if is_ecma else DOTTED)
    assert charset.fold(charset.of("\u0130"), is_ecma) == charset.of("\u0130" if is_ecma else DOTTED)


def test_folding_is_that_of_re():
    letters = charset.fold(charset.of_ranges([(0x61, 0x7A)]), is_ecma=False)
    assert members(letters) == {p for p in scalars() if re.fullmatch("[a-z]", chr(p), re.IGNORECASE)}
    cased = [chr(p) for p in scalars() if p < 0x20000 and (chr(p).lower() != chr(p) or chr(p).upper() != chr(p))]
    for one in [*cased[::40], *DOTTED, *"\u017f\u00b5\u00df\u1e9e\u0345\u0390\ufb05"]:
        found = {ord(c) for c in re.findall(re.escape(one), "".join(cased), re.IGNORECASE)}
        assert members(charset.fold(charset.of(one), is_ecma=False)) == found, one


def test_all_characters_are_passed_over_once():
    charset.general_category("L")
    before = charset._categories.cache_info()
    charset.general_category("Me")
    after = charset._categories.cache_info()
    assert after.misses == before.misses and after.hits > before.hits
