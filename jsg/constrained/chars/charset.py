"""Sets of characters as sorted closed intervals of code points (`CharRanges`), and the named sets of patterns.

A character is a Unicode scalar value: no set that these functions return holds a surrogate (U+D800 to U+DFFF). The
intervals of every result ascend, and they neither touch nor overlap.
"""

import functools
import itertools
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable

from jsg.constrained.ir import CharRanges

MAX_CODE_POINT = 0x10FFFF
UNIVERSE: CharRanges = ((0, 0xD7FF), (0xE000, MAX_CODE_POINT))
NONE: CharRanges = ()

ECMA_DIGITS: CharRanges = ((0x30, 0x39),)
ECMA_WORD: CharRanges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
ECMA_SPACE: CharRanges = (
    (0x9, 0xD),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
ECMA_LINE_ENDS: CharRanges = ((0xA, 0xA), (0xD, 0xD), (0x2028, 0x2029))

_CATEGORY_NAMES = {
    "L": "Letter",
    "Lu": "Uppercase_Letter",
    "Ll": "Lowercase_Letter",
    "Lt": "Titlecase_Letter",
    "LC": "Cased_Letter",
    "Lm": "Modifier_Letter",
    "Lo": "Other_Letter",
    "M": "Mark",
    "Mn": "Nonspacing_Mark",
    "Mc": "Spacing_Mark",
    "Me": "Enclosing_Mark",
    "N": "Number",
    "Nd": "Decimal_Number",
    "Nl": "Letter_Number",
    "No": "Other_Number",
    "P": "Punctuation",
    "Pc": "Connector_Punctuation",
    "Pd": "Dash_Punctuation",
    "Ps": "Open_Punctuation",
    "Pe": "Close_Punctuation",
    "Pi": "Initial_Punctuation",
    "Pf": "Final_Punctuation",
    "Po": "Other_Punctuation",
    "S": "Symbol",
    "Sm": "Math_Symbol",
    "Sc": "Currency_Symbol",
    "Sk": "Modifier_Symbol",
    "So": "Other_Symbol",
    "Z": "Separator",
    "Zs": "Space_Separator",
    "Zl": "Line_Separator",
    "Zp": "Paragraph_Separator",
    "C": "Other",
    "Cc": "Control",
    "Cf": "Format",
    "Cs": "Surrogate",
    "Co": "Private_Use",
    "Cn": "Unassigned",
}
_OTHER_NAMES = {"digit": "Nd", "punct": "P", "cntrl": "Cc", "Combining_Mark": "M"}
_MEMBERS = {"LC": ("Lu", "Ll", "Lt")}


def union(*sets: CharRanges) -> CharRanges:
    """The characters that are in any of the sets."""
    return sets[0] if len(sets) == 1 else of_ranges(itertools.chain.from_iterable(sets))


def of_ranges(ranges: Iterable[tuple[int, int]]) -> CharRanges:
    """The characters of closed intervals, in any order and with overlaps; surrogates are left out."""
    merged: list[list[int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = max(merged[-1][1], high)
        else:
            merged.append([low, high])
    result: list[tuple[int, int]] = []
    for low, high in merged:
        if high < 0xD800 or low > 0xDFFF:
            result.append((low, high))
            continue
        if low < 0xD800:
            result.append((low, 0xD7FF))
        if high > 0xDFFF:
            result.append((0xE000, high))
    return tuple(result)


def of(characters: Iterable[str | int]) -> CharRanges:
    """The set of these characters and code points."""
    points = (ord(item) if isinstance(item, str) else item for item in characters)
    return of_ranges((point, point) for point in points)


def intersect(left: CharRanges, right: CharRanges) -> CharRanges:
    """The characters that are in both sets."""
    result: list[tuple[int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low <= high:
            result.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(result)


def complement(ranges: CharRanges) -> CharRanges:
    """All characters that are not in the set."""
    gaps: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= MAX_CODE_POINT:
        gaps.append((start, MAX_CODE_POINT))
    return of_ranges(gaps)


def difference(left: CharRanges, right: CharRanges) -> CharRanges:
    """The characters of the first set that are not in the second."""
    return intersect(left, complement(right))


def contains(ranges: CharRanges, character: str | int) -> bool:
    """Whether a character or code point is in the set."""
    point = ord(character) if isinstance(character, str) else character
    i = bisect_right(ranges, (point, MAX_CODE_POINT))
    return i > 0 and ranges[i - 1][1] >= point


def size(ranges: CharRanges) -> int:
    """How many characters are in the set."""
    return sum(high - low + 1 for low, high in ranges)


def partition(sets: Iterable[CharRanges]) -> list[CharRanges]:
    """The coarsest disjoint sets such that each given set is a union of some; characters in no set are left out."""
    events: dict[int, set[int]] = {}
    for i, ranges in enumerate(dict.fromkeys(sets)):
        for low, high in ranges:
            events.setdefault(low, set()).symmetric_difference_update((i,))
            events.setdefault(high + 1, set()).symmetric_difference_update((i,))
    # `members` has a bit for each set, so that the cost of a point is only that of the sets that begin or end there.
    parts: dict[int, list[tuple[int, int]]] = {}
    members = start = 0
    for point in sorted(events):
        if members:
            parts.setdefault(members, []).append((start, point - 1))
        for i in events[point]:
            members ^= 1 << i
        start = point
    return [of_ranges(part) for part in parts.values()]


@functools.cache
def python_classes() -> dict[str, CharRanges]:
    r"""What `\w`, `\d` and `\s` mean in Python's `re`, by their letter. The first call takes about 0.1 s."""
    everything = "".join(map(chr, range(MAX_CODE_POINT + 1)))
    found = {letter: re.finditer(rf"\{letter}+", everything) for letter in "wds"}
    return {letter: of_ranges((each.start(), each.end() - 1) for each in runs) for letter, runs in found.items()}


@functools.lru_cache(maxsize=256)
def general_category(name: str) -> CharRanges | None:
    r"""The characters of a general category such as `\p{Lu}`, by its short or long name; None for an unknown name.

    `Any`, `ASCII` and `Assigned` are known too. A name may have `General_Category=` or `gc=` before it. The first call
    takes about 0.2 s.
    """
    for prefix in ("General_Category=", "gc="):
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    else:
        if name in ("Any", "ASCII", "Assigned"):
            unassigned = _categories().get("Cn", NONE)
            return {"Any": UNIVERSE, "ASCII": ((0, 0x7F),), "Assigned": complement(unassigned)}[name]
    short = _short_names().get(name)
    if short is None:
        return None
    members = _MEMBERS.get(short) or [key for key in _categories() if key.startswith(short)]
    return union(*(_categories().get(key, NONE) for key in members))


def fold(ranges: CharRanges, is_ecma: bool) -> CharRanges:
    """The set, and every character that differs only by case from one in the set.

    ECMA-262 compares characters by Unicode's simple case folding. Python takes more as equal, such as a dotless i.
    """
    cased, classes = _case_classes(is_ecma)
    extra: list[tuple[int, int]] = []
    for low, high in ranges:
        for point in cased[bisect_right(cased, low - 1) : bisect_right(cased, high)]:
            extra.extend((other, other) for other in classes[point])
    return of_ranges([*ranges, *extra]) if extra else ranges


@functools.cache
def _short_names() -> dict[str, str]:
    return {**{key: key for key in _CATEGORY_NAMES}, **{v: k for k, v in _CATEGORY_NAMES.items()}, **_OTHER_NAMES}


@functools.cache
def _categories() -> dict[str, CharRanges]:
    return _by_value(unicodedata.category)


def _by_value[Value: Hashable](value_of: Callable[[str], Value]) -> dict[Value, CharRanges]:
    """For each value of a function, the characters for which the function has this value."""
    runs: dict[Value, list[tuple[int, int]]] = {}
    for low, high in UNIVERSE:
        point = low
        for value, group in itertools.groupby(map(value_of, map(chr, range(low, high + 1)))):
            length = sum(1 for _ in group)
            runs.setdefault(value, []).append((point, point + length - 1))
            point += length
    return {value: of_ranges(intervals) for value, intervals in runs.items()}


@functools.cache
def _case_classes(is_ecma: bool) -> tuple[list[int], dict[int, tuple[int, ...]]]:
    """The code points that have other cases, ascending, and for each all code points that differ from it by case."""
    folded_of = _folded if is_ecma else _upper
    by_folded: dict[str, list[int]] = {}
    for character in map(chr, range(0x20000)):  # No script beyond the second plane has cases.
        if not character.lower() == character == character.upper() == character.casefold():
            by_folded.setdefault(folded_of(character), []).append(ord(character))
    classes = {point: tuple(members) for members in by_folded.values() if len(members) > 1 for point in members}
    return sorted(classes), classes


def _folded(character: str) -> str:
    folded = character.casefold()
    if len(folded) > 1:
        folded = character.lower()  # Full case folding gives several characters; the simple one is the lower case.
    return folded if len(folded) == 1 else character


def _upper(character: str) -> str:
    return character.lower()[0].upper()
