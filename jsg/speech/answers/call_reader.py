"""Reads one call of a tool, its name and its arguments, character by character."""

import json
import re
from collections.abc import Callable, Mapping
from typing import final

from jsg.constrained.call_styles import CALL_MARKS, ArgumentTypes, XmlMarks, is_plain_name
from jsg.speech.answers.json_scanner import Half, JsonScanner, ScanStep
from jsg.speech.answers.literal_arguments import LiteralArguments
from jsg.speech.answers.xml_arguments import MAX_NAME_LEN, NO_NAME, XmlArguments
from jsg.speech.dialects import Dialect

_MAX_STRING_LEN = 1_000
_MAX_HEAD_LEN = 300
_WHITESPACE = " \t\r\n"


@final
class CallReader:
    """A call as far as it has been read: a head with the name, and then the arguments in one of four notations.

    The dialect says which head and which notation: a JSON object that has both, a head that a regular expression
    describes with JSON after it, or marks around the name with the notation of `call_styles` after them.

    Invariant: the fragments that were taken, and what is left to take, are together the JSON of the arguments.

    Attributes:
        name: The tool's name, once it is known.
        call_id: The id that the model itself gave the call.
        has_arguments: The arguments have begun.
    """

    def __init__(self, dialect: Dialect, names: frozenset[str] | None, types: Mapping[str, ArgumentTypes]):
        """Begins a call.

        Args:
            dialect: The model's.
            names: The tools that exist; None accepts any name.
            types: The types of the arguments of each tool, for styles that write strings without quotes. Those of a
                tool that is not among them may be anything.
        """
        self.name: str | None = None
        self.call_id: str | None = None
        self.has_arguments = False
        self._dialect = dialect
        self._names = names
        self._types = types
        self._raw: list[str] = []
        self._fragments: list[str] = []
        self._held = ""
        self._take: Callable[[str], ScanStep] = self._in_name
        if dialect.style == "object":
            self._take = _JsonCall(dialect.arguments_key, self._fragments, self._end_name).push
        elif dialect.style == "headed":
            self._take = self._in_head

    @property
    def text(self) -> str:
        """All that was read."""
        return "".join(self._raw)

    @property
    def num_read(self) -> int:
        """The number of characters that were read."""
        return len(self._raw)

    def take_fragment(self) -> str:
        """The part of the arguments, as JSON, that was read since the last call of this method."""
        fragment = "".join(self._fragments)
        self._fragments.clear()
        return fragment

    def push(self, char: str) -> ScanStep:
        """Takes one character. After LAST or WRONG the reader must not be used any more.

        LAST without a name says that the text was a header of text, and no call.
        """
        step = self._take(char)
        if step is not ScanStep.WRONG:
            self._raw.append(char)
            self.has_arguments = self.has_arguments or bool(self._fragments)
        return step

    def _in_head(self, char: str) -> ScanStep:
        """In a head before JSON. Of a row of messages, one without the name of a tool ends the reading."""
        if char == "{":
            if self.name is None and not self._end_head():
                return ScanStep.WRONG
            self._take = _verbatim(self._fragments)
            return self._take(char)
        if len(self._held) >= _MAX_HEAD_LEN or (self.name is not None and not char.isspace()):
            return ScanStep.WRONG
        self._held += char
        messages = self._dialect.messages
        is_text = messages is not None and self._held.endswith(messages.head_end) and not self._end_head()
        return ScanStep.LAST if is_text else ScanStep.INSIDE

    def _in_name(self, char: str) -> ScanStep:
        """In the name and the marks around it. Without a mark after it, white space or `<` ends it."""
        marks = CALL_MARKS[self._dialect.style]
        before, after = marks.name
        if not self._held and char in _WHITESPACE:
            return ScanStep.INSIDE
        if not after and (char in _WHITESPACE or char == "<"):
            return self._take(char) if self._end_marked_name(self._held) else ScanStep.WRONG
        self._held += char
        name = self._held[len(before) :]
        if not name:
            return ScanStep.INSIDE if before.startswith(self._held) else ScanStep.WRONG
        if after and name.endswith(after):
            return ScanStep.INSIDE if self._end_marked_name(name.removesuffix(after)) else ScanStep.WRONG
        is_wrong = len(name) > MAX_NAME_LEN or (isinstance(marks, XmlMarks) and char in NO_NAME and char not in after)
        return ScanStep.WRONG if is_wrong else ScanStep.INSIDE

    def _end_head(self) -> bool:
        """Whether the head has the name of a tool, which is then known."""
        found = re.fullmatch(self._dialect.head, self._held)
        groups = found.groupdict() if found else {}
        self.call_id = groups.get("id")
        return self._end_name(groups.get("name") or groups.get("first"))

    def _end_marked_name(self, name: str) -> bool:
        """Whether a call may have the name; the arguments come next."""
        if not self._end_name(name) or (self._names is None and not is_plain_name(name)):
            return False
        marks = CALL_MARKS[self._dialect.style]
        if isinstance(marks, XmlMarks):
            self._take = XmlArguments(marks, self._types.get(name, ArgumentTypes()), self._fragments).push
        else:
            self._take = LiteralArguments(marks, self._fragments).push
        return True

    def _end_name(self, name: str | None) -> bool:
        """Whether a call may have the name, which is then known."""
        if not name or (self._names is not None and name not in self._names):
            return False
        self.name = name
        return True


def _verbatim(fragments: list[str]) -> Callable[[str], ScanStep]:
    """Takes a JSON object, of which each character is a fragment."""
    scanner = JsonScanner()

    def push(char: str) -> ScanStep:
        step = scanner.push(char)
        if step is not ScanStep.WRONG:
            fragments.append(char)
        return step

    return push


@final
class _JsonCall:
    """A JSON object with a name and arguments. Its other members are skipped."""

    def __init__(self, arguments_key: str, fragments: list[str], end_name: Callable[[str], bool]):
        """Begins a call, whose arguments go to `fragments`. `end_name` takes the name, and says if it can be one."""
        self._arguments_key = arguments_key
        self._fragments = fragments
        self._end_name = end_name
        self._scanner = JsonScanner()
        self._half: Half | None = None
        self._key = ""
        self._keys: set[str] = set()
        self._string: list[str] = []

    def push(self, char: str) -> ScanStep:
        """Takes one character, of which the first is `{`."""
        step = self._scanner.push(char)
        if step is ScanStep.WRONG:
            return step
        before, self._half = self._half, self._scanner.half
        half = before or self._half
        is_value = half == "value"
        if half and not before:
            self._string = []
            if is_value and char != {"name": '"', self._arguments_key: "{"}.get(self._key, char):
                return ScanStep.WRONG
        if is_value and self._key == self._arguments_key:
            self._fragments.append(char)
        elif half == "key" or (is_value and self._key == "name"):
            self._string.append(char)
            is_whole = self._half is None
            if len(self._string) > _MAX_STRING_LEN or (is_whole and not self._end_string(is_key=half == "key")):
                return ScanStep.WRONG
        return self._end() if step is ScanStep.LAST else step

    def _end_string(self, *, is_key: bool) -> bool:
        """Takes a whole key or the name. False if a call must not have it."""
        text = json.loads("".join(self._string))
        if not is_key:
            return self._end_name(text)
        self._key = text
        is_allowed = text not in self._keys
        self._keys.add(text)
        return is_allowed

    def _end(self) -> ScanStep:
        if "name" not in self._keys:
            return ScanStep.WRONG
        if self._arguments_key not in self._keys:
            self._fragments.append("{}")
        return ScanStep.LAST
