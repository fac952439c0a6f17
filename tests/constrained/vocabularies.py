"""Vocabularies for tests: tiny ones with every oddity, and the real ones that `mistral-common` brings."""

import base64
import functools
import json
import shutil
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import mistral_common
import numpy as np
from numpy.typing import NDArray

from jsg.constrained.run.vocab import FORM, Vocabulary
from jsg.constrained.special_tokens import FIRST_BYTE
from jsg.processing.tokenizer import load_tokenizer, vocabulary_bytes

DATA = Path(mistral_common.__file__).parent / "data"
TEKKEN_SPECIAL = 1_000
TEKKEN_EOS = 2


def odd_vocabulary() -> Vocabulary:
    """Every single byte, words, duplicates, empty and partial tokens, special ids, an EOS id with text, padded rows."""
    words = [b"ab", b"abc", b"bc", b"a", b"true", b'":', b', "', b"12", b"\xc3", b"\xa9", "é".encode(), b"\xf0\x9f"]
    controls = [b"<s>", b"</s>", b"", b"a", b"ab"]
    tokens = [*controls, *(bytes([b]) for b in range(256)), *words, b"ab", b"", b"abcabcabcabcab", "ééé".encode()]
    return Vocabulary(tokens, special_ids=(0, 1, 3), eos_ids=(1, 4), size=len(tokens) + 45)


def word_vocabulary(*words: bytes) -> Vocabulary:
    """Just these tokens, and id 0 to end a text."""
    return Vocabulary([b"", *words], (0,), (0,))


@functools.cache
def tekken_tokens() -> tuple[bytes, ...]:
    """131 072 tokens of byte-level BPE."""
    entries = json.loads((DATA / "tekken_240911.json").read_text())["vocab"][: 131_072 - TEKKEN_SPECIAL]
    return (*(b"",) * TEKKEN_SPECIAL, *(base64.b64decode(entry["token_bytes"]) for entry in entries))


@functools.cache
def tekken() -> Vocabulary:
    return Vocabulary(tekken_tokens(), range(TEKKEN_SPECIAL), (TEKKEN_EOS,))


@functools.cache
def sentencepiece() -> Vocabulary:
    """32 768 pieces with byte fallback, so that many texts have two tokens."""
    with tempfile.TemporaryDirectory() as directory:
        shutil.copy(DATA / "mistral_instruct_tokenizer_240323.model.v3", Path(directory) / "tokenizer.model")
        tokens = vocabulary_bytes(load_tokenizer(Path(directory)))
    special = [i for i, token in enumerate(tokens) if not token]
    return Vocabulary(tokens, special, (2,), size=len(tokens) + 64)


def read_vocabulary(data: bytes) -> Vocabulary:
    """A vocabulary with the masks of the one whose bytes these are. Tokens that no grammar reads have no text."""
    arrays = {name: array.tolist() for name, array in FORM.unpack(data).items()}
    tokens, texts = [b""] * arrays["size"][0], bytes(arrays["texts"])
    for i, (start, end) in zip(arrays["ids"], pairwise(arrays["text_start"]), strict=True):
        tokens[i] = texts[start:end]
    special = {i: text[1:-1].decode() for i, text in enumerate(tokens) if text[:1] == bytes((FIRST_BYTE,))}
    return Vocabulary(tokens, special, arrays["eos_ids"], special_names=special)


def tokenize(vocabulary: Vocabulary, text: bytes) -> list[int]:
    """Tokens that spell a text, the longest first."""
    by_text = _by_text(vocabulary)
    ids = []
    while text:
        length = next(n for n in range(vocabulary.max_token_len, 0, -1) if text[:n] in by_text and n <= len(text))
        ids.append(by_text[text[:length]])
        text = text[length:]
    return ids


def bits(mask: NDArray[np.uint32]) -> set[int]:
    """The tokens of a mask."""
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


@functools.cache
def _by_text(vocabulary: Vocabulary) -> dict[bytes, int]:
    return {vocabulary.text_of(i): i for i in reversed(range(len(vocabulary.tokens))) if vocabulary.text_of(i)}


def utf8_lengths(tokens: Sequence[bytes]) -> list[int | None]:
    """Characters of each token, None where it is not valid UTF-8."""
    lengths: list[int | None] = []
    for token in tokens:
        try:
            lengths.append(len(token.decode()))
        except UnicodeDecodeError:
            lengths.append(None)
    return lengths
