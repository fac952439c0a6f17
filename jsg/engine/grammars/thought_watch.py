"""Watches how long a request thinks, and says when its thoughts must end."""

import copy
from typing import final

from jsg.constrained.grammar import GrammarMasker
from jsg.types import ThoughtLimit


@final
class ThoughtWatch:
    """The thoughts at the beginning of one output, as far as it has come.

    Invariant: `_tail` is the end of the thoughts, as long as `end` at most.
    """

    def __init__(self, limit: ThoughtLimit):
        self._limit = limit
        self._is_inside = limit.is_inside
        self._is_over = False
        self._num_tokens = 0
        self._tail = b""

    def fork(self) -> "ThoughtWatch":
        """Another one that has seen the same."""
        return copy.copy(self)

    def push(self, text: bytes) -> None:
        """Takes the bytes of the next token of the output."""
        if self._is_over:
            return
        if not self._is_inside:
            self._look_for_begin(text)
            return
        self._num_tokens += 1
        self._tail += text
        self._is_over = self._limit.end in self._tail
        self._tail = self._tail[-len(self._limit.end) :]

    def closing_token(self, masker: GrammarMasker) -> int | None:
        """The token that must come next; None where the thoughts may go on, or a character must be completed first."""
        limit = self._limit
        if self._is_over or not self._is_inside or self._num_tokens < limit.max_tokens:
            return None
        written = max((n for n in range(len(limit.end)) if self._tail.endswith(limit.end[:n])), default=0)
        token = masker.grammar.vocabulary.longest_token(limit.end[written:])
        if token is None or not masker.accept(token):
            return None
        masker.rollback(1)
        return token

    def _look_for_begin(self, text: bytes) -> None:
        """Finds out whether the output begins with thoughts. `_tail` is all of it but white space."""
        begin = self._limit.begin
        self._tail = (self._tail + text).lstrip()
        if self._tail.startswith(begin):
            self._is_inside, self._tail = True, self._tail[len(begin) :]
        elif not begin.startswith(self._tail):
            self._is_over = True
