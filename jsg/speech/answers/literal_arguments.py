"""Reads arguments that are literals of Python or of a notation like it, character by character."""

import json
import math
import re
from collections.abc import Callable
from typing import NamedTuple, final

from jsg.constrained.call_styles import PLAIN_NAME, PYTHON_WORDS, LiteralMarks
from jsg.speech.answers.json_scanner import MAX_DEPTH, ScanStep
from jsg.speech.answers.raw_value import MAX_SCALAR_LEN, json_text

_WHITESPACE = " \t\r\n"
_WORDS = {**PYTHON_WORDS, "true": "true", "false": "false", "null": "null"}
_SCALAR = re.compile(r"[\w.+-]", re.ASCII)
_NAME_CHAR = re.compile(PLAIN_NAME)
_JSON_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_PYTHON_NUMBER = re.compile(
    r"[+-]?(0[xX][\da-fA-F_]+|0[oO][0-7_]+|0[bB][01_]+|[\d_]*\.?[\d_]*([eE][+-]?\d+)?)", re.ASCII
)
_ESCAPES = {
    **{"n": r"\n", "t": r"\t", "r": r"\r", "b": r"\b", "f": r"\f", "v": r"\u000b", "a": r"\u0007"},
    **{"\\": r"\\", '"': r"\"", "'": "'", "/": "/", "\n": ""},
}
"""What follows a backslash, and JSON for both."""
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


class _Level(NamedTuple):
    """An open bracket.

    Attributes:
        end: The bracket that closes it.
        json_end: The bracket that closes it in JSON.
        assign: What separates a key from its value; "" for a list.
        has_bare_keys: Keys may have no quotes.
    """

    end: str
    json_end: str
    assign: str = ""
    has_bare_keys: bool = False


@final
class LiteralArguments:
    """What follows the name and its bracket, up to the bracket after the arguments.

    Of strings it gives every character when it comes, except escapes (at most nine characters) and what may be the
    mark after a string. Keys, numbers and words are held until they end, and have at most `MAX_SCALAR_LEN` characters.

    Lists, tuples and dictionaries with strings as keys, strings in one quote on each side, numbers, and the words of
    Python and JSON are read. Names of variables, calls inside calls and positional arguments are no literals.
    """

    def __init__(self, marks: LiteralMarks, fragments: list[str]):
        """Begins the arguments, which go to `fragments` as JSON once the first one has its key."""
        self._marks = marks
        self._begun = fragments
        self._fragments: list[str] = []
        self._take: Callable[[str], ScanStep] = self._in_structure
        self._levels = [_Level(marks.end, "}", marks.assign, has_bare_keys=True)]
        self._expects = "key"
        self._lead = "{"
        self._held = ""
        self._quote = ""

    def push(self, char: str) -> ScanStep:
        """Takes one character."""
        return self._take(char)

    # The states. Each is a method that takes one character.

    def _in_structure(self, char: str) -> ScanStep:
        """Outside strings, numbers and words."""
        level = self._levels[-1]
        if char in _WHITESPACE:
            return ScanStep.INSIDE
        if char == level.end and self._expects != "assign" and not (level.assign and self._expects == "value"):
            return self._close(level)
        match self._expects:
            case "more" if char == ",":
                self._lead = ", "
                self._expects = "key" if level.assign else "value"
                return ScanStep.INSIDE
            case "assign" if char == level.assign:
                self._fragments.append(": ")
                self._expects = "value"
                self._begin_arguments()
                return ScanStep.INSIDE
            case "key" | "value" if self._begin(char, level):
                return ScanStep.INSIDE
            case _:
                return ScanStep.WRONG

    def _in_quote(self, char: str) -> ScanStep:
        """In the mark before a string."""
        self._held += char
        if self._held == self._marks.quote:
            self._begin_string(self._held)
        return ScanStep.INSIDE if self._quote or (self._marks.quote or "").startswith(self._held) else ScanStep.WRONG

    def _in_raw_string(self, char: str) -> ScanStep:
        """In a string between marks, or in what may be the mark after it."""
        self._held += char
        if self._held == self._quote:
            return self._end_string()
        if not self._quote.startswith(self._held):
            # The mark's first character is in it only once.
            kept = char if char == self._quote[0] else ""
            self._fragments.append(json_text(self._held.removesuffix(kept)))
            self._held = kept
        return ScanStep.INSIDE

    def _in_string(self, char: str) -> ScanStep:
        """In a string with quotes."""
        if char == self._quote:
            return self._end_string()
        if char == "\\":
            self._take = self._in_escape
        else:
            self._fragments.append(json_text(char))
        return ScanStep.INSIDE

    def _in_escape(self, char: str) -> ScanStep:
        """After a backslash."""
        kind = self._held[:1] or char
        if kind in "01234567":
            if char in "01234567":
                self._held += char
            if len(self._held) == 3 or char not in "01234567":
                self._end_escape(json_text(chr(int(self._held, 8))))
                return ScanStep.INSIDE if char in "01234567" else self._in_string(char)
            return ScanStep.INSIDE
        if kind not in _HEX_DIGITS:
            self._end_escape(_ESCAPES.get(char, "\\\\" + json_text(char)))
            return ScanStep.INSIDE
        if self._held and char not in "0123456789abcdefABCDEF":
            return ScanStep.WRONG
        self._held += char
        if len(self._held) > _HEX_DIGITS[kind]:
            code = int(self._held[1:], 16)
            if code > 0x10FFFF:
                return ScanStep.WRONG
            # JSON puts the two halves of a surrogate pair together, which Python does not.
            self._end_escape(json.dumps(chr(code))[1:-1])
        return ScanStep.INSIDE

    def _in_scalar(self, char: str) -> ScanStep:
        """In a number or a word."""
        if _SCALAR.match(char):
            self._held += char
            return ScanStep.INSIDE if len(self._held) <= MAX_SCALAR_LEN else ScanStep.WRONG
        found = _WORDS.get(self._held) or _number(self._held)
        if found is None:
            return ScanStep.WRONG
        self._fragments.append(found)
        self._end_part("more")
        return self._take(char)

    def _in_bare_key(self, char: str) -> ScanStep:
        if _NAME_CHAR.match(char):
            self._held += char
            return ScanStep.INSIDE if len(self._held) <= MAX_SCALAR_LEN else ScanStep.WRONG
        self._fragments.append(json.dumps(self._held, ensure_ascii=False))
        self._end_part("assign")
        return self._take(char)

    # What ends and begins.

    def _begin(self, char: str, level: _Level) -> bool:
        """Whether a key or a value may begin with the character; it is then taken."""
        is_key = self._expects == "key"
        is_bare = is_key and level.has_bare_keys and _NAME_CHAR.match(char) is not None
        is_quote = char in ('"', "'") and (not is_key or len(self._levels) > 1 or self._marks.quote is not None)
        is_mark = self._marks.quote is not None and char == self._marks.quote[0]
        is_open = not is_key and char in "[({" and len(self._levels) < MAX_DEPTH
        is_scalar = not is_key and _SCALAR.match(char) is not None
        if not (is_bare or is_quote or is_mark or is_open or is_scalar):
            return False
        if is_key or not level.assign:
            self._fragments.append(self._lead)
            self._lead = ""
        if is_open:
            self._open(char)
        elif is_quote:
            self._begin_string(char)
        else:
            self._held = char
            self._take = self._in_quote if is_mark else self._in_bare_key if is_bare else self._in_scalar
        return True

    def _open(self, char: str) -> None:
        has_bare_keys = self._marks.quote is not None
        self._levels.append(_Level("}", "}", ":", has_bare_keys) if char == "{" else _Level(_END[char], "]"))
        self._lead = "{" if char == "{" else "["
        self._expects = "key" if char == "{" else "value"

    def _close(self, level: _Level) -> ScanStep:
        # The opening bracket of something empty is still to be given.
        self._fragments.append((self._lead if self._lead != ", " else "") + level.json_end)
        self._levels.pop()
        self._lead = ""
        self._expects = "more"
        self._begin_arguments()
        return ScanStep.INSIDE if self._levels else ScanStep.LAST

    def _begin_arguments(self) -> None:
        if self._fragments is not self._begun:
            self._begun += self._fragments
            self._fragments = self._begun

    def _begin_string(self, quote: str) -> None:
        self._quote, self._held = quote, ""
        self._fragments.append('"')
        self._take = self._in_raw_string if quote == self._marks.quote else self._in_string

    def _end_string(self) -> ScanStep:
        self._fragments.append('"')
        self._quote = ""
        self._end_part("assign" if self._expects == "key" else "more")
        return ScanStep.INSIDE

    def _end_escape(self, found: str) -> None:
        self._fragments.append(found)
        self._held = ""
        self._take = self._in_string

    def _end_part(self, expects: str) -> None:
        self._held = ""
        self._expects = expects
        self._take = self._in_structure


_END = {"[": "]", "(": ")"}


def _number(text: str) -> str | None:
    """A number of JSON or Python as JSON; None if it is no finite number."""
    if _JSON_NUMBER.fullmatch(text):
        return text
    if not _PYTHON_NUMBER.fullmatch(text):
        return None
    is_float = re.fullmatch(r"[^xX]*[.eE].*", text) is not None
    try:
        value = float(text) if is_float else int(text, 0)
    except ValueError:
        return None
    return json.dumps(value) if math.isfinite(value) else None
