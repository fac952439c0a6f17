r"""Slices: large parts of a vocabulary that a mask can allow as a whole, because their tokens are ordinary text.

Inside a JSON string nearly all tokens are allowed. Walking over all of them takes a millisecond. It takes microseconds
to find out that the string allows a number of any ordinary characters, and then only the other tokens need a walk.

    short        long         json         text
    ≤ 10 chars ⊂ ≤ 30 chars ⊂ any number ⊂ " and \ too      each with the trie of all tokens that are not in it
                              words (letters, digits, _ and space) ⊃ lower (small letters); all of them ASCII
    room[n]      all tokens of json with at most n chars, for a text with room for exactly n more
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jsg.constrained.automata import explore
from jsg.constrained.run.trie import SortedTokens, Trie, make_trie
from jsg.constrained.utf8 import Rest, next_bytes

SHORT_CHARS = 10
LONG_CHARS = 30
_DEAD = -1
_NOT_IN_JSON_STRINGS = b'"\\'
_LOWER = b"abcdefghijklmnopqrstuvwxyz"
_WORDS = _LOWER + _LOWER.upper() + b"0123456789_ "


class Slice(NamedTuple):
    """Tokens that consist of complete characters of one set, up to a number of them.

    Attributes:
        mask: uint32[W], a bit for each of the tokens. Read-only.
        rest: All other tokens with text.
        chars: int16[states, 256], the set as an automaton over UTF-8: the next state, or -1. Characters begin and end
            in state 0. Read-only.
        max_chars: The most characters that one of the tokens has.
    """

    mask: NDArray[np.uint32]
    rest: Trie
    chars: NDArray[np.int16]
    max_chars: int


class Slices(NamedTuple):
    """All slices of a vocabulary; see the top of this file.

    Attributes:
        short, long, json, text, words, lower: Tokens of one set of characters.
        room: For each n up to `LONG_CHARS`, the mask of the tokens of `json` with at most n characters.
    """

    short: Slice
    long: Slice
    json: Slice
    text: Slice
    words: Slice
    lower: Slice
    room: tuple[NDArray[np.uint32], ...]

    @property
    def num_bytes(self) -> int:
        """Memory of masks and tries."""
        parts = (self.short, self.long, self.json, self.text, self.words, self.lower)
        return sum(part.mask.nbytes + part.rest.num_bytes for part in parts) + sum(mask.nbytes for mask in self.room)


def make_slices(tokens: SortedTokens, num_words: int) -> Slices:
    """The slices of a vocabulary; any of them may hold no token."""
    num_chars = _count_chars(tokens)

    def made(is_in: NDArray[np.bool_], chars: NDArray[np.int16]) -> Slice:
        mask = mask_of(tokens.ids[is_in], num_words)
        return Slice(mask, make_trie(tokens.subset(~is_in)), chars, int(num_chars[is_in].max(initial=1)))

    json, text = ordinary_chars(_NOT_IN_JSON_STRINGS), ordinary_chars(b"")
    is_json = _is_made_of(tokens, json)
    words, lower = _ascii_chars(_WORDS), _ascii_chars(_LOWER)
    return Slices(
        short=made(is_json & (num_chars <= SHORT_CHARS), json),
        long=made(is_json & (num_chars <= LONG_CHARS), json),
        json=made(is_json, json),
        text=made(_is_made_of(tokens, text), text),
        words=made(_is_made_of(tokens, words), words),
        lower=made(_is_made_of(tokens, lower), lower),
        room=tuple(mask_of(tokens.ids[is_json & (num_chars <= most)], num_words) for most in range(LONG_CHARS + 1)),
    )


def mask_of(ids: NDArray[np.int32], num_words: int) -> NDArray[np.uint32]:
    """uint32[num_words] with the bits of these tokens set. Read-only."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[ids] = 1
    mask = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    mask.flags.writeable = False
    return mask


def ordinary_chars(excluded: bytes) -> NDArray[np.int16]:
    """All characters except controls (C0, DEL, C1) and the ASCII characters `excluded`; see `Slice.chars`."""

    def steps(rest: Rest) -> list[tuple[tuple[int, int], Rest]]:
        return [((first, last), after) for first, last, after in next_bytes(rest)]

    rows: list[NDArray[np.int16]] = []
    for edges in explore((), steps)[1]:
        row = np.full(256, _DEAD, np.int16)
        for (first, last), after in edges:
            row[first : last + 1] = after
        rows.append(row)
    rows[0][[*range(0x20), 0x7F, *excluded]] = _DEAD
    # C1 begins with C2 80 to C2 9F, so the byte C2 leads to a state of its own.
    rows[0][0xC2] = len(rows)
    after_c2 = np.full(256, _DEAD, np.int16)
    after_c2[0xA0:0xC0] = 0
    table = np.stack([*rows, after_c2])
    table.flags.writeable = False
    return table


def _ascii_chars(chars: bytes) -> NDArray[np.int16]:
    """These ASCII characters and no others; see `Slice.chars`."""
    table = np.full((1, 256), _DEAD, np.int16)
    table[0, list(chars)] = 0
    table.flags.writeable = False
    return table


def _is_made_of(tokens: SortedTokens, chars: NDArray[np.int16]) -> NDArray[np.bool_]:
    """bool[n], whether each token consists of complete characters of this set."""
    lengths = np.diff(tokens.start)
    states = np.zeros(len(lengths), np.int16)
    rows = np.arange(len(lengths))
    for depth in range(int(lengths.max(initial=0))):
        states[rows] = chars[states[rows], tokens.data[tokens.start[rows] + depth]]
        rows = rows[(states[rows] != _DEAD) & (lengths[rows] > depth + 1)]
        if not len(rows):
            break
    return states == 0


def _count_chars(tokens: SortedTokens) -> NDArray[np.int64]:
    """How many characters begin in each token."""
    begun = np.concatenate((np.zeros(1, np.int64), np.cumsum((tokens.data & 0xC0) != 0x80)))
    return begun[tokens.start[1:]] - begun[tokens.start[:-1]]
