"""A compiled grammar that is bound to a model's vocabulary; maskers are made from it."""

from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.run.machine import Machine
from jsg.constrained.run.masker import GrammarMasker
from jsg.constrained.run.places import Places
from jsg.constrained.run.vocab import Vocabulary
from jsg.constrained.tables import StaticTables

MEMO_BYTES = 32 << 20
"""Enough for 2 000 masks of 131 072 tokens; one schema in a hundred has more than 170."""


class CompiledGrammar:
    """The tables of a grammar bound to a vocabulary. Threads may share it.

    States, places and masks are made when a text first needs them and serve all later texts; texts do not disturb
    each other.
    """

    def __init__(
        self, static: StaticTables, vocabulary: Vocabulary, limits: Limits = LIMITS, memo_bytes: int = MEMO_BYTES
    ):
        """Binds the two. This takes almost no time, because everything is made when it is needed.

        Args:
            static: What `compile_tables` gave.
            vocabulary: Of the model.
            limits: What the states may cost while texts are read.
            memo_bytes: Masks and links between places beyond this are forgotten, and made again when needed.
        """
        self.vocabulary = vocabulary
        self._static = static
        self._places = Places(Machine(static, limits, vocabulary.max_token_len), vocabulary, memo_bytes)

    def new_masker(self) -> GrammarMasker:
        """A masker at the beginning of a text."""
        return GrammarMasker(self._places)

    def forget(self) -> None:
        """Forgets everything that is memoised. No answer of any masker changes."""
        self._places.forget()

    @property
    def num_bytes(self) -> int:
        """About how much memory tables, states, places and masks take; it grows while texts are read."""
        return self._static.num_bytes + self._places.num_bytes

    @property
    def num_readings_dropped(self) -> int:
        """How often a way to read a text was given up because there were more than `Limits.heads`."""
        return self._places.machine.num_dropped
