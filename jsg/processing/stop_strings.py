"""Finds the stop strings of an answer, whose text comes character by character."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, final


class StopFinder(Protocol):
    """Finds stop strings, or matches of stop patterns, in an answer that comes character by character."""

    @property
    def held_len(self) -> int:
        """Characters at the end of the answer that must not be shown yet."""
        ...

    @property
    def behind_len(self) -> int:
        """Characters behind the stop string that was found last, up to the end of the answer."""
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

    behind_len = 0

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
    """An Aho-Corasick automaton over some strings.

    Its state is the longest end of the text that begins some stop string, which is exactly the text to hold back from
    the client. A character costs O(1) amortised, however many and long the strings are.

    Invariants: node 0 is the empty string; the failure link of a node leads to a shorter string.
    """

    behind_len = 0
    pattern = None

    def __init__(self, stops: Sequence[str]):
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match_len = [0]
        for stop in stops:
            self._insert(stop)
        self._failure = [0] * len(self._children)
        self._link_failures()
        self._node = 0

    @property
    def held_len(self) -> int:
        """Characters at the end of the text that may be the beginning of a stop string."""
        return self._depth[self._node]

    def reset(self) -> None:
        """Forgets the text so far."""
        self._node = 0

    def advance(self, char: str) -> int:
        """Takes one character. Gives the length of the longest stop string that ends with it, 0 for none."""
        self._node = self._step(self._node, char)
        return self._match_len[self._node]

    def finish(self) -> int:
        """Ends the text. No string is found late."""
        return 0

    def _step(self, node: int, char: str) -> int:
        while node and char not in self._children[node]:
            node = self._failure[node]
        return self._children[node].get(char, 0)

    def _insert(self, stop: str) -> None:
        node = 0
        for char in stop:
            if char not in self._children[node]:
                self._children[node][char] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[node] + 1)
                self._match_len.append(0)
            node = self._children[node][char]
        self._match_len[node] = len(stop)

    def _link_failures(self) -> None:
        """Links each node to the node of its longest proper suffix in the trie, and completes the match lengths."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            # A stop string that is a suffix of a longer string is matched at the node of the longer one too.
            self._match_len[node] = self._match_len[node] or self._match_len[self._failure[node]]
            for char, child in self._children[node].items():
                self._failure[child] = self._step(self._failure[node], char)
                queue.append(child)
