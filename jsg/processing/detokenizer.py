"""Tokens → text while they come."""

import codecs
from collections.abc import Sequence
from typing import final

from jsg.processing.tokenizer import Tokenizer


@final
class IncrementalDetokenizer:
    """Gives the text of a growing sequence of tokens, each character as soon as it is whole.

    All pushes and `finish` together equal `tokenizer.decode` of all the ids. The cost of a push is that of its own
    tokens: nothing is decoded twice.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt_tail_ids: Sequence[int] = ()):
        """Starts before the first token.

        Args:
            tokenizer: Of the model that makes the tokens.
            skip_special_tokens: Leave special tokens out of the text.
            prompt_tail_ids: The last tokens of the prompt (a handful is enough). What follows them continues a text:
                it keeps its leading space, and completes a character that the prompt began.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_leading_space
        self.push(prompt_tail_ids)

    @property
    def is_inside_character(self) -> bool:
        """Whether the tokens so far end with the beginning of a character."""
        return bool(self._decoder.getstate()[0])

    @property
    def unfinished(self) -> str:
        """What `finish` would give now. Mostly one U+FFFD, but Python waits for a third byte behind ED A0, too."""
        return self._decoder.getstate()[0].decode(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next tokens and gives the characters that they complete."""
        raw = self._tokenizer.join_bytes(ids, skip_special_tokens=self._skip_special_tokens)
        if self._at_start and raw:
            raw = raw.removeprefix(b" ")
            self._at_start = False
        return self._decoder.decode(raw)

    def finish(self) -> str:
        """Ends the text: U+FFFD for a character that was begun and never completed, else nothing."""
        return self._decoder.decode(b"", final=True)
