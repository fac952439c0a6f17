"""Text that is free but for some strings that must not be in it."""

from collections import deque
from collections.abc import Mapping, Sequence

from jsg.constrained.ir import Automaton, ByteSet, Expr
from jsg.constrained.limits import Limits, check

_TAIL = (0x80, 0xBF)
# For each first byte of a character of several bytes: the bytes that must follow. Neither surrogates nor spellings that
# are longer than need be.
_CHARACTERS: tuple[tuple[tuple[int, int], tuple[tuple[int, int], ...]], ...] = (
    ((0xC2, 0xDF), (_TAIL,)),
    ((0xE0, 0xE0), ((0xA0, 0xBF), _TAIL)),
    ((0xE1, 0xEC), (_TAIL, _TAIL)),
    ((0xED, 0xED), ((0x80, 0x9F), _TAIL)),
    ((0xEE, 0xEF), (_TAIL, _TAIL)),
    ((0xF0, 0xF0), ((0x90, 0xBF), _TAIL, _TAIL)),
    ((0xF1, 0xF3), (_TAIL, _TAIL, _TAIL)),
    ((0xF4, 0xF4), ((0x80, 0x8F), _TAIL, _TAIL)),
)
_ASCII = (0x00, 0x7F)
