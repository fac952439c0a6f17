"""Words of clients in prompts. They never become special tokens, so they never open or close a turn.

This is a security property, and this file is its one home. A prompt consists of markup, in which special tokens count,
and of words of clients, in which the same characters are plain. A prompt of both is a list of `Stretch`es, each encoded
by its kind. Where words pass through a chat template, the text of each special token in them is between two marks,
and what the template writes between marks is words again. Words without such text get no marks, so they are encoded
exactly as rendered.
"""

import bisect
import dataclasses
import itertools
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, final

from jsg.errors import check_prompt_len
from jsg.processing.tokenizer import Tokenizer


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of a prompt's text.

    Attributes:
        text: Its characters.
        is_markup: Special tokens that are written in it count. In words they are plain characters.
    """

    text: str
    is_markup: bool


def encode_stretches(
    tokenizer: Tokenizer,
    stretches: Sequence[Stretch],
    *,
    param: str,
    last_id: int | None = None,
    max_tokens: int | None = None,
) -> list[int]:
    """The tokens of stretches one after another, which `cut` has cut.

    Args:
        tokenizer: The model's.
        stretches: The text.
        param: The field of the request that holds the text.
        last_id: The token in front of the text; None at the beginning of a prompt.
        max_tokens: As in `Tokenizer.encode`.

    Raises:
        RequestError: The text is not Unicode.
        ContextLengthError: It has more than twice `max_tokens`.
    """
    ids: list[int] = []
    for stretch in stretches:
        before = ids[-1] if ids else last_id
        ids += tokenizer.encode(
            stretch.text,
            add_special_tokens=False,
            parse_special=stretch.is_markup,
            max_tokens=max_tokens,
            continues=before is not None and before not in tokenizer.special_ids,
        )
        check_prompt_len(len(ids), max_tokens, param)  # there may be a million short stretches
    return ids


def cut(tokenizer: Tokenizer, stretches: Sequence[Stretch], never: frozenset[str]) -> list[Stretch]:
    """The same text, in which every special token that must be plain is a stretch of its own.

    The other stretches are markup, because they hold only special tokens that count. A special token counts if all of
    its characters are markup, even in several stretches. Those in `never` never count.
    """
    text = "".join(stretch.text for stretch in stretches)
    if not text:
        return []
    pattern = tokenizer.special_pattern
    if pattern is None or (all(s.is_markup for s in stretches) and not any(word in text for word in never)):
        return [Stretch(text, True)]
    starts = [0, *itertools.accumulate(len(stretch.text) for stretch in stretches[:-1])]
    pieces: list[Stretch] = []
    done = 0
    for found in pattern.finditer(text):
        first, last = (bisect.bisect_right(starts, place) - 1 for place in (found.start(), found.end() - 1))
        is_markup = all(stretch.is_markup or not stretch.text for stretch in stretches[first : last + 1])
        if is_markup and found[0] not in never:
            continue
        pieces += [Stretch(text[done : found.start()], True), Stretch(found[0], False)]
        done = found.end()
    pieces.append(Stretch(text[done:], True))
    return [piece for piece in pieces if piece.text]


@final
class Marks:
    """Texts that no client can guess and no template writes. They show where messages are in a rendered text."""

    def __init__(self) -> None:
        self._nonce = secrets.randbits(64)

    def mark(self, number: int) -> str:
        """The mark of a number. It has no letters, so a filter cannot change its case."""
        return f"\ue000{self._nonce}-{number}\ue001"

    def around(self, number: int, text: str) -> str:
        """The text between two marks."""
        return self.mark(number) + text + self.mark(number)

    def split(self, text: str) -> tuple[list[str], list[int]]:
        """The texts between marks, and the numbers of the marks, which are one fewer."""
        if (begin := f"\ue000{self._nonce}-") not in text:
            return [text], []
        parts = re.split(f"{begin}(\\d+)\ue001", text)
        return parts[::2], [int(number) for number in parts[1::2]]


@final
class Guard:
    """Marks words of clients, so that they pass through a template as words.

    Attributes:
        marks: Marks of the number `WORDS` enclose text that must be plain. Other numbers are free.
    """

    WORDS = 0

    def __init__(self, special_pattern: re.Pattern[str] | None) -> None:
        """Takes what finds the model's special tokens, see `Tokenizer.special_pattern`."""
        self.marks = Marks()
        self._pattern = special_pattern

    def json(self, value: Any) -> Any:
        """A copy of a JSON value with the text of special tokens between marks, at any depth and in keys too."""
        if self._pattern is None:
            return value
        if isinstance(value, str):
            is_plain = self._pattern.search(value) is None
            return value if is_plain else self._pattern.sub(lambda m: self.marks.around(self.WORDS, m[0]), value)
        if isinstance(value, dict):
            return {self.json(key): self.json(item) for key, item in value.items()}
        return [self.json(item) for item in value] if isinstance(value, list | tuple) else value

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a message with the text of special tokens between marks.

        A template may write the texts of a content one after another. If they make a special token together, each of
        them is between marks as a whole.
        """
        guarded: dict[str, Any] = self.json(dict(message))
        content = message.get("content")
        if isinstance(content, list) and self._makes_special([p["text"] for p in content if p.get("type") == "text"]):
            guarded["content"] = [
                {**part, "text": self.marks.around(self.WORDS, part["text"])} if part.get("type") == "text" else part
                for part in content
            ]
        return guarded

    def has_special(self, text: str) -> bool:
        """Whether a special token is written in a text."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def _makes_special(self, texts: Sequence[str]) -> bool:
        """Whether a special token spans the end of one of these texts, as they are or trimmed."""
        if self._pattern is None or len(texts) < 2:
            return False
        for pieces in (texts, [text.strip() for text in texts]):
            ends = list(itertools.accumulate(map(len, pieces)))
            for found in self._pattern.finditer("".join(pieces)):
                if ends[bisect.bisect_right(ends, found.start())] < found.end():
                    return True
        return False
