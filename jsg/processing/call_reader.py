"""Reads one call of a tool, a JSON object with a name and arguments, character by character."""

import json
from typing import final

from jsg.processing.json_scanner import Half, JsonScanner, ScanStep

_MAX_STRING_LEN = 1_000


@final
class CallReader:
    """A call as far as it has been read. Members other than the name and the arguments are skipped.

    Invariants: `name` and `has_arguments` change once at most; the fragments that were taken, and what is left to take,
    are together the JSON of the arguments.

    Attributes:
        name: The tool's name, once it is known.
        has_arguments: The arguments have begun.
    """

    def __init__(self, arguments_key: str, names: frozenset[str] | None, name: str | None = None):
        """Begins a call.

        Args:
            arguments_key: Key of the arguments.
            names: The tools that exist; None accepts any name.
            name: Given where the text is the arguments alone, without an object around them.
        """
        self.name = name
        self.has_arguments = name is not None
        self._arguments_key = arguments_key
        self._names = names
        self._is_bare = name is not None
        self._scanner = JsonScanner()
        self._half: Half | None = None
        self._key = ""
        self._keys: set[str] = set()
        self._string: list[str] = []
        self._arguments: list[str] = []
        self._raw: list[str] = []

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._raw)

    @property
    def num_read(self) -> int:
        """The number of characters that were read."""
        return len(self._raw)

    def take_fragment(self) -> str:
        """The part of the arguments that was read since the last call of this method."""
        fragment = "".join(self._arguments)
        self._arguments.clear()
        return fragment

    def push(self, char: str) -> ScanStep:
        """Takes one character, of which the first is `{`. After LAST or WRONG the reader must not be used any more."""
        step = self._scanner.push(char)
        if step is not ScanStep.WRONG and not self._is_bare:
            step = self._check(char, step)
        if step is not ScanStep.WRONG:
            self._raw.append(char)
            if self._is_bare:
                self._arguments.append(char)
        return step

    def _check(self, char: str, step: ScanStep) -> ScanStep:
        """What a character of JSON is to a call."""
        before, self._half = self._half, self._scanner.half
        half = before or self._half
        is_value = half == "value"
        if half and not before:
            self._string = []
            if is_value and char != {"name": '"', self._arguments_key: "{"}.get(self._key, char):
                return ScanStep.WRONG
        if is_value and self._key == self._arguments_key:
            self.has_arguments = True
            self._arguments.append(char)
        elif half == "key" or (is_value and self._key == "name"):
            self._string.append(char)
            is_whole = self._half is None
            if len(self._string) > _MAX_STRING_LEN or (is_whole and not self._end_string(is_key=half == "key")):
                return ScanStep.WRONG
        if step is ScanStep.LAST:
            return self._end()
        return step

    def _end_string(self, *, is_key: bool) -> bool:
        """Takes a whole key or the name. False if a call must not have it."""
        text = json.loads("".join(self._string))
        if is_key:
            self._key = text
            is_allowed = text not in self._keys
            self._keys.add(text)
            return is_allowed
        if not text or (self._names is not None and text not in self._names):
            return False
        self.name = text
        return True

    def _end(self) -> ScanStep:
        if self.name is None:
            return ScanStep.WRONG
        if not self.has_arguments:
            self.has_arguments = True
            self._arguments = ["{}"]
        return ScanStep.LAST
