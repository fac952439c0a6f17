"""Splits an EBNF grammar into tokens, and keeps where each of them is."""

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple, NoReturn

from jsg.constrained.chars.charset import complement, of_ranges
from jsg.constrained.ir import CharRanges
from jsg.errors import GrammarError

PARAM = "ebnf"
MAX_REPEATS = 2**31 - 1

Kind = Literal["name", "::=", "text", "class", "(", ")", "|", "repeat", "end"]

_SPACE = re.compile(r"(?:[ \t\r\n\ufeff]+|#[^\n]*)+")
# A dot belongs to a name only inside it: alone it is any character.
_NAME = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")
_REPEAT = re.compile(r"\{[ \t]*(\d*)[ \t]*(?:(,)[ \t]*(\d*|-1)[ \t]*)?\}", re.ASCII)
_HEX = {"x": 2, "u": 4, "U": 8}
_HEX_DIGITS = re.compile(r"[0-9A-Fa-f]+")
_BRACED = re.compile(r"\{([0-9A-Fa-f]{1,6})\}")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "e": "\x1b", "0": "\0"}
_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ANY = complement(())
# Signs of other dialects that this one does not have. An error names the construct.
_FOREIGN = {
    "(?": "look-around and other groups that begin with (?",
    "(=": "the look-ahead assertion (= …)",
    "/": "a regular expression between slashes",
    "<": "a token between angle brackets",
    "!": "negation",
    "&": "a look-ahead assertion or an intersection",
    "%": "a directive",
    "@": "an annotation",
    "$": "a macro",
    ";": "a semicolon behind a rule",
    ",": "a comma between parts",
    "=": "a definition with =",
    ":": "a definition with :",
    "^": "an anchor",
}


class Token(NamedTuple):
    """One token of a grammar.

    Attributes:
        kind: The kind of the token.
        offset: Where it begins, in characters.
        value: A name, or the text of a literal.
        ranges: The characters of a class.
        bounds: Least and most of a repeat.
    """

    kind: Kind
    offset: int
    value: str = ""
    ranges: CharRanges = ()
    bounds: tuple[int, int | None] = (1, 1)


class Source:
    """The text of a grammar, and errors that say where in it they are."""

    def __init__(self, text: str):
        self.text = text

    def where(self, offset: int) -> str:
        """Line and column, from 1."""
        line = self.text.count("\n", 0, offset) + 1
        return f"line {line} column {offset - self.text.rfind(chr(10), 0, offset)}"

    def refuse(self, offset: int, rule: str, remedy: str) -> NoReturn:
        """Raises the error for what is at `offset`."""
        raise GrammarError(f"{PARAM}, {self.where(offset)}: {rule}; {remedy}", PARAM)

    def found(self, offset: int) -> str:
        """An excerpt of the text at `offset` for a message."""
        return ascii(self.text[offset : offset + 20]) if offset < len(self.text) else "the end of the grammar"


def tokens_of(source: Source) -> Iterator[Token]:
    """The tokens in their order; the last one is of the kind "end"."""
    text = source.text
    offset = 0
    while True:
        if space := _SPACE.match(text, offset):
            offset = space.end()
        if offset >= len(text):
            yield Token("end", offset)
            return
        token, offset = _next(source, offset)
        yield token


def _next(source: Source, offset: int) -> tuple[Token, int]:
    """The token that begins at `offset`, where no space is, and where it ends."""
    text = source.text
    char = text[offset]
    if char in "\"'":
        value, end = _quoted(source, offset)
        return Token("text", offset, value), end
    if char == "[":
        ranges, end = _class(source, offset)
        return Token("class", offset, ranges=ranges), end
    if char == ".":
        return Token("class", offset, ranges=_ANY), offset + 1
    if char in _QUANTIFIERS:
        return Token("repeat", offset, bounds=_QUANTIFIERS[char]), offset + 1
    if char == "{":
        return _repeat(source, offset)
    if text.startswith("::=", offset):
        return Token("::=", offset), offset + 3
    if (char in "()|") and text[offset : offset + 2] not in _FOREIGN:
        return Token(char, offset), offset + 1  # pyright: ignore[reportArgumentType]
    if name := _NAME.match(text, offset):
        return Token("name", offset, name[0]), name.end()
    if foreign := _FOREIGN.get(text[offset : offset + 2], _FOREIGN.get(char)):
        source.refuse(offset, f"{foreign} is not supported, but found {source.found(offset)}", "write it another way")
    source.refuse(
        offset,
        f"expected a rule's name, a quoted text, a class in brackets or a group, but found {source.found(offset)}",
        "correct it, or quote it if it is meant as text",
    )


def _repeat(source: Source, offset: int) -> tuple[Token, int]:
    match = _REPEAT.match(source.text, offset)
    if match is None or not (match[1] or match[3]):
        source.refuse(
            offset,
            f"expected a repeat such as {{2}}, {{2,}} or {{2,5}}, but found {source.found(offset)}",
            "correct it",
        )
    if any(len(count) > 10 or int(count or 0) > MAX_REPEATS for count in (match[1], match[3] or "")):
        source.refuse(offset, f"a repeat may be at most {MAX_REPEATS}", "write {m,} for one without end")
    least = int(match[1] or 0)
    most = least if match[2] is None else None if match[3] in ("", "-1") else int(match[3])
    if most is not None and most < least:
        source.refuse(offset, f"a repeat must have its smaller number first, but found {match[0]}", "swap them")
    return Token("repeat", offset, bounds=(least, most)), match.end()


def _quoted(source: Source, start: int) -> tuple[str, int]:
    """The text between quotes, and where they end."""
    text, quote = source.text, source.text[start]
    chars: list[str] = []
    offset = start + 1
    while offset < len(text) and text[offset] != quote:
        if text[offset] in "\r\n":
            break
        char, offset = _char(source, offset)
        chars.append(char)
    if offset >= len(text) or text[offset] != quote:
        source.refuse(
            start, f"a quoted text must end with {quote} on its line", "close it, or write \\n for a line break"
        )
    return "".join(chars), offset + 1


def _class(source: Source, start: int) -> tuple[CharRanges, int]:
    """The characters of a class in brackets, and where it ends."""
    text = source.text
    offset = start + 1
    is_negated = text.startswith("^", offset)
    offset += is_negated
    ranges: list[tuple[int, int]] = []
    while offset < len(text) and text[offset] not in "]\r\n":
        at = offset
        first, offset = _char(source, offset)
        last = first
        if text.startswith("-", offset) and not text.startswith("-]", offset) and offset + 1 < len(text):
            last, offset = _char(source, offset + 1)
        if last < first:
            source.refuse(
                at, f"a range must have its smaller character first, but found {text[at:offset]!a}", "swap them"
            )
        ranges.append((ord(first), ord(last)))
    if offset >= len(text) or text[offset] != "]":
        source.refuse(start, "a class must end with ] on its line", "close it, or write \\n for a line break")
    if not ranges and not is_negated:
        source.refuse(start, "a class must have a character in it, but found []", "add one, or leave it out")
    found = of_ranges(ranges)
    return complement(found) if is_negated else found, offset + 1


def _char(source: Source, offset: int) -> tuple[str, int]:
    """One character as written in quotes or in a class, and where it ends."""
    text = source.text
    if text[offset] != "\\":
        return text[offset], offset + 1
    escape = text[offset + 1 : offset + 2]
    if escape in _CONTROLS and escape:
        return _CONTROLS[escape], offset + 2
    if escape in _HEX and escape:
        code, end = _code(source, offset)
        if 0xD800 <= code <= 0xDBFF and text.startswith("\\u", end):
            low, after = _code(source, end)
            if 0xDC00 <= low <= 0xDFFF:
                code, end = 0x10000 + (code - 0xD800) * 0x400 + low - 0xDC00, after
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            source.refuse(offset, f"there is no character U+{code:04X}", "correct the escape")
        return chr(code), end
    if escape and escape.isascii() and not escape.isalnum() and not escape.isspace():
        return escape, offset + 2
    if escape and escape in "dDwWsSpP":
        source.refuse(offset, f"the class \\{escape} is not supported in EBNF", "write its characters in brackets")
    source.refuse(
        offset,
        f"there is no escape {text[offset : offset + 2]!a}",
        "write the character itself, or \\\\ for a backslash",
    )


def _code(source: Source, offset: int) -> tuple[int, int]:
    """The number of an escape of hexadecimal digits, and where it ends."""
    text, kind = source.text, source.text[offset + 1]
    if kind == "u" and (braced := _BRACED.match(text, offset + 2)):
        return int(braced[1], 16), braced.end()
    end = offset + 2 + _HEX[kind]
    if not _HEX_DIGITS.fullmatch(text[offset + 2 : end]) or end > len(text):
        source.refuse(
            offset, f"\\{kind} must have {_HEX[kind]} hexadecimal digits, but found {text[offset:end]!a}", "add them"
        )
    return int(text[offset + 2 : end], 16), end
