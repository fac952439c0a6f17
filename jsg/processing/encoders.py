"""The two libraries that cut text into tokens, each as a `TextEncoder` of `tokenizer.py`.

Both are used in one way only: text goes in, ids come out, and no tokens are put around them. `pieces.py` makes text of
ids.

Some tokenizers put a space before a text. A text that continues other tokens gets none, up to the first added token in
it. Behind that token the space comes again, as in these libraries.
"""

import dataclasses
import functools
import json
import re
import time
from pathlib import Path
from typing import Any, final

import sentencepiece
import tokenizers

from jsg.errors import ModelError
from jsg.processing.added_tokens import AddedTokens, longest_first
from jsg.processing.pieces import WORD_START, TokenPieces, byte_of_token, pieces_by_id, pieces_of_decoder
from jsg.processing.tokenizer_config import TokenizerConfig
from jsg.prompt_ids import CHUNK


@final
class JsonEncoder:
    """A `tokenizer.json`, through `tokenizers`."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, config: TokenizerConfig):
        """Takes what the file says, and the configuration for special tokens that the file does not mark."""
        # A file that was saved after training may have both, which would shorten or lengthen texts silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._special_tokens = config.special_tokens

    @classmethod
    def from_file(cls, path: Path, config: TokenizerConfig) -> "JsonEncoder":
        """Raises ModelError if the file is not a tokenizer."""
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")), config)
        except Exception as error:  # `tokenizers` raises plain Exception
            raise ModelError(
                f"tokenizer.json must be readable by tokenizers {tokenizers.__version__}, but it says: {error}; "
                "fetch the model again or install the version that wrote it"
            ) from None

    def encode(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        """The tokens of a text."""
        if continues and self._puts_space:
            return self._encode_continuation(text, parse_special=parse_special)
        tokenizer = self._tokenizer if parse_special else self._plain_tokenizer
        # A text of megabytes takes seconds. In that time a batch lets Python's other threads run; `encode` does not.
        encoded = tokenizer.encode_batch_fast([text], add_special_tokens=False).pop()
        ids = encoded.ids
        if len(ids) > CHUNK:
            time.sleep(0)  # to make a million ids takes 0.03 s, and so does to free what `encoded` has besides
        return ids

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None."""
        return self._tokenizer.token_to_id(token)

    def affixes(self) -> tuple[list[int], list[int]]:
        """What the post-processor puts around a text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False).ids
        full = self._tokenizer.encode("a").ids
        for start in reversed(range(len(full) - len(bare) + 1)):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise ModelError("the post-processor in tokenizer.json must only add tokens around a text, but it changes it")

    def pieces(self) -> TokenPieces:
        """The bytes of every token."""
        added = self._tokenizer.get_added_tokens_decoder()
        decoder = self._tokenizer.decoder
        return pieces_of_decoder(
            None if decoder is None else json.loads(decoder.__getstate__()),
            {token_id: token for token, token_id in self._tokenizer.get_vocab().items()},
            {token_id: token.content for token_id, token in added.items()},
            frozenset(i for i, token in added.items() if token.special or token.content in self._special_tokens),
        )

    def cuts(self) -> re.Pattern[str] | None:
        """The added tokens that are found before a text is normalised, if none of them takes what is beside it."""
        added = [token for token in self._tokenizer.get_added_tokens_decoder().values() if not token.normalized]
        if self._puts_space or any(token.lstrip or token.rstrip or token.single_word for token in added):
            return None
        return longest_first(token.content for token in added)

    @functools.cached_property
    def _plain_tokenizer(self) -> tokenizers.Tokenizer:
        # `encode_special_tokens` is state of the tokenizer, so the other setting needs a tokenizer of its own.
        plain = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @functools.cached_property
    def _puts_space(self) -> bool:
        return _without_space_in_front(json.loads(self._tokenizer.to_str())) is not None

    @functools.cached_property
    def _spaceless_tokenizers(self) -> dict[bool, tokenizers.Tokenizer]:
        """Tokenizers that put no space anywhere, by `parse_special`."""
        state = json.dumps(_without_space_in_front(json.loads(self._tokenizer.to_str())))
        made = {parse_special: tokenizers.Tokenizer.from_str(state) for parse_special in (True, False)}
        made[False].encode_special_tokens = True
        return made

    @functools.cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def _encode_continuation(self, text: str, *, parse_special: bool) -> list[int]:
        encoded = self._spaceless_tokenizers[parse_special].encode_batch([text], add_special_tokens=False)[0]
        for index, token_id in enumerate(encoded.ids):
            if token_id in self._added_ids:
                rest = text[encoded.offsets[index][0] :]
                return encoded.ids[:index] + self.encode(rest, parse_special=parse_special)
        return encoded.ids


@final
class SentencePieceEncoder:
    """A `tokenizer.model`, through sentencepiece.

    Special and added tokens that are written in a text cut it into segments, and each segment is encoded by itself. So
    the space that sentencepiece puts before a text comes again after such a token, unless the configuration says
    `legacy: false`.

    Attributes:
        config: The configuration, with the model's own BOS and EOS where it names none.
    """

    def __init__(self, model: bytes, config: TokenizerConfig):
        """Takes the bytes of the file, and the configuration for the tokens added since it was trained.

        Raises:
            ModelError: The bytes are not a sentencepiece model.
        """
        try:
            processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError, ValueError):
            raise ModelError(
                "tokenizer.model must be a sentencepiece model, but it cannot be read as one; fetch the model again"
            ) from None
        trained = {i: processor.id_to_piece(i) for i in range(processor.get_piece_size())}
        self._model = model
        self._processor = self._spaceless_processor if config.add_prefix_space is False else processor
        self._behind_special = self._spaceless_processor if config.legacy is False else self._processor
        self._tokens = trained | dict(config.added_tokens)
        self._ids = {token: i for i, token in self._tokens.items()}
        self.config = dataclasses.replace(
            config,
            bos_token=config.bos_token or self._tokens.get(processor.bos_id()),
            eos_token=config.eos_token or self._tokens.get(processor.eos_id()),
        )
        self._special_ids = frozenset(
            i
            for i, token in self._tokens.items()
            if token in config.special_tokens or (i in trained and (processor.is_control(i) or processor.is_unknown(i)))
        )
        self._verbatim_ids = self._special_ids | config.added_tokens.keys()
        verbatim = [self._tokens[i] for i in self._verbatim_ids]
        self._added = AddedTokens(verbatim, config.token_flags)
        # Sentencepiece reads its user-defined symbols in any text. A special one is cut after its first character.
        always_read = [token for token in verbatim if not self._special_ids.isdisjoint(processor.encode(token))]
        cuts = "|".join(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in always_read)
        self._hidden_pattern = re.compile(cuts) if cuts else None

    def encode(self, text: str, *, parse_special: bool, continues: bool = False) -> list[int]:
        """The tokens of a text."""
        first = self._spaceless_processor if continues else self._processor
        if not parse_special:
            head, *rest = self._hidden_pattern.split(text) if self._hidden_pattern else [text]
            return [*first.encode(head), *(i for part in rest for i in self._spaceless_processor.encode(part))]
        ids: list[int] = []
        for index, (part, is_token) in enumerate(self._added.split(text)):
            if is_token:
                ids.append(self._ids[part])
            else:
                ids += (self._behind_special if index else first).encode(part)
        return ids

    def cuts(self) -> None:
        """Texts are not cut."""

    def token_id(self, token: str) -> int | None:
        """The id of a token, or None."""
        return self._ids.get(token)

    def affixes(self) -> tuple[list[int], list[int]]:
        """BOS, if the model has one: the file does not say it, but every published model puts it in front."""
        bos_id = self._processor.bos_id()
        return ([bos_id] if bos_id >= 0 else []), []

    def pieces(self) -> TokenPieces:
        """The bytes of every token."""
        pieces = pieces_by_id({i: self._spell(token, i) for i, token in self._tokens.items()})
        puts_space = self._processor.encode("a", out_type=str)[0].startswith(WORD_START)
        return TokenPieces(pieces, self._special_ids, strips_leading_space=puts_space)

    @functools.cached_property
    def _spaceless_processor(self) -> sentencepiece.SentencePieceProcessor:
        """The same model without `add_dummy_prefix` and `remove_extra_whitespaces`.

        Protobuf merges messages that are written one after another. Field 3 of the model is the specification of the
        normaliser, and its fields 3 and 4 are these two.
        """
        off = bytes([3 << 3 | 2, 4, 3 << 3, 0, 4 << 3, 0])
        return sentencepiece.SentencePieceProcessor(model_proto=self._model + off)

    def _spell(self, token: str, token_id: int) -> bytes:
        if token_id in self._verbatim_ids:
            return token.encode()
        if self._processor.is_byte(token_id):
            return byte_of_token(token) or b""
        return token.replace(WORD_START, " ").encode()


def _without_space_in_front(state: dict[str, Any]) -> dict[str, Any] | None:
    """A tokenizer's state without the steps that put a space before a text; None if it has no such step."""
    changed = {name: _spaceless(step) for name in ("normalizer", "pre_tokenizer") if (step := state.get(name))}
    return None if all(state[name] == step for name, step in changed.items()) else state | changed


def _spaceless(step: dict[str, Any]) -> dict[str, Any] | None:
    """A step of a normalizer or pre-tokenizer that puts no space before a text; None for one that does only that."""
    match step:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace", "prepend_scheme": str()}:
            return step | {"prepend_scheme": "never"}
        case {"type": "ByteLevel", "add_prefix_space": True}:
            return step | {"add_prefix_space": False}
        case {"type": "Sequence"}:
            name = "normalizers" if "normalizers" in step else "pretokenizers"
            return step | {name: [made for each in step[name] if (made := _spaceless(each)) is not None]}
    return step
