"""Reads JSON character by character and reports at once where the text stops being JSON."""

import enum
from typing import Literal, final

Half = Literal["key", "value"]
"""A half of a member of an object."""

MAX_DEPTH = 500

_WHITESPACE = frozenset(" \t\n\r")
_DIGITS = frozenset("0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_OPENING = {"}": "{", "]": "["}
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}
_NUMBER_ENDS = frozenset(("zero", "digits", "fraction", "exponent"))
# What may follow in a number, keyed by what came last.
_NUMBER_STEPS: dict[str, tuple[tuple[frozenset[str], str], ...]] = {
    "sign": ((frozenset("0"), "zero"), (_DIGITS, "digits")),
    "zero": ((frozenset("."), "point"), (frozenset("eE"), "e")),
    "digits": ((_DIGITS, "digits"), (frozenset("."), "point"), (frozenset("eE"), "e")),
    "point": ((_DIGITS, "fraction"),),
    "fraction": ((_DIGITS, "fraction"), (frozenset("eE"), "e")),
    "e": ((frozenset("+-"), "e sign"), (_DIGITS, "exponent")),
    "e sign": ((_DIGITS, "exponent"),),
    "exponent": ((_DIGITS, "exponent"),),
}
_SCALAR_STATES = frozenset(("string", "escape", "hex", "word", *_NUMBER_STEPS))


class ScanStep(enum.Enum):
    """What a character is to the value that is read."""

    INSIDE = enum.auto()
    """The value has the character and may go on."""
    LAST = enum.auto()
    """The value ends with the character."""
    WRONG = enum.auto()
    """The character is not allowed here, so the text is not JSON."""


@final
class JsonScanner:
    """One JSON value (RFC 8259) without white space around it. A number alone has no last character.

    Invariants: `_expects` names what may come next at the innermost open level; `_open` holds a `{` or `[` for each
    level, and "key" for a key that is not complete. After LAST or WRONG the scanner must not be used any more.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._expects = "value"
        self._rest = ""

    @property
    def half(self) -> Half | None:
        """The half of a member of the outermost object that is not complete; None between two halves."""
        match self._open:
            case ["{", "key", *_]:
                return "key"
            case ["{"]:
                return "value" if self._expects in _SCALAR_STATES else None
            case ["{", *_]:
                return "value"
        return None

    def push(self, char: str) -> ScanStep:
        """Takes one character."""
        match self._expects:
            case "string" | "escape" | "hex":
                return self._push_string(char)
            case "word":
                return self._push_word(char)
            case state if state in _NUMBER_STEPS:
                return self._push_number(char)
            case _:
                return self._push_structure(char)

    def _push_string(self, char: str) -> ScanStep:
        if self._expects == "escape":
            if char == "u":
                self._expects, self._rest = "hex", "0000"
            elif char in '"\\/bfnrt':
                self._expects = "string"
            else:
                return ScanStep.WRONG
        elif self._expects == "hex":
            if char not in _HEX:
                return ScanStep.WRONG
            self._rest = self._rest[1:]
            self._expects = "hex" if self._rest else "string"
        elif char == "\\":
            self._expects = "escape"
        elif char == '"':
            return self._end_value()
        elif char < " ":
            return ScanStep.WRONG
        return ScanStep.INSIDE

    def _push_word(self, char: str) -> ScanStep:
        if char != self._rest[0]:
            return ScanStep.WRONG
        self._rest = self._rest[1:]
        return ScanStep.INSIDE if self._rest else self._end_value()

    def _push_number(self, char: str) -> ScanStep:
        for chars, state in _NUMBER_STEPS[self._expects]:
            if char in chars:
                self._expects = state
                return ScanStep.INSIDE
        if self._expects not in _NUMBER_ENDS or self._end_value() is ScanStep.LAST:
            return ScanStep.WRONG
        return self._push_structure(char)

    def _push_structure(self, char: str) -> ScanStep:
        """Takes a character outside strings, numbers and words."""
        if char in _WHITESPACE:
            return ScanStep.INSIDE if self._open else ScanStep.WRONG
        match self._expects, char:
            case ("value" | "value or ]", _) if self._begin_value(char):
                return ScanStep.INSIDE
            case ("key" | "key or }", '"'):
                # A key is a string after which the level is not complete: `_end_value` knows by "key" on the stack.
                self._open.append("key")
                self._expects = "string"
                return ScanStep.INSIDE
            case ("colon", ":"):
                self._expects = "value"
                return ScanStep.INSIDE
            case ("more", ","):
                self._expects = "key" if self._open[-1] == "{" else "value"
                return ScanStep.INSIDE
            case ("more" | "key or }", "}") | ("more" | "value or ]", "]") if self._open[-1] == _OPENING[char]:
                self._open.pop()
                return self._end_value()
            case _:
                return ScanStep.WRONG

    def _begin_value(self, char: str) -> bool:
        """Whether a value may begin with the character; it is then taken."""
        if char in "{[":
            if len(self._open) >= MAX_DEPTH:
                return False
            self._open.append(char)
            self._expects = "key or }" if char == "{" else "value or ]"
        elif char == '"':
            self._expects = "string"
        elif char in _WORDS:
            self._expects, self._rest = "word", _WORDS[char]
        elif char == "-":
            self._expects = "sign"
        elif char in _DIGITS:
            self._expects = "zero" if char == "0" else "digits"
        else:
            return False
        return True

    def _end_value(self) -> ScanStep:
        if not self._open:
            return ScanStep.LAST
        if self._open[-1] == "key":
            self._open.pop()
            self._expects = "colon"
        else:
            self._expects = "more"
        return ScanStep.INSIDE
