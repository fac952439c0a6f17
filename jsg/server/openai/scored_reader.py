"""Finds the log-probabilities that belong to each part of an answer that may call tools."""

from collections import deque
from collections.abc import Iterator
from typing import final

from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.growing_text import GrowingText
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.answer import Answer, AnswerDelta
from jsg.speech.answers.tool_calls import CallDelta, ContentDelta, ToolDelta
from jsg.speech.rules.tool_use import AnswerReader
from jsg.types import TokenLogprob

Part = tuple[ToolDelta, list[TokenLogprob]]
"""A text or a call in an answer, with the log-probabilities of its tokens where it is text."""


@final
class ScoredReader:
    """Reads an answer token by token, so that the result does not depend on how many tokens came at once.

    To a text belong the tokens that begin in it, and the tokens without text that follow it. OpenAI's form has no place
    for the log-probabilities of calls and their markers, so these are left out.

    Invariants: `_unread` is the text that was given and not yet read. `_waiting` has the tokens that may still belong
    to a text, each with the character of the answer at which it begins.
    """

    def __init__(self, answer: Answer, reader: AnswerReader, tokenizer: Tokenizer) -> None:
        skips_special = answer.request.sampling.skip_special_tokens
        self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skips_special)
        self._reader = reader
        self._unread = GrowingText()
        self._num_read = self._num_made = 0
        self._ends: deque[int] = deque()  # where the tokens end whose text is not yet read
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self._is_in_call = False

    def read(self, delta: AnswerDelta) -> Iterator[Part]:
        """The parts that a delta of the answer adds. Takes every delta once and in order."""
        self._unread.append(delta.text)
        for token in delta.scores:
            self._waiting.append((self._num_made, token))
            self._num_made += len(self._detokenizer.push((token.token_id,)))
            self._ends.append(self._num_made)
        # Text that a stop string may cut is held back, so the end of a token may not have come yet.
        while self._ends and self._ends[0] <= self._num_read + len(self._unread):
            yield from self._read_until(self._ends.popleft())
        if delta.finish is not None:
            yield from self._read_until(self._num_read + len(self._unread), is_last=True)

    def _read_until(self, end: int, *, is_last: bool = False) -> Iterator[Part]:
        """Reads up to a character of the answer. With `is_last` this is the end of the answer."""
        text = self._unread.take(end - self._num_read)
        self._num_read = end
        found = self._reader.read_text(text, is_last=is_last)
        decided = end - self._reader.held_len
        tokens: list[TokenLogprob] = []
        while self._waiting and (is_last or self._waiting[0][0] < decided):
            tokens.append(self._waiting.popleft()[1])
        for part in found:
            self._is_in_call = isinstance(part, CallDelta)
            yield part, [] if self._is_in_call else tokens
            tokens = tokens if self._is_in_call else []
        if is_last and tokens and not self._is_in_call:
            yield ContentDelta(""), tokens
