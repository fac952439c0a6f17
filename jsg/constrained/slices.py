r"""Large parts of a vocabulary that a mask can take whole: the tokens that are ordinary text.

Inside a string of JSON nearly all tokens are allowed. To find that by walking them one by one costs a millisecond; to
find that the string takes every ordinary character, so many times over, costs microseconds, and only the other tokens
are left to walk.

    slice 0      slice 1      slice 2      slice 3
    ≤ 10 chars ⊂ ≤ 30 chars ⊂ any number ⊂ " and \ too      each with the trie of all tokens that are not in it
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jsg.constrained.trie import SortedTokens, Trie, make_trie

_SHORT_CHARS = 10
_LONG_CHARS = 30
_DEAD = -1
_NOT_IN_JSON_STRINGS = b'"\\'


class Slice(NamedTuple):
    """Tokens that are whole characters of one set, and not too many of them.

    Attributes:
        mask: uint32[W], a bit for each of the tokens. Read-only.
        rest: All tokens with text that are not among them.
        chars: int16[states, 256], the characters as an automaton over their UTF-8: the next state, or -1; a character
            ends in state 0, where it also begins. Read-only.
        max_chars: The most characters that one of the tokens has.
    """

    mask: NDArray[np.uint32]
    rest: Trie
    chars: NDArray[np.int16]
    max_chars: int


def make_slices(tokens: SortedTokens, num_words: int) -> tuple[Slice, ...]:
    """The slices of a vocabulary, each holding the one before it; such as would add nothing are left out."""
    num_chars = _count_chars(tokens)
    in_json, in_text = ordinary_chars(_NOT_IN_JSON_STRINGS), ordinary_chars(b"")
    is_json = _is_made_of(tokens, in_json)
    candidates = [
        (is_json & (num_chars <= _SHORT_CHARS), in_json),
        (is_json & (num_chars <= _LONG_CHARS), in_json),
        (is_json, in_json),
        (_is_made_of(tokens, in_text), in_text),
    ]
    slices: list[Slice] = []
    size = 0
    for is_in, chars in candidates:
        if np.count_nonzero(is_in) > size:
            size = np.count_nonzero(is_in)
            mask = mask_of(tokens.ids[is_in], num_words)
            rest = make_trie(tokens.subset(~is_in))
            slices.append(Slice(mask, rest, chars, int(num_chars[is_in].max())))
    return tuple(slices)


def mask_of(ids: NDArray[np.int32], num_words: int) -> NDArray[np.uint32]:
    """uint32[num_words] with the bits of these tokens set. Read-only."""
    bits = np.zeros(num_words * 32, np.uint8)
    bits[ids] = 1
    mask = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    mask.flags.writeable = False
    return mask


def ordinary_chars(excluded: bytes) -> NDArray[np.int16]:
    """All characters but controls (C0, DEL, C1) and those of the ASCII characters `excluded`; see `Slice.chars`."""
    one, two, three, after_e0, after_ed, after_f0, after_f4, after_c2 = range(1, 9)
    table = np.full((9, 256), _DEAD, np.int16)
    table[0, 0x20:0x7F] = 0
    table[0, list(excluded)] = _DEAD
    table[0, 0xC3:0xE0] = one
    table[0, 0xE1:0xF0] = two
    table[0, 0xF1:0xF4] = three
    # These lead bytes have fewer continuations: no overlong forms, no surrogates, nothing above U+10FFFF, no C1.
    for lead, state, first, last, target in (
        (0xE0, after_e0, 0xA0, 0xBF, one),
        (0xED, after_ed, 0x80, 0x9F, one),
        (0xF0, after_f0, 0x90, 0xBF, two),
        (0xF4, after_f4, 0x80, 0x8F, two),
        (0xC2, after_c2, 0xA0, 0xBF, 0),
    ):
        table[0, lead] = state
        table[state, first : last + 1] = target
    for state, target in ((one, 0), (two, one), (three, two)):
        table[state, 0x80:0xC0] = target
    table.flags.writeable = False
    return table


def _is_made_of(tokens: SortedTokens, chars: NDArray[np.int16]) -> NDArray[np.bool_]:
    """For each token whether it is whole characters of this set."""
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
