"""Tokens → text, while the tokens come."""

import codecs
from collections.abc import Sequence
from typing import final

from jsg.processing.tokenizer import Tokenizer


@final
class IncrementalDetokenizer:
    """Gives the text of a growing sequence of tokens, each character as soon as it is complete.

    The results of all pushes and of `finish` together equal `tokenizer.decode` of all ids. A push costs as much as its
    own tokens, because nothing is decoded twice.

    Attributes:
        is_inside_character: Whether the tokens so far end with the beginning of a character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt_tail_ids: Sequence[int] = ()):
        """Starts before the first token.

        Args:
            tokenizer: The model's.
            skip_special_tokens: Leave special tokens out of the text.
            prompt_tail_ids: The last tokens of the prompt; a handful is enough. The text that follows continues the
                prompt's: it keeps its leading space, and completes a character that the prompt began.
        """
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.is_inside_character = False
        self._at_start = tokenizer.strips_leading_space
        self.push(prompt_tail_ids)

    @property
    def unfinished(self) -> str:
        """The text that `finish` would give now: usually one U+FFFD, but Python also waits for a byte after ED A0."""
        return self._decoder.getstate()[0].decode(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next tokens and gives the characters that they complete."""
        raw = self._tokenizer.join_bytes(ids, skip_special_tokens=self._skip_special_tokens)
        if self._at_start and raw:
            raw = raw.removeprefix(b" ")
            self._at_start = False
        if not self.is_inside_character and raw.isascii():
            return raw.decode()  # in a tenth of the time
        text = self._decoder.decode(raw)
        self.is_inside_character = bool(self._decoder.getstate()[0])
        return text

    def finish(self) -> str:
        """Ends the text. Gives U+FFFD for a character that was begun and not completed, else nothing."""
        self.is_inside_character = False
        return self._decoder.decode(b"", final=True)
