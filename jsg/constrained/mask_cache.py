"""Masks of one grammar over one vocabulary: made when first needed, and each content kept once.

A mask is found again by exactly what decided it: the states that the text is in, whether it may end there, which slice
of the vocabulary could be taken whole, and those of the open frames that the walk over the tokens really read. Most
walks read none; then the mask serves the state wherever it stands.
"""

import hashlib
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jsg.constrained.machine import Config, Machine
from jsg.constrained.vocab import Vocabulary
from jsg.errors import GrammarError

_BYTES_PER_ENTRY = 400
"""Of a dictionary entry with its keys, about."""
_MAX_NAMED_BYTES = 8


class Mask(NamedTuple):
    """Which tokens may come next.

    Attributes:
        words: uint32[W], token t at bit t & 31 of word t >> 5. Read-only.
        key: A digest of the words; None where all tokens of the vocabulary are allowed.
    """

    words: NDArray[np.uint32]
    key: bytes | None


class MaskCache:
    """Finds masks by configuration. Not for several threads at once.

    Invariants: equal masks are one object; forgetting all of them changes no answer.
    """

    def __init__(self, machine: Machine, vocabulary: Vocabulary):
        self._machine = machine
        self._vocabulary = vocabulary
        self._decisions: dict[Hashable, dict[int, dict[Hashable, Mask]]] = {}
        self._last_level: dict[tuple[int, ...], int] = {}
        self._masks: dict[bytes, Mask] = {}
        self._num_entries = 0
        self.ended = self._store(vocabulary.eos_mask)
        """Of a text that an EOS token ended."""

    @property
    def num_masks(self) -> int:
        """Different masks that are kept."""
        return len(self._masks)

    @property
    def num_bytes(self) -> int:
        """Memory of masks and of what finds them, about."""
        return len(self._masks) * self._vocabulary.num_words * 4 + self._num_entries * _BYTES_PER_ENTRY

    def find(self, config: Config, is_complete: bool) -> Mask:
        """The mask of a text that was read up to `config` and is complete there or not.

        Raises:
            GrammarError: No token is allowed, or the grammar needs more states than it may have.
        """
        machine = self._machine
        states = tuple([state for state, _ in config])
        level = self._slices_taken(config, states)
        by_depth = self._decisions.setdefault((states, is_complete, level), {})
        for depth, masks in by_depth.items():
            mask = masks.get(machine.frames_read(config, depth))
            if mask is not None:
                return mask
        words, depth = self._walk(config, level)
        if is_complete:
            words |= self._vocabulary.eos_mask
        if not words.any():
            raise GrammarError(self._why_nothing_is_allowed(config, is_complete))
        mask = self._store(words)
        by_depth.setdefault(depth, {})[machine.frames_read(config, depth)] = mask
        self._num_entries += 1
        return mask

    def forget(self) -> None:
        """Drops all masks but `ended`."""
        self._decisions.clear()
        self._last_level.clear()
        self._masks.clear()
        self._num_entries = 0
        self.ended = self._store(self.ended.words)

    def _slices_taken(self, config: Config, states: tuple[int, ...]) -> int:
        """How many of the slices may come next whole; each holds the one before it.

        It begins where the same states ended the last time: to find that a slice fits takes longer than that one does
        not.
        """
        slices, machine = self._vocabulary.slices, self._machine
        level = self._last_level.get(states, 0)
        while level and not machine.accepts_all(config, slices[level - 1].chars, slices[level - 1].max_chars):
            level -= 1
        if level == self._last_level.get(states, 0):
            while level < len(slices) and machine.accepts_all(config, slices[level].chars, slices[level].max_chars):
                level += 1
            self._last_level[states] = level
        return level

    def _walk(self, config: Config, level: int) -> tuple[NDArray[np.uint32], int]:
        """The tokens with text that may come next, and how many frames the walk read."""
        if not level:
            words = np.zeros(self._vocabulary.num_words, np.uint32)
            return words, self._machine.walk(config, self._vocabulary.trie, words)
        part = self._vocabulary.slices[level - 1]
        words = part.mask.copy()
        return words, self._machine.walk(config, part.rest, words)

    def _store(self, words: NDArray[np.uint32]) -> Mask:
        digest = hashlib.sha256(words).digest()
        mask = self._masks.get(digest)
        if mask is None:
            words.flags.writeable = False
            mask = Mask(words, None if np.array_equal(words, self._vocabulary.all_mask) else digest)
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
