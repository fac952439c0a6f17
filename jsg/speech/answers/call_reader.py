"""Reads one call of a tool, its name and its arguments, character by character."""

import json
import re
from collections.abc import Mapping
from typing import Protocol, final

from jsg.constrained.call_styles import LITERAL_MARKS, XML_MARKS, ArgumentTypes
from jsg.speech.answers.json_scanner import Half, JsonScanner, ScanStep
from jsg.speech.answers.literal_call_reader import LiteralCallReader
from jsg.speech.answers.read_call import ReadCall
from jsg.speech.answers.xml_call_reader import XmlCallReader
from jsg.speech.dialects import Dialect

_MAX_STRING_LEN = 1_000
_MAX_HEAD_LEN = 300


class BodyReader(Protocol):
    """A call as far as it has been read."""

    @property
    def name(self) -> str | None:
        """The tool's name, once it is known."""
        ...

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments have begun."""
        ...

    @property
    def text(self) -> str:
        """All that was read."""
        ...

    @property
    def num_read(self) -> int:
        """The number of characters that were read."""
        ...

    def take_fragment(self) -> str:
        """The part of the arguments, as JSON, that was read since the last call of this method."""
        ...

    def push(self, char: str) -> ScanStep:
        """Takes one character. After LAST or WRONG the reader must not be used any more.

        LAST without a name says that the text was a header of text, and no call.
        """
        ...


def reader_of(dialect: Dialect, names: frozenset[str] | None, types: Mapping[str, ArgumentTypes]) -> BodyReader:
    """A reader of one call of a dialect.

    Args:
        dialect: The model's.
        names: The tools that exist; None accepts any name.
        types: The types of the arguments of each tool, for styles that write strings without quotes.
    """
    match dialect.style:
        case "object":
            return CallReader(dialect.arguments_key, names)
        case "headed":
            return HeadedReader(dialect, names)
        case style if style in XML_MARKS:
            return XmlCallReader(XML_MARKS[style], names, types)
        case style:
            return LiteralCallReader(LITERAL_MARKS[style], names)


@final
class CallReader(ReadCall):
    """A JSON object with a name and arguments. Its other members are skipped.

    Invariant: `name` and `has_arguments` change once at most.
    """

    def __init__(self, arguments_key: str, names: frozenset[str] | None, name: str | None = None):
        """Begins a call.

        Args:
            arguments_key: Key of the arguments.
            names: The tools that exist; None accepts any name.
            name: Given where the text is the arguments alone, without an object around them.
        """
        super().__init__(name)
        self._arguments_key = arguments_key
        self._names = names
        self._is_bare = name is not None
        self._scanner = JsonScanner()
        self._half: Half | None = None
        self._key = ""
        self._keys: set[str] = set()
        self._string: list[str] = []

    def push(self, char: str) -> ScanStep:
        """Takes one character, of which the first is `{`. After LAST or WRONG the reader must not be used any more."""
        step = self._scanner.push(char)
        if step is not ScanStep.WRONG and not self._is_bare:
            step = self._check(char, step)
        if step is not ScanStep.WRONG:
            self._raw.append(char)
            if self._is_bare:
                self._fragments.append(char)
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
            self._fragments.append(char)
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
            self._fragments = ["{}"]
        return ScanStep.LAST


@final
class HeadedReader:
    """A head with the name, and then the arguments as a JSON object.

    Where answers are rows of messages, each message has a head. One without the name of a tool ends the reading.
    """

    def __init__(self, dialect: Dialect, names: frozenset[str] | None):
        self.name: str | None = None
        self.call_id: str | None = None  # the id that the model itself gave the call
        self._dialect = dialect
        self._names = names
        self._head_end = dialect.messages.head_end if dialect.messages else None
        self._head = ""
        self._arguments: CallReader | None = None

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments have begun."""
        return self._arguments is not None

    @property
    def text(self) -> str:
        """All that was read."""
        return self._head + (self._arguments.text if self._arguments else "")

    @property
    def num_read(self) -> int:
        """The number of characters that were read."""
        return len(self._head) + (self._arguments.num_read if self._arguments else 0)

    def take_fragment(self) -> str:
        """The part of the arguments that was read since the last call of this method."""
        return self._arguments.take_fragment() if self._arguments else ""

    def push(self, char: str) -> ScanStep:
        """Takes one character."""
        if self._arguments is not None:
            return self._arguments.push(char)
        if char == "{":
            if self.name is None and not self._end_head():
                return ScanStep.WRONG
            self._arguments = CallReader(self._dialect.arguments_key, self._names, self.name)
            return self._arguments.push(char)
        if len(self._head) >= _MAX_HEAD_LEN or (self.name is not None and not char.isspace()):
            return ScanStep.WRONG
        self._head += char
        if self._head_end is not None and self._head.endswith(self._head_end) and not self._end_head():
            return ScanStep.LAST
        return ScanStep.INSIDE

    def _end_head(self) -> bool:
        """Whether the head has the name of a tool, which is then known."""
        found = re.fullmatch(self._dialect.head, self._head)
        groups = found.groupdict() if found else {}
        name = groups.get("name") or groups.get("first")
        if name is None or (self._names is not None and name not in self._names):
            return False
        self.name, self.call_id = name, groups.get("id")
        return True
