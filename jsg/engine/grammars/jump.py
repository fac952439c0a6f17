"""Jump-forward: which tokens spell a text that a grammar forces.

    draft        The forced text is cut into tokens, which the model verifies in one step. Only speed changes.
    retokenize   The tokenizer cuts the end of the output together with the forced text. If one of its cuts falls on the
                 end of the output, whose tokens never change, the tokens after that cut are appended.

A draft need not be right, so no byte is held back at its end: where the model joins the last forced bytes with the next
ones, the draft is wrong there and ends. Models do not always cut a text as their tokenizer does, least of all where a
grammar does not allow the token that they prefer. So a draft repeats the tokens that were chosen the last time that the
same text was forced after the same token, and only a new text is cut by the tokenizer.
"""

from collections.abc import Callable, Sequence
from typing import final

from jsg.engine.grammars.lexicon import Lexicon

Cut = Callable[[tuple[int, ...], bytes], tuple[int, ...]]
"""Takes the tokens before a text, and the text; returns the text's tokens."""
LOOK_BACK = 4
"""Output tokens that are cut together with a forced text, because they decide its first token."""
MOST_LOOKED_BACK = 32
"""Output tokens that are cut together with an appended text. Earlier ones do not change how a text is cut."""
MAX_BYTES = 256
"""Bytes of a forced text that are cut at a time. Few steps have rows for more tokens."""
MEMO_SIZE = 4096
SURE, MOST_SURE = 1, 8
"""A token is proposed if it was chosen in at least two of three late cases. `MOST_SURE` bounds how many cases count."""
LAST_LEAD = 0xF4
"""The largest byte of UTF-8."""
LINE_BREAK = "\n"
"""Goes before a text where the tokenizer adds a space, so that the space is no part of the text's first token."""


@final
class Tokens:
    """Cuts forced texts into tokens, and remembers how the tokenizer and the model cut them.

    Not for several threads at once. A memory that becomes too large is cleared.
    """

    def __init__(self, lexicon: Lexicon):
        self._lexicon = lexicon
        self._vocabulary = lexicon.vocabulary
        self._memo: dict[tuple[tuple[int, ...], bytes, Cut], tuple[int, ...]] = {}
        self._chosen: dict[tuple[int, bytes], tuple[int, int]] = {}  # the token that was chosen, and how sure it is
        self._ids: dict[bytes, int] | None = None

    def learn(self, before: int, forced: bytes, token: int) -> None:
        """Notes the token that was chosen for a forced text after the token `before` (-1 at the beginning)."""
        key = before, forced
        known, sureness = self._chosen.get(key, (token, SURE))
        if known == token:
            sureness = min(sureness + 1, MOST_SURE)
        elif sureness > 0:
            token, sureness = known, max(sureness - 2, 0)
        if len(self._chosen) >= MEMO_SIZE:
            self._chosen.clear()
        self._chosen[key] = token, sureness

    def draft(self, output: Sequence[int], forced: bytes, most: int = MAX_BYTES) -> tuple[int, ...]:
        """At most `most` tokens that a model is likely to choose for a forced text after an output.

        The last token may be longer than the rest of the text, as it was when it was last chosen.
        """
        tokens: list[int] = []
        before = output[-1] if output else -1
        while forced and len(tokens) < most:
            token, sureness = self._chosen.get((before, forced), (None, SURE))
            if sureness < SURE:
                break
            if token is None:
                usual = self.continuing([*output[-LOOK_BACK:], *tokens], forced)
                if not usual:
                    break
                token = usual[0]
            tokens.append(token)
            before, forced = token, forced[len(self._vocabulary.text_of(token)) :]
        return tuple(tokens)

    def continuing(self, output: Sequence[int], forced: bytes) -> tuple[int, ...]:
        """Tokens of a forced text as the tokenizer cuts it after the last tokens of an output."""
        forced = _whole_characters(forced[:MAX_BYTES])
        return self._remembered(tuple(output[-LOOK_BACK:]), forced, self._cut_behind)

    def appended(self, output: Sequence[int], forced: bytes) -> tuple[int, ...]:
        """Tokens of a forced text where it is cut as one with the output; none where a token would span both."""
        context, forced = tuple(output[-MOST_LOOKED_BACK:]), _whole_characters(forced[:MAX_BYTES])
        return self._remembered(context, forced, self._cut_as_one)

    def _remembered(self, context: tuple[int, ...], forced: bytes, cut: Cut) -> tuple[int, ...]:
        found = self._memo.get((context, forced, cut))
        if found is None:
            found = cut(context, forced)
            if len(self._memo) >= MEMO_SIZE:
                self._memo.clear()
            self._memo[context, forced, cut] = found
        return found

    def _cut_behind(self, context: tuple[int, ...], forced: bytes) -> tuple[int, ...]:
        for start in range(len(context) + 1):
            tokens = self._cut_as_one(context[start:], forced)
            if tokens:
                return tokens
        return self._longest_match(forced)

    def _cut_as_one(self, context: tuple[int, ...], forced: bytes) -> tuple[int, ...]:
        """The tokens after the context; none where no cut falls between the two.

        There are also none where the context begins inside a character, or the tokenizer changes the text.
        """
        before = self._spell(context)
        end = 0
        for index, token in enumerate(tokens := self._encode(before + forced) or ()):
            if end == len(before):
                return tuple(tokens[index:])
            end += len(self._vocabulary.text_of(token))
        return ()

    def _encode(self, text: bytes) -> list[int] | None:
        """The tokens of a text inside a longer one; None where no tokens spell exactly this text."""
        puts_space = self._lexicon.puts_space
        try:
            before = LINE_BREAK if puts_space else ""
            tokens = self._lexicon.encode(before + text.decode())
        except UnicodeDecodeError:
            return None
        if puts_space:
            first = next((i for i in range(1, 4) if self._spell(tokens[:i]) == b" " + LINE_BREAK.encode()), 0)
            tokens = tokens[first:]
        return tokens if self._spell(tokens) == text else None

    def _spell(self, tokens: Sequence[int]) -> bytes:
        return b"".join([self._vocabulary.text_of(token) for token in tokens])

    def _longest_match(self, text: bytes) -> tuple[int, ...]:
        """Takes the longest token that fits again and again, until none fits."""
        if self._ids is None:
            spelled = [self._vocabulary.text_of(token) for token in range(len(self._vocabulary.tokens))]
            self._ids = {text: token for token, text in reversed(list(enumerate(spelled))) if text}
        tokens: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._vocabulary.max_token_len), start, -1)
            token, start = next(
                ((self._ids[text[start:end]], end) for end in ends if text[start:end] in self._ids), (None, len(text))
            )
            if token is not None:
                tokens.append(token)
        return tuple(tokens)


def _whole_characters(text: bytes) -> bytes:
    """A text without an incomplete character at its end."""
    for length in range(1, min(3, len(text)) + 1):
        first = text[-length]
        if first > LAST_LEAD:  # a byte of a special token, which is no character
            return text
        if first >= 0xC0:  # the first byte of a character of several
            needed = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return text[:-length] if length < needed else text
        if first < 0x80:
            return text
    return text
