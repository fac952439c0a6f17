"""Reads the characters of a pattern: escapes, classes, the openings of groups, and quantifiers, in either dialect.

A construct that is not regular, or that has different meanings in different engines, is refused with its name and
position.
"""

import re
from typing import NoReturn

from jsg.constrained.chars import charset
from jsg.constrained.ir import CharRanges
from jsg.constrained.limits import check
from jsg.constrained.regex.anchored import MAX_COUNT
from jsg.errors import GrammarError

_CONTROL = {"t": 0x9, "n": 0xA, "v": 0xB, "f": 0xC, "r": 0xD}
_HEX = {"x": 2, "u": 4, "U": 8}
_CLASS_WORK = 2_000_000
"""The most intervals of all classes of a pattern together."""
_CASE_WORK = 3_000
"""The most that ignoring case adds to them for one set: about as many characters have cases."""
_NAME = re.compile(r"[^\W\d]\w*")
_HEX_DIGITS = re.compile(r"[0-9a-fA-F]+")
_OCTAL = re.compile(r"0[0-7]{0,2}|[1-3][0-7]{2}")
_COUNTS = re.compile(r"\{([0-9]*)(?:(,)([0-9]*))?\}")
_ADVICE = "write the pattern without it"


class Reader:
    """A pattern and a position in it. Each method moves the position past what it returns.

    Attributes:
        pattern: The whole pattern.
        position: The position of the next character.
        is_ecma: Whether the dialect is ECMA-262 as JSON Schema uses it, or else Python's `re`.
    """

    def __init__(self, pattern: str, *, is_ecma: bool, param: str | None):
        self.pattern = pattern
        self.position = 0
        self.is_ecma = is_ecma
        self._param = param
        self._class_work = 0

    def refuse(self, what: str, position: int, advice: str = _ADVICE) -> NoReturn:
        """Raises GrammarError: `what` at a position of the pattern."""
        excerpt = self.pattern[position : position + 12]
        raise GrammarError(f"regular expression: {what}, at position {position} ({excerpt!r}); {advice}", self._param)

    def take(self, text: str) -> bool:
        """Whether the text is here; if so, the position moves past it."""
        if self.pattern.startswith(text, self.position):
            self.position += len(text)
            return True
        return False

    def quantifier(self) -> tuple[int, int | None] | None:
        """(least, most or None) of the quantifier that is here, lazy or not; None where there is none."""
        start = self.position
        character = self.pattern[start : start + 1]
        if not character or character not in "*+?{":
            return None
        if character == "{":
            counts = self._counts()
            if counts is None:
                return None
        else:
            self.position += 1
            counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}[character]
        self.take("?")
        if self.pattern[self.position : self.position + 1] == "+":
            self.refuse("possessive quantifiers are not supported", start)
        return counts

    def _counts(self) -> tuple[int, int | None] | None:
        found = _COUNTS.match(self.pattern, self.position)
        if found is None or (not found[1] and not found[3]):
            return None  # A brace that stands for itself.
        start = self.position
        if not found[1] and self.is_ecma:
            self.refuse("a quantifier without its least count means different things", start, f"write {{0,{found[3]}}}")
        if len(found[1]) > 10 or len(found[3] or "") > 10:
            self.refuse(f"a quantifier counts to at most {MAX_COUNT}", start, "lower it")
        least = int(found[1] or 0)
        most = least if not found[2] else int(found[3]) if found[3] else None
        if max(least, most or 0) > MAX_COUNT:
            self.refuse(f"a quantifier counts to at most {MAX_COUNT}", start, "lower it")
        if most is not None and most < least:
            self.refuse("the least count of a quantifier is above its most", start, "swap them")
        self.position = found.end()
        return least, most

    def group(self, flags: frozenset[str]) -> tuple[frozenset[str], bool]:
        """(flags inside, whether it is a group) of the opening whose parenthesis was passed.

        Flags for the whole pattern at its start, and comments, are no groups and are passed whole.
        """
        start = self.position - 1
        if not self.take("?"):
            if self.pattern.startswith("*", self.position):
                self.refuse("verbs such as (*FAIL) are not supported", start)
            return flags, True
        for opening, what in (
            ("=", "look-ahead is not supported"),
            ("!", "look-ahead is not supported"),
            ("<=", "look-behind is not supported"),
            ("<!", "look-behind is not supported"),
            (">", "atomic groups are not supported"),
            ("(", "conditionals are not supported"),
            ("P=", "back-references are not supported"),
            ("P>", "recursion into groups is not supported"),
            ("&", "recursion into groups is not supported"),
            ("|", "branch-reset groups are not supported"),
        ):
            if self.pattern.startswith(opening, self.position):
                self.refuse(what, start)
        if self.take(":"):
            return flags, True
        if self.take("P<") or self.take("<"):
            name = _NAME.match(self.pattern, self.position)
            if name is None or not self.pattern.startswith(">", name.end()):
                self.refuse("a group's name is letters, digits and underscores and ends with >", start, "correct it")
            self.position = name.end() + 1
            return flags, True
        if not self.is_ecma and self.take("#"):
            end = self.pattern.find(")", self.position)
            if end < 0:
                self.refuse("a comment has no end", start, "close it with )")
            self.position = end + 1
            return flags, False
        return self._flags(flags, start)

    def _flags(self, flags: frozenset[str], start: int) -> tuple[frozenset[str], bool]:
        found = re.compile(r"([a-zA-Z]*)(?:(-)([a-zA-Z]*))?([:)])").match(self.pattern, self.position)
        if found is None:
            self.refuse("a group must open with (, (?:, (?<name> or flags", start, "correct it")
        added, removed = found[1], found[3] or ""
        for flag in added + removed:
            if flag not in "ims":
                self.refuse(f"the flag {flag} is not supported", start, "only i, m and s are")
        if set(added) & set(removed) or not added + removed:
            self.refuse("flags must be set or removed, not both or neither", start, "correct them")
        self.position = found.end()
        if found[4] == ":":
            return flags.union(added).difference(removed), True
        if self.is_ecma or start != 0 or found[2]:
            self.refuse("flags without a group may only stand at the start", start, "write (?i:...)")
        return flags.union(added), False

    def dot(self, flags: frozenset[str]) -> CharRanges:
        """The set that a dot matches."""
        if "s" in flags:
            return charset.UNIVERSE
        return charset.complement(charset.ECMA_LINE_ENDS if self.is_ecma else charset.of("\n"))

    def character_class(self, flags: frozenset[str]) -> CharRanges:
        """The set of the class whose opening bracket was passed."""
        start = self.position - 1
        is_negated = self.take("^")
        sets: list[CharRanges] = []
        singles: list[tuple[int, int]] = []
        is_first = True
        while self.is_ecma or is_first or not self.pattern.startswith("]", self.position):
            if self.position >= len(self.pattern):
                self.refuse("a character class has no end", start, "close it with ]")
            if self.is_ecma and self.pattern.startswith("]", self.position):
                break
            is_first = False
            self._refuse_set_notation()
            position = self.position
            low = self._class_atom()
            if not self.pattern.startswith("-", self.position) or self.pattern.startswith("-]", self.position):
                singles.append((low, low)) if isinstance(low, int) else sets.append(low)
                continue
            self.position += 1
            high = self._class_atom()
            if isinstance(low, int) and isinstance(high, int):
                if low > high:
                    self.refuse("a range of characters ends before it begins", position, "swap its ends")
                singles.append((low, high))
            elif self.is_ecma:
                singles.append((0x2D, 0x2D))
                for end in (low, high):
                    singles.append((end, end)) if isinstance(end, int) else sets.append(end)
            else:
                self.refuse("a range of characters must end in characters", position, r"write the hyphen as \-")
        self.position += 1
        self._spend(len(singles) + sum(map(len, sets)))
        ranges = self.folded(charset.of_ranges(singles), flags)
        ranges = charset.union(ranges, *sets)
        return charset.complement(ranges) if is_negated else ranges

    def folded(self, ranges: CharRanges, flags: frozenset[str]) -> CharRanges:
        """The set, with all cases of its characters where the flags say so."""
        if "i" not in flags:
            return ranges
        self._spend(min(charset.size(ranges), _CASE_WORK))
        return charset.fold(ranges, self.is_ecma)

    def escape(self, flags: frozenset[str]) -> CharRanges:
        """The set of the escape outside of a class whose backslash was passed."""
        start = self.position - 1
        character = self.pattern[self.position : self.position + 1]
        if character in ("b", "B"):
            self.refuse(rf"word boundaries (\{character}) are not supported", start)
        found = self._escape(start)
        if isinstance(found, int):
            return self.folded(charset.of((found,)), flags)
        return found

    def _class_atom(self) -> int | CharRanges:
        """A code point, or the set of an escape such as a digit's."""
        if self.position >= len(self.pattern):
            self.refuse("a character class has no end", len(self.pattern), "close it with ]")
        character = self.pattern[self.position]
        self.position += 1
        if character != "\\":
            return ord(character)
        if self.take("b"):
            return 0x8
        return self._escape(self.position - 1)

    def _escape(self, start: int) -> int | CharRanges:
        if self.position >= len(self.pattern):
            self.refuse("a backslash stands at the end", start, r"write \\ for a backslash")
        character = self.pattern[self.position]
        self.position += 1
        if character in _CONTROL:
            return _CONTROL[character]
        if character in "dDwWsS":
            known = self._known_class(character.lower())
            self._spend(len(known))
            return charset.complement(known) if character.isupper() else known
        if character in "pP":
            return self._property(start, is_negated=character == "P")
        if character in "0123456789":
            return self._number(start)
        if character in "xu" or (character == "U" and not self.is_ecma):
            return self._code_point(character, start)
        if character == "c":
            letter = self.pattern[self.position : self.position + 1]
            if not (letter.isascii() and letter.isalpha()):
                self.refuse(r"\c needs a letter of A to Z", start, "correct it")
            self.position += 1
            return ord(letter) % 32
        if character == "a" and not self.is_ecma:
            return 0x7
        if character == "k":
            self.refuse("back-references are not supported", start)
        if character.isascii() and character.isalnum():
            self.refuse(rf"the escape \{character} is not supported", start)
        return ord(character)

    def _known_class(self, name: str) -> CharRanges:
        if self.is_ecma:
            return {"d": charset.ECMA_DIGITS, "w": charset.ECMA_WORD, "s": charset.ECMA_SPACE}[name]
        return charset.python_classes()[name]

    def _property(self, start: int, *, is_negated: bool) -> CharRanges:
        end = self.pattern.find("}", self.position)
        if not self.take("{") or end < 0:
            self.refuse(r"a property is written \p{...}", start, "correct it")
        name = self.pattern[self.position : end]
        ranges = charset.general_category(name)
        if ranges is None:
            self.refuse(f"the property {name[:40]!r} is not supported", start, r"general categories are, as \p{Lu}")
        self.position = end + 1
        self._spend(len(ranges))
        return charset.complement(ranges) if is_negated else ranges

    def _number(self, start: int) -> int:
        r"""`\0`, and octal numbers where the dialect has them; all other numbers refer back."""
        found = _OCTAL.match(self.pattern, start + 1)
        if found is None or (self.is_ecma and found[0][0] != "0"):
            self.refuse("back-references are not supported", start)
        following = self.pattern[start + 2 : start + 3]
        if self.is_ecma and following and following in "0123456789":
            self.refuse("octal escapes are not supported", start, r"write \xHH")
        self.position = found.end()
        return int(found[0], 8)

    def _code_point(self, kind: str, start: int) -> int:
        if kind == "u" and self.take("{"):
            found = _HEX_DIGITS.match(self.pattern, self.position)
            if found is None or not self.pattern.startswith("}", found.end()) or len(found[0].lstrip("0")) > 6:
                self.refuse(r"\u{...} needs a hexadecimal code point", start, "correct it")
            self.position = found.end() + 1
            point = int(found[0], 16)
        else:
            point = self._hex(_HEX[kind], start)
            is_high = 0xD800 <= point <= 0xDBFF
            if (
                kind == "u"
                and is_high
                and re.match(r"\\u[dD][c-fC-F]", self.pattern[self.position : self.position + 4])
            ):
                self.position += 2
                point = 0x10000 + ((point - 0xD800) << 10) + self._hex(4, start) - 0xDC00
        if point > charset.MAX_CODE_POINT:
            self.refuse("a code point is at most 10FFFF", start, "lower it")
        return point

    def _hex(self, count: int, start: int) -> int:
        found = _HEX_DIGITS.match(self.pattern[self.position : self.position + count])
        if found is None or len(found[0]) != count:
            self.refuse(f"the escape needs {count} hexadecimal digits", start, "correct it")
        self.position += count
        return int(found[0], 16)

    def _refuse_set_notation(self) -> None:
        if self.pattern.startswith("[:", self.position) and ":]" in self.pattern[self.position : self.position + 14]:
            self.refuse("classes such as [:alpha:] are not supported", self.position, r"write \p{L}")
        if self.pattern.startswith(("&&[", "--["), self.position):
            self.refuse("operations on sets of characters are not supported", self.position)

    def _spend(self, intervals: int) -> None:
        self._class_work += intervals
        check(self._class_work, _CLASS_WORK, "intervals in the character classes of a pattern", self._param)
