"""The masks of one grammar over one vocabulary. A mask is made when it is first needed, and equal masks are kept once.

A mask is stored under exactly what decided it: the states of the text's configuration, whether the text may end there,
and the open frames that were read to make it. Most masks need no frame, and such a mask holds for its states in any
stack.
"""

import hashlib
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jsg.constrained.run.machine import Config, Machine
from jsg.constrained.run.slices import LONG_CHARS, SHORT_CHARS, Slice
from jsg.constrained.run.trie import Trie
from jsg.constrained.run.vocab import Vocabulary
from jsg.errors import GrammarError

_BYTES_PER_MASK, _BYTES_PER_ENTRY, _BYTES_PER_HEAD, _BYTES_PER_FRAME = 350, 450, 70, 250
"""About how many bytes a mask takes beside its words, and an entry of the dictionary: for itself, for each way to read
the text in its key, and for each frame in its key."""
_MAX_NAMED_BYTES = 8
_COMMON_BYTE = ord("e")
"""If this byte may not come next, then not all ordinary text may come next."""


class Mask(NamedTuple):
    """Which tokens may come next.

    Attributes:
        words: uint32[W], token t at bit t & 31 of word t >> 5. Read-only.
        key: A digest of the words; None where all tokens of the vocabulary are allowed.
    """

    words: NDArray[np.uint32]
    key: bytes | None


class MaskCache:
    """Finds masks by configuration. Only one thread may use it at a time.

    Invariants: equal masks are one object, and forgetting all masks changes no answer.
    """

    def __init__(self, machine: Machine, vocabulary: Vocabulary):
        self._machine = machine
        self._vocabulary = vocabulary
        self._decisions: dict[Hashable, dict[int, dict[Hashable, Mask]]] = {}
        self._masks: dict[bytes, Mask] = {}
        self._entry_bytes = 0
        self._all_digest = hashlib.sha256(vocabulary.all_mask).digest()
        self.ended = self._store(vocabulary.eos_mask)
        """The mask of a text that an EOS token has ended."""

    @property
    def num_bytes(self) -> int:
        """About how much memory the masks and their index take."""
        return len(self._masks) * (self._vocabulary.num_words * 4 + _BYTES_PER_MASK) + self._entry_bytes

    def find(self, config: Config, is_complete: bool) -> Mask:
        """The mask of a text with this configuration. `is_complete` says whether the text may end here.

        Raises:
            GrammarError: No token is allowed, or the grammar needs more states than its limit.
        """
        machine = self._machine
        states = tuple([state for state, _ in config])
        by_depth = self._decisions.setdefault((states, is_complete), {})
        for depth, masks in by_depth.items():
            mask = masks.get(machine.frames_read(config, depth))
            if mask is not None:
                return mask
        words, rest, depth = self._taken(config)
        depth = max(depth, machine.walk(config, rest, words))
        if is_complete:
            words |= self._vocabulary.eos_mask
        if not words.any():
            raise GrammarError(self._why_nothing_is_allowed(config, is_complete))
        mask = self._store(words)
        key = machine.frames_read(config, depth)
        by_depth.setdefault(depth, {})[key] = mask
        self._entry_bytes += _BYTES_PER_ENTRY + _BYTES_PER_HEAD * len(config) + _BYTES_PER_FRAME * _num_frames(key)
        return mask

    def forget(self) -> None:
        """Forgets all masks but `ended`."""
        self._decisions.clear()
        self._masks.clear()
        self._entry_bytes = 0
        self.ended = self._store(self.ended.words)

    def _taken(self, config: Config) -> tuple[NDArray[np.uint32], Trie, int]:
        """The largest slice of the vocabulary that is allowed as a whole, without a walk.

        Returns:
            (the slice's mask, the trie of the other tokens, how many frames were read to choose the slice).
        """
        slices, deepest = self._vocabulary.slices, 0

        def accepts(part: Slice) -> bool:
            nonlocal deepest
            is_so, depth = self._machine.accepts_all(config, part.chars, part.max_chars)
            deepest = max(deepest, depth)
            return is_so

        part = None
        if self._machine.is_dead(config, _COMMON_BYTE):
            pass
        elif accepts(slices.json):
            part = slices.text if accepts(slices.text) else slices.json
        elif accepts(slices.long):
            part = slices.long
        else:
            # If exactly the texts of up to `room` characters may come, tokens of ordinary characters need no walk.
            room, is_exact, depth = self._machine.text_room(config, slices.json.chars, LONG_CHARS)
            deepest = max(deepest, depth)
            if room and is_exact:
                return slices.room[room].copy(), slices.json.rest, deepest
            if room >= SHORT_CHARS:
                part = slices.short
            elif accepts(slices.lower):
                part = slices.words if accepts(slices.words) else slices.lower
        if part is None:
            return np.zeros(self._vocabulary.num_words, np.uint32), self._vocabulary.trie, deepest
        return part.mask.copy(), part.rest, deepest

    def _store(self, words: NDArray[np.uint32]) -> Mask:
        digest = hashlib.sha256(words).digest()
        mask = self._masks.get(digest)
        if mask is None:
            words.flags.writeable = False
            mask = Mask(words, None if digest == self._all_digest else digest)
            self._masks[digest] = mask
        return mask

    def _why_nothing_is_allowed(self, config: Config, is_complete: bool) -> str:
        wanted = sorted(self._machine.allowed_bytes(config))
        if is_complete and not wanted:
            return (
                "a complete text must end with an EOS token where the grammar allows nothing more, but this model has "
                "none; name one in its generation_config.json"
            )
        named = ", ".join(f"0x{byte:02X}" for byte in wanted[:_MAX_NAMED_BYTES])
        more = f" and {len(wanted) - _MAX_NAMED_BYTES} others" if len(wanted) > _MAX_NAMED_BYTES else ""
        what = "continues with" if self._vocabulary.first_bytes.intersection(wanted) else "begins with"
        return (
            f"the grammar must go on with a byte that the model can write, but it asks for {named}{more} and no token "
            f"{what} that; leave such text out of the grammar, or use a model with byte tokens"
        )


def _num_frames(key: Hashable) -> int:
    """How many frames have their contents in a value of `Machine.frames_read`."""
    return sum([len(part) for part in key if isinstance(part, tuple)]) if isinstance(key, tuple) else 0
