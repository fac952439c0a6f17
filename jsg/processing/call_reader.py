"""Reads one call of a tool, a JSON object with a name and arguments, character by character."""

import json
from typing import final

from jsg.processing.json_scanner import JsonScanner, ScanStep

_WHITESPACE = frozenset(" \t\n\r")
_MAX_KEY_LEN = 1_000


@final
class CallReader:
    """A call as far as it has come.

    Invariants: `name` and `has_arguments` change once, and only to something; the fragments that were taken and those
    that were not are the arguments' JSON.

    Attributes:
        name: Of the tool, once it is known.
        has_arguments: The arguments have begun.
    """

    def __init__(self, arguments_key: str, names: frozenset[str] | None, name: str | None = None):
        """Begins a call.

        Args:
            arguments_key: Key of the arguments.
            names: Tools there are; None takes any name.
            name: Given where only the arguments are to be read, not an object around them.
        """
        self.name = name
        self.has_arguments = name is not None
        self._arguments_key = arguments_key
        self._names = names
        self._is_bare = name is not None
        self._expects = "value" if self._is_bare else "{"
        self._key = arguments_key if self._is_bare else ""
        self._scanner = JsonScanner()
        self._value: list[str] = []
        self._raw: list[str] = []
        self._seen: set[str] = set()

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._raw)

    def take_fragment(self) -> str:
        """What the arguments grew by since the last time; it is forgotten here."""
        if not self.has_arguments or self._key != self._arguments_key:
            return ""
        fragment = "".join(self._value)
        self._value.clear()
        return fragment

    def push(self, char: str) -> ScanStep:
        """Takes one character; after LAST or WRONG no more may come."""
        self._raw.append(char)
        if self._expects == "value":
            return self._push_value(char)
        if self._expects == "key":
            return self._push_key(char)
        if char in _WHITESPACE:
            return ScanStep.INSIDE
        match self._expects, char:
            case ("{", "{"):
                self._expects = "key or }"
            case (("key or }" | "next key"), '"'):
                self._scanner = JsonScanner()
                self._scanner.push(char)
                self._value = [char]
                self._expects = "key"
            case (":", ":"):
                self._scanner = JsonScanner()
                self._value = []
                self._expects = "value start"
            case ("value start", _):
                self._expects = "value"
                return self._begin_value(char)
            case ("more", ","):
                self._expects = "next key"
            case ("more", "}") if self.name is not None and self.has_arguments:
                return ScanStep.LAST
            case _:
                return ScanStep.WRONG
        return ScanStep.INSIDE
