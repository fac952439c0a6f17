"""Text ⇄ token ids.

The libraries that cut text into tokens are imported when a tokenizer is loaded. The client half of jsg only names the
type.
"""

import functools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, final

from jsg.errors import ModelError, RequestError, check_prompt_len
from jsg.processing.added_tokens import longest_first
from jsg.processing.pieces import TokenPieces
from jsg.processing.tokenizer_config import TokenizerConfig, read_tokenizer_config

USUAL_CHARS_PER_TOKEN = 16  # more than any language has


class TextEncoder(Protocol):
    """Text → token ids. It is immutable, so any number of threads may use it."""

    def encode(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        """The tokens of a text. Special tokens that are written in it are read as such only with `parse_special`.

        With `continues` the text comes after other tokens.
        """
        ...

    def token_id(self, token: str) -> int | None:
        """The id of a token by its written form, or None."""
        ...

    def affixes(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer's own file puts before and after every text."""
        ...

    def pieces(self) -> TokenPieces:
        """The bytes of every token."""
        ...

    def cuts(self) -> re.Pattern[str] | None:
        """Finds tokens that cut a text into parts which, encoded one by one, are the tokens of the whole; None if none.

        The text is read with `parse_special`. None too where `continues` makes a difference.
        """
        ...


@final
class Tokenizer:
    """Text ⇄ token ids of one model. It is immutable, so any number of threads may use it.

    Unlike `transformers` it never removes spaces before punctuation: the text is what the tokens say.

    Attributes:
        vocab_size: One more than the highest token id.
        bos_token, eos_token: Written forms of the tokens that begin and end a text, or None.
        bos_token_id, eos_token_id: Their ids, or None.
        special_ids: Tokens that are not text, such as BOS, EOS and the markers of turns.
        chat_template: Jinja source of the model's chat template, or None.
        strips_leading_space: Encoding puts a space before a text, so decoding takes one off its front.
    """

    def __init__(self, encoder: TextEncoder, config: TokenizerConfig):
        pieces = encoder.pieces()
        self._encoder = encoder
        self._pieces = pieces.pieces
        self._text_pieces = list(pieces.pieces)
        for token_id in pieces.special_ids:
            self._text_pieces[token_id] = b""
        self.vocab_size = len(pieces.pieces)
        self.special_ids = pieces.special_ids
        self.strips_leading_space = pieces.strips_leading_space
        self.bos_token = config.bos_token
        self.eos_token = config.eos_token
        self.bos_token_id = self.token_id(config.bos_token) if config.bos_token else None
        self.eos_token_id = self.token_id(config.eos_token) if config.eos_token else None
        self.chat_template = config.chat_template
        before, after = encoder.affixes()
        self._before = _with_token(before, self.bos_token_id, config.add_bos_token)
        self._after = _with_token(after, self.eos_token_id, config.add_eos_token)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        max_tokens: int | None = None,
        continues: bool = False,
    ) -> list[int]:
        """The tokens of a text.

        Args:
            text: Any text that can be written in UTF-8.
            add_special_tokens: Put BOS and EOS around it as the checkpoint says. False for a rendered chat template,
                which has written them itself.
            parse_special: Read special tokens that are written in the text as such. False takes them as plain
                characters, so that a user's text cannot open a turn.
            max_tokens: A text with far more tokens is refused before it takes much time and memory. One with a few more
                is encoded.
            continues: The text comes after other tokens, the last of which is text. So the tokenizer puts no space
                before it.

        Raises:
            RequestError: The text has a lone surrogate.
            ContextLengthError: Its beginning alone has more than twice `max_tokens`.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"a text must be valid Unicode, but character {error.start} is the lone surrogate "
                f"U+{ord(text[error.start]):04X}; write characters above U+FFFF whole",
                param="text",
            ) from None
        if max_tokens is not None and len(text) > max_tokens * USUAL_CHARS_PER_TOKEN:
            beginning = text[: max_tokens * USUAL_CHARS_PER_TOKEN]
            check_prompt_len(len(self._encoder.encode(beginning, parse_special=parse_special)), max_tokens, "text")
        ids = self._encoder.encode(text, parse_special=parse_special, continues=continues)
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens. Broken UTF-8 gives U+FFFD, and an id that no token has gives nothing."""
        raw = self.join_bytes(ids, skip_special_tokens=skip_special_tokens)
        if self.strips_leading_space:
            raw = raw.removeprefix(b" ")
        return raw.decode(errors="replace")

    def join_bytes(self, ids: Iterable[int], *, skip_special_tokens: bool) -> bytes:
        """The bytes of tokens one after another, with a leading space if there is one."""
        pieces = self._text_pieces if skip_special_tokens else self._pieces
        return b"".join([pieces[i] for i in ids if 0 <= i < self.vocab_size])

    def num_bytes(self, ids: Sequence[int]) -> int:
        """How many bytes tokens have one after another, special tokens too."""
        try:
            return sum(map(self._sizes.__getitem__, ids))
        except IndexError:  # a model may have more tokens than its tokenizer
            return len(self.join_bytes(ids, skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token: a special token's are its written form, and those of an unused id are b""."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    @property
    def bos_ids(self) -> tuple[int, ...]:
        """The tokens that `encode` puts before a text."""
        return self._before

    @functools.cached_property
    def _sizes(self) -> list[int]:
        return [*map(len, self._pieces)]

    @functools.cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """A pattern that finds the written forms of special tokens, the longest first; None without special tokens."""
        return longest_first(self.token_bytes(i).decode(errors="replace") for i in self.special_ids)

    @functools.cached_property
    def cuts(self) -> re.Pattern[str] | None:
        """As in `TextEncoder`."""
        return self._encoder.cuts()

    def token_id(self, token: str) -> int | None:
        """The id of a token by its written form, such as "<|im_end|>", or None."""
        return self._encoder.token_id(token)


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads the tokenizer of a model directory.

    `tokenizers` reads `tokenizer.json`; if there is none, sentencepiece reads `tokenizer.model`. A directory with
    neither goes to `transformers`, which takes seconds and knows the older formats.

    Raises:
        ModelError: There is no tokenizer, or it is damaged, or its kind is not supported.
    """
    from jsg.processing.encoders import JsonEncoder, SentencePieceEncoder

    config = read_tokenizer_config(directory)
    if (path := directory / "tokenizer.json").is_file():
        return Tokenizer(JsonEncoder.from_file(path, config), config)
    if (path := directory / "tokenizer.model").is_file():
        encoder = SentencePieceEncoder(path.read_bytes(), config)
        return Tokenizer(encoder, encoder.config)
    return Tokenizer(JsonEncoder(_convert_with_transformers(directory), config), config)


def vocabulary_bytes(tokenizer: Tokenizer) -> list[bytes]:
    """The bytes that each token adds to a text, by id: b"" for special tokens and for ids that no token has.

    A grammar over bytes reads this table. An entry may end inside a character, and keeps a leading space.
    """
    return [tokenizer.join_bytes((i,), skip_special_tokens=True) for i in range(tokenizer.vocab_size)]


def _with_token(ids: list[int], token_id: int | None, wanted: bool | None) -> tuple[int, ...]:
    """The ids on one side of a text, as the configuration wants them; None leaves them as they are."""
    if token_id is None or wanted is None or wanted == (token_id in ids):
        return tuple(ids)
    return (token_id,) if wanted else tuple(i for i in ids if i != token_id)


def _convert_with_transformers(directory: Path) -> Any:
    """A tokenizer of `tokenizers`, made from files of an older format. Raises ModelError."""
    message = (
        "a model directory must have tokenizer.json or tokenizer.model, or a tokenizer that transformers can convert "
        "without running code of the model, but it has none; fetch the model again or save its tokenizer as JSON"
    )
    if not any((directory / name).is_file() for name in ("tokenizer_config.json", "vocab.json", "vocab.txt")):
        raise ModelError(message)
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception:  # a foreign format can make the library raise anything
        raise ModelError(message) from None
    converted = getattr(slow, "backend_tokenizer", None)
    if converted is None:
        raise ModelError(message)
    return converted
