"""Finds the stop strings of an answer, whose text comes character by character."""

from collections.abc import Callable, Sequence
from typing import Protocol, final


class StopFinder(Protocol):
    """Finds stop strings, or matches of stop patterns, in an answer that comes character by character."""

    @property
    def held_len(self) -> int:
        """Characters at the end of the answer that must not be shown yet."""
        ...

    @property
    def len_after(self) -> int:
        """Characters after the stop string that was found last, up to the end of the answer."""
        ...

    @property
    def pattern(self) -> str | None:
        """The stop pattern whose match was found last; None where it was a stop string."""
        ...

    def advance(self, char: str) -> int:
        """Takes one character. Gives the length of the stop string that this finds, 0 for none."""
        ...

    def finish(self) -> int:
        """Ends the answer. Gives the length of a stop string that is found only now, 0 for none."""
        ...


type MakeFinder = Callable[[], StopFinder]
"""Makes a finder that has read nothing yet."""


def find_stops(stops: Sequence[str], patterns: MakeFinder | None) -> StopFinder:
    """A finder of these strings and, if there are any, of matches of patterns."""
    if patterns is None:
        return StopMatcher(stops)
    return _EitherFinder(StopMatcher(stops), patterns()) if stops else patterns()


@final
class _EitherFinder:
    """Two finders. The first find counts, and of two finds at the same character the longer one."""

    len_after = 0

    def __init__(self, left: StopFinder, right: StopFinder):
        self.pattern: str | None = None
        self._left = left
        self._right = right

    @property
    def held_len(self) -> int:
        """The larger number of the two finders."""
        return max(self._left.held_len, self._right.held_len)

    def advance(self, char: str) -> int:
        """The longer find that ends with this character, 0 for none."""
        left_len, right_len = self._left.advance(char), self._right.advance(char)
        self.pattern = self._left.pattern if left_len >= right_len else self._right.pattern
        return max(left_len, right_len)

    def finish(self) -> int:
        """Ends the text. Neither finder finds anything late."""
        return max(self._left.finish(), self._right.finish())


@final
class StopMatcher:
    """Finds some strings, each by the method of Knuth, Morris and Pratt.

    Its state is the longest end of the text that begins each of them. The longest of these is exactly the text to hold
    back from the client. A character costs O(1) amortised for each string that the text may be in, however long the
    strings are. To make a matcher costs nothing more: the tables of a string grow as far as the text has matched it,
    because a request may have a thousand answers, and strings of 32 000 characters for each.
    """

    len_after = 0
    pattern = None

    def __init__(self, stops: Sequence[str]):
        self._begun: list[_Begun] = []
        self._others: dict[str, list[_Begun]] = {}  # what the text is not in, by first character
        for stop in stops:
            self._others.setdefault(stop[0], []).append(_Begun(stop))

    @property
    def held_len(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return max([each.num_read for each in self._begun]) if self._begun else 0

    def reset(self) -> None:
        """Forgets the text so far."""
        for each in self._begun:
            each.num_read = 0
            self._others.setdefault(each.text[0], []).append(each)
        self._begun = []

    def advance(self, char: str) -> int:
        """Takes one character. Gives the length of the longest stop string that ends with it, 0 for none."""
        starting = self._others.pop(char, None)
        if starting is None and not self._begun:
            return 0
        before, self._begun = self._begun, starting or []
        for each in self._begun:
            each.num_read = 1
        for each in before:
            each.advance(char)
            if each.num_read:
                self._begun.append(each)
            else:
                self._others.setdefault(each.text[0], []).append(each)
        return max([each.num_read for each in self._begun if each.num_read == len(each.text)], default=0)

    def finish(self) -> int:
        """Ends the text. No string is found late."""
        return 0


@final
class _Begun:
    """A string, and how much of it the text ends with.

    Invariant: `borders[k]` is the length of the longest proper beginning of `text[: k + 1]` that also ends it, and is
    known as far as the text has ever matched.
    """

    __slots__ = ("borders", "num_read", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_read = 0
        self.borders = [0]

    def advance(self, char: str) -> None:
        """Takes the next character of a text that is in the string."""
        text, count = self.text, self.num_read
        while len(self.borders) < count:
            self.borders.append(self._longer(self.borders[-1], text[len(self.borders)]))
        if count == len(text):
            count = self.borders[-1]
        self.num_read = self._longer(count, char)

    def _longer(self, count: int, char: str) -> int:
        """The length of the longest beginning that ends a text, which ended with `count` characters before `char`."""
        while count and self.text[count] != char:
            count = self.borders[count - 1]
        return count + (self.text[count] == char)
