"""Reads one call of a tool, a JSON object with a name and arguments, character by character."""

import json
from typing import final

from jsg.processing.json_scanner import JsonScanner, ScanStep

_WHITESPACE = frozenset(" \t\n\r")
_MAX_STRING_LEN = 1_000


@final
class CallReader:
    """A call as far as it has come. Members other than name and arguments are read over.

    Invariants: `name` and `has_arguments` change once, and only to something; the fragments that were taken and those
    that were not are the JSON of the arguments.

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
        self._keys: set[str] = set()
        self._scanner = JsonScanner()
        self._string: list[str] = []
        self._arguments: list[str] = []
        self._raw: list[str] = []

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._raw)

    @property
    def num_read(self) -> int:
        """How many characters."""
        return len(self._raw)

    def take_fragment(self) -> str:
        """What the arguments grew by since this was called last."""
        fragment = "".join(self._arguments)
        self._arguments.clear()
        return fragment

    def push(self, char: str) -> ScanStep:
        """Takes one character; after LAST or WRONG no more may come."""
        step = self._push(char)
        if step is not ScanStep.WRONG:
            self._raw.append(char)
        return step

    def _push(self, char: str) -> ScanStep:
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
                self._expects = "key"
                self._scanner = JsonScanner()
                self._string = []
                return self._push_key(char)
            case (":", ":"):
                self._expects = "value start"
                self._scanner = JsonScanner()
                self._string = []
            case ("value start", _):
                self._expects = "value"
                return self._begin_value(char)
            case ("more", ","):
                self._expects = "next key"
            case ("more", "}") if self.name is not None:
                if not self.has_arguments:
                    self.has_arguments = True
                    self._arguments = ["{}"]
                return ScanStep.LAST
            case _:
                return ScanStep.WRONG
        return ScanStep.INSIDE

    def _push_key(self, char: str) -> ScanStep:
        self._string.append(char)
        step = self._scanner.push(char)
        if step is ScanStep.LAST:
            self._key = json.loads("".join(self._string))
            if self._key in self._keys:
                return ScanStep.WRONG
            self._keys.add(self._key)
            self._expects = ":"
        elif len(self._string) > _MAX_STRING_LEN:
            return ScanStep.WRONG
        return ScanStep.WRONG if step is ScanStep.WRONG else ScanStep.INSIDE

    def _begin_value(self, char: str) -> ScanStep:
        wanted = {"name": '"', self._arguments_key: "{"}.get(self._key, char)
        if char != wanted:
            return ScanStep.WRONG
        self.has_arguments = self.has_arguments or self._key == self._arguments_key
        return self._push_value(char)

    def _push_value(self, char: str) -> ScanStep:
        step = self._scanner.push(char)
        if step is ScanStep.WRONG:
            return step
        if step is ScanStep.AFTER:
            self._expects = "more"
            return self._push(char)
        if self._key == self._arguments_key:
            self._arguments.append(char)
        elif self._key == "name":
            self._string.append(char)
            if len(self._string) > _MAX_STRING_LEN:
                return ScanStep.WRONG
        if step is ScanStep.LAST:
            return self._end_value()
        return ScanStep.INSIDE

    def _end_value(self) -> ScanStep:
        self._expects = "more"
        if self._is_bare:
            return ScanStep.LAST
        if self._key == "name":
            name = json.loads("".join(self._string))
            if not name or (self._names is not None and name not in self._names):
                return ScanStep.WRONG
            self.name = name
        return ScanStep.INSIDE
