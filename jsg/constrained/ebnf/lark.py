r"""Lark grammars and regular expressions of custom tools → patterns of JSON Schema, which can be in every call.

A string of arguments is spelled in as many ways as there are styles of calls, so its grammar must be a pattern. Rules
are put in place where they are called, which a rule that calls itself does not allow.

    start: "*** Begin" LF line+       →  ^(?:\*\*\* Begin(?:\n)(?:…)+)$
    line: ("+" | "-") /(.*)/ LF
    %import common.LF
"""

import re
from collections.abc import Mapping
from typing import final

from jsg.errors import GrammarError

MAX_CHARS = 32_768
"""The longest grammar, and the longest pattern."""
_MAX_DEPTH = 50

_INT = "[0-9]+"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = rf"(?:[0-9]+[eE][+-]?[0-9]+|{_DECIMAL}(?:[eE][+-]?[0-9]+)?)"
_NUMBER = f"(?:{_FLOAT}|{_INT})"
_COMMON: Mapping[str, str] = {
    **{"LF": r"\n", "CR": r"\r", "NEWLINE": r"(?:\r?\n)+", "WS": r"[ \t\f\r\n]+", "WS_INLINE": r"[ \t]+"},
    **{"DIGIT": "[0-9]", "HEXDIGIT": "[0-9a-fA-F]", "INT": _INT, "SIGNED_INT": f"[+-]?{_INT}"},
    **{"DECIMAL": _DECIMAL, "FLOAT": _FLOAT, "SIGNED_FLOAT": f"[+-]?{_FLOAT}"},
    **{"NUMBER": _NUMBER, "SIGNED_NUMBER": f"[+-]?{_NUMBER}"},
    **{"LCASE_LETTER": "[a-z]", "UCASE_LETTER": "[A-Z]", "LETTER": "[a-zA-Z]", "WORD": "[a-zA-Z]+"},
    **{"CNAME": "[_a-zA-Z][_a-zA-Z0-9]*", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"'},
}
"""The terminals of Lark's module `common`."""

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|//[^\n]*|\#[^\n]*)+)
    |(?P<define>[?!]*(?P<defined>[A-Za-z_]\w*)(?:\.-?\d+)?[ \t]*:)
    |(?P<imported>%import[ \t]+common
        (?:\.(?P<one>[A-Z_]+)(?:[ \t]*->[ \t]*(?P<alias>\w+))?|[ \t]*\((?P<some>[\w\s,]+)\)))
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?)
    |(?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[a-z]*)
    |(?P<times>~[ \t]*(?P<least>\d{1,4})(?:[ \t]*\.\.[ \t]*(?P<most>\d{1,4}))?)
    |(?P<name>->[ \t]*\w+|[A-Za-z_]\w*(?!\w*\{))
    |(?P<sign>\.\.|[()\[\]|*+?])""",
    re.VERBOSE | re.ASCII,
)
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?P?<(?![=!])\w+>|\(\?.?|.", re.DOTALL)
_FLAGS = re.compile(r"\(\?([a-z]+)\)")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_ANY, _NO_BREAK = r"[\s\S]", r"[^\n]"


def lark_pattern(text: str) -> str:
    """The pattern of the texts that a Lark grammar derives. Raises GrammarError if it has none, or is not Lark."""
    if len(text) > MAX_CHARS:
        raise _refusal(f"has more than {MAX_CHARS} characters")
    return _whole(_Reader(text).rules())


def regex_pattern(text: str) -> str:
    """The pattern of the texts that a regular expression of Rust matches as a whole. Raises GrammarError."""
    if len(text) > MAX_CHARS:
        raise _refusal(f"has more than {MAX_CHARS} characters")
    flags = _FLAGS.match(text)
    text = text if flags is None else text[flags.end() :]
    return _whole(_read_regex(text, "" if flags is None else flags[1], is_whole=True))


def _whole(pattern: str) -> str:
    return f"^(?:{pattern})$"


@final
class _Reader:
    """Reads the rules of a grammar, and writes the pattern of each when it is first called.

    Invariant: `_patterns` has the rules that are written, None for those that are being written.
    """

    def __init__(self, text: str):
        self._definitions: dict[str, list[tuple[str, str]]] = {}
        self._patterns: dict[str, str | None] = {}
        self._num_chars = 0
        self._tokens: list[tuple[str, str]] = []
        self._define(text)

    def _define(self, text: str) -> None:
        at = 0
        tokens: list[tuple[str, str]] | None = None
        while at < len(text):
            match = _TOKEN.match(text, at)
            if match is None or match.lastgroup is None:
                raise _refusal(f"has {text[at : at + 20]!a}, which is not supported")
            at = match.end()
            if (name := match["defined"]) is not None:
                tokens = self._definitions[name] = []
            elif match["imported"] is not None:
                for each in (match["some"] or match["one"]).replace(",", " ").split():
                    if each not in _COMMON:
                        raise _refusal(f"imports {each}, which is not known")
                    self._patterns[match["alias"] or each] = _COMMON[each]
                tokens = None
            elif match["space"] is None:
                if tokens is None:
                    raise _refusal(f"has {match[0][:20]!a} in no rule")
                kind = next(kind for kind in ("text", "regex", "times", "name", "sign") if match[kind] is not None)
                value = match[0] if kind != "times" else f"{{{match['least']},{match['most'] or match['least']}}}"
                tokens.append((kind, value))

    def rules(self) -> str:
        """The pattern of the rule `start`."""
        return self._pattern("start", 0)

    def _pattern(self, name: str, depth: int) -> str:
        if name in self._patterns:
            known = self._patterns[name]
            if known is None:
                raise _refusal(f"has a rule {name[:60]} that calls itself, which no pattern can follow")
        elif name not in self._definitions or depth > _MAX_DEPTH:
            raise _refusal(f"has no rule {name[:60]}" if depth <= _MAX_DEPTH else "nests too deeply")
        else:
            self._patterns[name] = None
            outside, self._tokens = self._tokens, self._definitions[name][::-1]
            known = self._patterns[name] = self._choice(depth + 1)
            if self._tokens:
                raise _refusal(f"has {self._tokens[-1][1]!a} where it cannot be, in the rule {name[:60]}")
            self._tokens = outside
        self._num_chars += len(known)
        if self._num_chars > MAX_CHARS:
            raise _refusal(f"makes a pattern of more than {MAX_CHARS} characters")
        return known

    def _choice(self, depth: int) -> str:
        if depth > _MAX_DEPTH:
            raise _refusal("nests too deeply")
        options = [self._sequence(depth)]
        while self._tokens and self._tokens[-1] == ("sign", "|"):
            self._tokens.pop()
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"

    def _sequence(self, depth: int) -> str:
        parts: list[str] = []
        while self._tokens and self._tokens[-1] not in (("sign", "|"), ("sign", ")"), ("sign", "]")):
            part = self._part(*self._tokens.pop(), depth)
            while self._tokens and (self._tokens[-1][0] == "times" or self._tokens[-1][1] in ("*", "+", "?")):
                part = f"(?:{part}){self._tokens.pop()[1]}"
            parts.append(part)
        return "".join(parts)

    def _part(self, kind: str, value: str, depth: int) -> str:
        if kind == "name":
            return "" if value.startswith("->") else f"(?:{self._pattern(value, depth)})"
        if kind == "regex":
            body, _, flags = value[1:].rpartition("/")
            return _read_regex(body, flags)
        if kind == "text":
            text = _unquoted(value)
            if self._tokens and self._tokens[-1] == ("sign", ".."):
                self._tokens.pop()
                other = self._tokens.pop() if self._tokens else ("", "")
                last = _unquoted(other[1]) if other[0] == "text" else ""
                if len(text) != 1 or len(last) != 1 or last < text:
                    raise _refusal(f"has a range from {value[:20]!a} that is none")
                return f"[{_escaped(text)}-{_escaped(last)}]"
            return f"(?i:{_escaped(text)})" if value.endswith("i") else _escaped(text)
        if value not in ("(", "["):
            raise _refusal(f"has {value!a} where it cannot be")
        inside = self._choice(depth + 1)
        if not self._tokens or self._tokens.pop() != ("sign", ")" if value == "(" else "]"):
            raise _refusal(f"has a {value} that is not closed")
        return f"(?:{inside})" if value == "(" else f"(?:{inside})?"


def _unquoted(value: str) -> str:
    def char(match: re.Match[str]) -> str:
        digits = match[1] or match[2] or match[3]
        code = None if digits is None else int(digits, 16)
        if code is not None and (code > 0x10FFFF or 0xD800 <= code < 0xE000):
            raise _refusal(f"has {match[0]}, which is no character")
        return _CONTROLS.get(match[4], match[4]) if code is None else chr(code)

    return _ESCAPE.sub(char, value.removesuffix("i")[1:-1])


def _escaped(text: str) -> str:
    return re.sub(r"[\\^$.*+?()\[\]{}|/]", r"\\\g<0>", text)


def _read_regex(text: str, flags: str = "", *, is_whole: bool = False) -> str:
    """A regular expression of Python or Rust as one of JSON Schema, which can be inside another one.

    Anchors at its ends say nothing where the text is whole. Raises GrammarError.
    """
    if unknown := set(flags) - set("imsu"):
        raise _refusal(f"has a regular expression with the flag {min(unknown)}, which is not supported")

    def piece(match: re.Match[str]) -> str:
        found = match[0]
        if found == ".":
            return _ANY if "s" in flags else _NO_BREAK
        if found == r"\/":
            return "/"
        if is_whole and (found, match.start()) == ("^", 0):
            return ""
        if is_whole and (found, match.end()) == ("$", len(text)):
            return ""
        if found in ("^", "$") or found in (r"\A", r"\z", r"\Z", r"\b", r"\B") or found in ("(?=", "(?!", "(?<"):
            raise _refusal(f"has {found} inside a regular expression, which is not supported")
        return "(?:" if found.startswith(("(?P<", "(?<")) else found

    found = _PIECE.sub(piece, text)
    return f"(?i:{found})" if "i" in flags else f"(?:{found})"


def _refusal(what: str) -> GrammarError:
    return GrammarError(f"the grammar {what}")
