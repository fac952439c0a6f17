"""The bytes of each token id.

A text is the bytes of its tokens one after another, read as UTF-8, without the space that some tokenizers put in front.
All that makes text of tokens (decoding whole, decoding as they come, masks over the vocabulary) uses this one table, so
no two of them disagree.

Malformed UTF-8 becomes one U+FFFD for each maximal broken sequence, as in byte-level tokenizers. For byte-fallback
tokens libraries differ: sentencepiece gives one U+FFFD for each broken byte, and `tokenizers` gives one for every byte
of a run as soon as one of them is broken, which a stream cannot foresee.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jsg.errors import ModelError

_MAX_VOCAB_SIZE = 2**24
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# How sentencepiece writes a space.
WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPieces:
    """The bytes of every token.

    Attributes:
        pieces: Entry i has the bytes of token i: the written form of a special token, and b"" for an id that no token
            has.
        special_ids: The special tokens.
        strips_leading_space: Encoding puts a space before a text, so decoding takes one off its front.
    """

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]
    strips_leading_space: bool


def pieces_of_decoder(
    decoder: dict[str, Any] | None, tokens: Mapping[int, str], added: Mapping[int, str], special_ids: frozenset[int]
) -> TokenPieces:
    """Applies the decoder section of a `tokenizer.json` to every token by itself.

    Args:
        decoder: The section as JSON.
        tokens: Id → token in the alphabet of the model, with the added tokens.
        added: Id → content of the added tokens.
        special_ids: The added tokens that are special.

    Raises:
        ModelError: The result of this kind of decoder depends on the neighbours of a token.
    """
    spell, strips_leading_space = _read_decoder(decoder)
    pieces = pieces_by_id({i: spell(token, i in added) for i, token in tokens.items()})
    return TokenPieces(pieces, special_ids, strips_leading_space)


def pieces_by_id(pieces: Mapping[int, bytes]) -> tuple[bytes, ...]:
    """A table over all ids up to the highest. Raises ModelError if the vocabulary would be too large."""
    size = max(pieces, default=-1) + 1
    if size > _MAX_VOCAB_SIZE:
        raise ModelError(f"token ids must be below {_MAX_VOCAB_SIZE}, but one is {size - 1}; fetch the model again")
    table = [b""] * size
    for token_id, piece in pieces.items():
        table[token_id] = piece
    return tuple(table)


def byte_of_token(token: str) -> bytes | None:
    """The byte that a byte-fallback token such as `<0x0A>` stands for, or None for any other token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else None


def _read_decoder(decoder: dict[str, Any] | None) -> tuple[Callable[[str, bool], bytes], bool]:
    """A function from a token, and whether it is an added one, to its bytes; and whether a leading space goes."""
    replacements: list[tuple[str, str]] = []
    is_byte_level = falls_back_to_bytes = strips_leading_space = is_fused = False
    for step in _flatten(decoder):
        match step:
            case {"type": "ByteLevel"}:
                is_byte_level = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not is_fused:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(old), "prepend_scheme": scheme}:
                replacements.append((old, " "))
                strips_leading_space = scheme != "never"
            case {"type": "ByteFallback"}:
                falls_back_to_bytes = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0} if is_fused:
                strips_leading_space = start == 1
            case _:
                raise ModelError(
                    "the decoder in tokenizer.json must be ByteLevel, Metaspace or Replace, ByteFallback, Fuse, Strip "
                    f"in sequence, but it has {(step or {}).get('type')!r}; use a model with such a tokenizer"
                )

    alphabet = _byte_level_alphabet()

    def spell(token: str, is_added: bool) -> bytes:
        # An added token is written as it is, not in the byte-level alphabet.
        if is_byte_level and not is_added:
            try:
                return bytes(map(alphabet.__getitem__, token))
            except KeyError:
                return token.encode()
        for old, new in replacements:
            token = token.replace(old, new)
        byte = byte_of_token(token) if falls_back_to_bytes else None
        return token.encode() if byte is None else byte

    return spell, strips_leading_space


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any] | None]:
    if decoder is not None and decoder.get("type") == "Sequence":
        return [step for part in decoder["decoders"] for step in _flatten(part)]
    return [decoder]


def _byte_level_alphabet() -> dict[str, int]:
    """The character that stands for a byte in byte-level BPE → the byte.

    Printable Latin-1 stands for itself. The characters from U+0100 on stand for the other 68 bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
