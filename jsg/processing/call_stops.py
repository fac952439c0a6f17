"""What ends an answer that may call tools: it ends what the answer says, and never cuts a call in two."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import final

from jsg.processing.stop_strings import MakeFinder, find_stops
from jsg.processing.tool_calls import CallDelta, Dialect, ToolCallParser


@final
@dataclasses.dataclass(frozen=True, slots=True)
class CallForm:
    """How calls stand in an answer.

    Attributes:
        dialect: How they are written.
        names: Tools there are.
    """

    dialect: Dialect
    names: Collection[str]


@final
class CallStops:
    """Finds stop strings and patterns in what a reader of the answer shows as text.

    A call, its marks and the white space beside it are no text, and no stop string goes across a call. A character is
    looked at when it is known to be text: that what may begin a call is none is sometimes seen later.

    Invariant: the last `held_len` characters are those that may still turn out to be a stop string or the beginning of
    one.
    """

    def __init__(self, stops: Sequence[str], form: CallForm, patterns: MakeFinder | None = None):
        self.behind_len = 0
        self._stops = stops
        self._patterns = patterns
        self._matcher = find_stops(stops, patterns)
        self._parser = ToolCallParser(form.dialect, form.names, str)

    @property
    def held_len(self) -> int:
        """Characters at the end of the answer that must not be shown yet."""
        return self._parser.held_len + self._matcher.held_len

    def advance(self, char: str) -> int:
        """Takes one character; the length of the stop string that is found with it, 0 for none.

        `behind_len` then says how many characters follow the string, the new one included.
        """
        found = end = 0
        for delta in self._parser.push(char):
            if isinstance(delta, CallDelta):
                self._begin()
            elif not found:
                found, end = self._look(delta.text)
                self.behind_len = len(delta.text) - end + self._parser.held_len
        return found

    def finish(self) -> int:
        """Ends the answer; as `advance` for what was not known to be text until now."""
        if self._parser.is_in_call:  # cut off, so that it is shown as text or as part of a call; it is no text
            return 0
        held_len = self._parser.held_len
        found = end = 0
        for delta in self._parser.finish():
            if not isinstance(delta, CallDelta):
                found, end = self._look(delta.text)
        self.behind_len = held_len - end
        return found

    def _look(self, text: str) -> tuple[int, int]:
        """Length of the first stop string in more text, and where it ends; 0 for none."""
        first = 0, 0
        for end, char in enumerate(text, start=1):
            if (match_len := self._matcher.advance(char)) and not first[0]:
                first = match_len, end
        return first

    def _begin(self) -> None:
        if self._matcher.held_len:
            self._matcher = find_stops(self._stops, self._patterns)
