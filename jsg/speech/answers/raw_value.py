"""Turns the text of one argument into JSON while it comes, for styles that write strings without quotes."""

import json
from collections.abc import Callable
from typing import final

from jsg.constrained.call_styles import ALL_TYPES, PYTHON_WORDS, json_of
from jsg.speech.answers.json_scanner import JsonScanner, ScanStep

MAX_SCALAR_LEN = 1_000
_WHITESPACE = " \t\r\n"


def json_text(text: str) -> str:
    """A part of a string as JSON has it between the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


@final
class RawValue:
    """One value as far as its text is known.

    - If it can only be a string, every character is given at once.
    - If it cannot be a string, an array or object is given as it comes and must be JSON. Anything else is held until
      its end, and has at most `MAX_SCALAR_LEN` characters: it is JSON, Python's True, False or None, or else a string
      after all, because the client should see what the model wrote.
    - If it can be both, it is held while it may be JSON. It is JSON if it is JSON of a type that it may have, other
      than a string; else it is a string.
    """

    def __init__(self, types: frozenset[str]):
        """Begins a value of one of these types."""
        self._types = types
        self._held: list[str] = []
        self._scanner = JsonScanner()
        self._step = ScanStep.INSIDE
        self._take: Callable[[str], str | None] = self._undecided
        self._prefix = ""
        if types == {"string"}:
            self._take, self._prefix = json_text, '"'

    @property
    def is_inside_json(self) -> bool:
        """Whether the value is an array or object that is not complete. Then what looks like a mark is in a string."""
        return self._take == self._in_container

    def push(self, char: str) -> str | None:
        """Takes one character, and gives the JSON that is certain now; None where it cannot be such a value."""
        found = self._take(char)
        if found is None:
            return None
        prefix, self._prefix = self._prefix, ""
        return prefix + found

    def finish(self) -> str | None:
        """Ends the value, and gives the rest of its JSON; None where it is not whole."""
        if self._take == json_text:
            return self._prefix + '"'
        if self._take == self._behind:
            return ""
        if self._take == self._in_container:
            return None
        held = "".join(self._held)
        if "string" in self._types:
            return json_of(held, self._types) or f'"{json_text(held)}"'
        return json_of(held.rstrip(_WHITESPACE), ALL_TYPES) or f'"{json_text(held)}"'

    def _undecided(self, char: str) -> str | None:
        """In text that is held because its type is not known."""
        if "string" not in self._types:
            return self._not_a_string(char)
        self._held.append(char)
        # JSON that has ended goes on as text, and a string with quotes is text with quotes.
        is_open = self._step is ScanStep.INSIDE and self._held[0] != '"'
        self._step = self._scanner.push(char) if is_open else ScanStep.WRONG
        if self._step is not ScanStep.WRONG:
            return ""
        held = "".join(self._held)
        if any(word.startswith(held) for word in PYTHON_WORDS):
            return ""
        self._take = json_text
        return '"' + json_text(held)

    def _not_a_string(self, char: str) -> str | None:
        if not self._held and char in _WHITESPACE:
            return ""
        if not self._held and char in "{[":
            self._take = self._in_container
            return self._in_container(char)
        self._held.append(char)
        return "" if len(self._held) <= MAX_SCALAR_LEN else None

    def _in_container(self, char: str) -> str | None:
        step = self._scanner.push(char)
        if step is ScanStep.LAST:
            self._take = self._behind
        return None if step is ScanStep.WRONG else char

    def _behind(self, char: str) -> str | None:
        return "" if char in _WHITESPACE else None
