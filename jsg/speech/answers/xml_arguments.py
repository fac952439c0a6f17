"""Reads arguments between marks, character by character."""

import json
from collections.abc import Callable, Mapping
from typing import final

from jsg.constrained.call_styles import ALL_TYPES, TYPE_MARKS, ArgumentTypes, XmlMarks
from jsg.speech.answers.json_scanner import ScanStep
from jsg.speech.answers.raw_value import RawValue

MAX_NAME_LEN = 1_000
NO_NAME = frozenset("<>\n")
_WHITESPACE = " \t\r\n"


@final
class XmlArguments:
    """What follows the name, up to the mark after the last argument. White space between marks does not matter.

    Of a string it holds back what may be the mark after it: less than the mark and the pad are long. `RawValue` says
    what of other values is held.
    """

    def __init__(self, marks: XmlMarks, types: ArgumentTypes, fragments: list[str]):
        """Begins the arguments, which may be of these `types` and go to `fragments` as JSON."""
        self._marks = marks
        self._types = types
        self._fragments = fragments
        self._expected: Mapping[str, Callable[[str], None]] = {}
        self._held = ""
        self._lead = "{"
        self._key = ""
        self._value = RawValue(ALL_TYPES)
        self._take: Callable[[str], ScanStep]
        self._expect_argument()

    def push(self, char: str) -> ScanStep:
        """Takes one character."""
        return self._take(char)

    # The states. Each is a method that takes one character.

    def _between(self, char: str) -> ScanStep:
        """Between marks, or inside one that is expected."""
        if char in _WHITESPACE and not self._held:
            return ScanStep.INSIDE
        self._held += char
        if self._held in self._expected:
            mark, self._held = self._held, ""
            self._expected[mark](mark)
            return ScanStep.LAST if mark == self._marks.end else ScanStep.INSIDE
        return ScanStep.INSIDE if any(mark.startswith(self._held) for mark in self._expected) else ScanStep.WRONG

    def _in_key(self, char: str) -> ScanStep:
        end = self._marks.key[1]
        self._held += char
        if self._held.endswith(end):
            return ScanStep.INSIDE if self._end_key(self._held[: -len(end)]) else ScanStep.WRONG
        is_wrong = len(self._held) > MAX_NAME_LEN or (char in NO_NAME and char not in end)
        return ScanStep.WRONG if is_wrong else ScanStep.INSIDE

    def _before_value(self, char: str) -> ScanStep:
        """At the first character of a value, which may be the pad."""
        self._take = self._in_value
        return ScanStep.INSIDE if char == self._marks.pad else self._in_value(char)

    def _in_value(self, char: str) -> ScanStep:
        """In a value or in what may be the mark after it, which is held."""
        mark = self._marks.value[1]
        if self._value.is_inside_json:
            return self._push_text(char)
        self._held += char
        pad = self._marks.pad if self._marks.pad and self._held.startswith(self._marks.pad) else ""
        if self._held == pad + mark:
            return self._end_value()
        if (pad + mark).startswith(self._held):
            return ScanStep.INSIDE
        # The mark's first character is in it only once, so the mark begins with the newest character at the earliest.
        is_begun = char in (self._marks.pad, mark[0])
        text, self._held = (self._held[:-1], char) if is_begun else (self._held, "")
        return self._push_text(text)

    # What ends and begins.

    def _expect(self, marks: Mapping[str, Callable[[str], None]]) -> None:
        self._expected = marks
        self._take = self._between

    def _expect_argument(self) -> None:
        self._expect({self._marks.key[0]: self._begin_key, self._marks.end: self._end_call})

    def _begin_key(self, _: str) -> None:
        self._take = self._in_key

    def _end_key(self, key: str) -> bool:
        """Takes a key. False if a call must not have it."""
        self._held = ""
        if not key:
            return False
        self._fragments.append(f"{self._lead}{json.dumps(key, ensure_ascii=False)}: ")
        self._lead = ", "
        self._key = key
        if self._marks.says_type:
            self._expect(dict.fromkeys(TYPE_MARKS, self._begin_value))
        elif self._marks.value[0]:
            self._expect({self._marks.value[0]: self._begin_value})
        else:
            self._begin_value("")
        return True

    def _begin_value(self, mark: str) -> None:
        is_string = TYPE_MARKS.get(mark) if self._marks.says_type else None
        types = self._types.of(self._key)
        if is_string is not None:
            types = frozenset(("string",)) if is_string else ALL_TYPES - {"string"}
        self._value = RawValue(types)
        self._take = self._before_value

    def _push_text(self, text: str) -> ScanStep:
        for char in text:
            fragment = self._value.push(char)
            if fragment is None:
                return ScanStep.WRONG
            self._fragments.append(fragment)
        return ScanStep.INSIDE

    def _end_value(self) -> ScanStep:
        self._held = ""
        fragment = self._value.finish()
        if fragment is None:
            return ScanStep.WRONG
        self._fragments.append(fragment)
        self._expect_argument()
        return ScanStep.INSIDE

    def _end_call(self, _: str) -> None:
        self._fragments.append("{}" if self._lead == "{" else "}")
