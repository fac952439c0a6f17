"""Stop strings of an answer that may call tools. They end its text and never cut a call in two."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import final

from jsg.constrained.call_styles import ArgumentTypes
from jsg.processing.stop_strings import MakeFinder, find_stops
from jsg.speech.answers.tool_calls import CallDelta, ToolCallParser
from jsg.speech.dialects import Dialect


@final
@dataclasses.dataclass(frozen=True, slots=True)
class CallForm:
    """How an answer writes calls.

    Attributes:
        dialect: The written form of a call.
        names: The tools that may be called.
        types: The types of the arguments of each, for dialects that write strings without quotes.
    """

    dialect: Dialect
    names: Collection[str]
    types: Mapping[str, ArgumentTypes] = dataclasses.field(default_factory=dict)


@final
class CallStops:
    """Finds stop strings and patterns in the part of an answer that is text.

    A call, its marks and the white space beside it are not text, and a stop string never spans a call or a mark. A
    character is examined once it is known to be text, which may be later: what looks like the beginning of a call may
    not be one.

    Invariant: the last `held_len` characters may still become a stop string or the beginning of one.
    """

    def __init__(self, stops: Sequence[str], form: CallForm, patterns: MakeFinder | None = None):
        self.behind_len = 0
        self.pattern: str | None = None
        self._stops = stops
        self._patterns = patterns
        self._matcher = find_stops(stops, patterns)
        self._parser = ToolCallParser(form.dialect, form.names, str, types=form.types)

    @property
    def held_len(self) -> int:
        """Characters at the end of the answer that must not be shown yet."""
        return self._parser.held_len + self._matcher.held_len

    def advance(self, char: str) -> int:
        """Takes one character. Gives the length of the stop string that this finds, 0 for none.

        `behind_len` is then the number of characters behind the string, with the new one.
        """
        found = end = text_len = 0
        held_len = self._parser.held_len + 1
        for delta in self._parser.push(char):
            if isinstance(delta, CallDelta):
                self._begin()
                continue
            text_len += len(delta.text)
            if not found:
                found, end = self._look(delta.text)
        # What is neither text nor held back was a mark behind the text, or a call.
        if text_len + self._parser.held_len < held_len:
            self._begin()
        self.behind_len = held_len - end
        return found

    def finish(self) -> int:
        """Ends the answer. Gives what `advance` gives, for the characters that are only now known to be text."""
        if self._parser.is_in_call:  # the answer was cut off inside a call, where no stop string counts
            return 0
        held_len = self._parser.held_len
        found = end = 0
        for delta in self._parser.finish():
            if not isinstance(delta, CallDelta):
                found, end = self._look(delta.text)
        self.behind_len = held_len - end
        return found

    def _look(self, text: str) -> tuple[int, int]:
        """Length of the first stop string in more text, and its end; 0 for none."""
        first = 0, 0
        for end, char in enumerate(text, start=1):
            if (match_len := self._matcher.advance(char)) and not first[0]:
                first = match_len, end
                self.pattern = self._matcher.pattern
        return first

    def _begin(self) -> None:
        if self._matcher.held_len:
            self._matcher = find_stops(self._stops, self._patterns)
