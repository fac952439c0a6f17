"""Watches how long a request thinks, and says when its thoughts must end."""

import functools
from typing import final

from jsg.constrained.grammar import GrammarMasker
from jsg.constrained.run.vocab import Vocabulary
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
        rest = limit.end[written:]
        tokens = _tokens_within(masker.grammar.vocabulary, limit.end)
        token = next((tokens[rest[:n]] for n in range(len(rest), 0, -1) if rest[:n] in tokens), None)
        if token is None or not masker.accept(token):
            return None
        masker.rollback(1)
        return token

    def _look_for_begin(self, text: bytes) -> None:
        """Finds out whether the output begins with thoughts. `_tail` is all of it here."""
        self._tail += text
        bare, begin = self._tail.lstrip(), self._limit.begin
        if bare.startswith(begin):
            self._is_inside, self._tail = True, bare[len(begin) :]
        elif not begin.startswith(bare):
            self._is_over = True


@functools.lru_cache(maxsize=8)
def _tokens_within(vocabulary: Vocabulary, text: bytes) -> dict[bytes, int]:
    """The tokens that are a part of a text, by their bytes."""
    texts = map(vocabulary.text_of, range(len(vocabulary.tokens)))
    return {each: token for token, each in enumerate(texts) if each and each in text}
