"""What grammars and drafts did for a request in its steps."""

import collections
import dataclasses
import enum
import itertools
from collections.abc import Sequence


class Source(enum.IntEnum):
    """Where a proposed token comes from, in the order in which sources are asked."""

    FORCED = 0
    TREE = 1
    PREDICTION = 2
    TEXT = 3
    PAST = 4
    MTP = 5

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name.lower()

    @property
    def text(self) -> str:
        """What tokens of it are, as a clause for people."""
        return _TEXTS[self]


_TEXTS = {
    Source.FORCED: "that a grammar forced",
    Source.TREE: "that follow the same text in the radix tree",
    Source.PREDICTION: "that were copied from the answer that the client predicted",
    Source.TEXT: "that were copied from prompt or output of the same request",
    Source.PAST: "that were copied from past outputs of the namespace",
    Source.MTP: "that the model's own layer for drafts predicted",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftReport:
    """How many draft tokens a request had, by the name of their source (`jsg:draft_tokens_total` has the same).

    Attributes:
        proposed: Those that steps verified.
        taken: Those that became output. Each saved a step.
    """

    proposed: dict[str, int] = dataclasses.field(default_factory=collections.Counter)
    taken: dict[str, int] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintReport:
    """What a grammar did to the tokens of one output.

    Attributes:
        is_forced: For each token, whether the grammar allowed one text only, which the token begins; False without
            jump-forward.
        kept_mass: For each token, the probability in [0, 1] that the model gave to all tokens that the grammar allowed
            there, before temperature, penalties and bias.
        is_complete: Whether the whole output so far matches the grammar.
    """

    is_forced: tuple[bool, ...]
    kept_mass: tuple[float, ...]
    is_complete: bool

    @staticmethod
    def join(reports: "Sequence[ConstraintReport]") -> "ConstraintReport":
        """One report of several that follow one another."""
        return ConstraintReport(
            is_forced=tuple(itertools.chain.from_iterable(report.is_forced for report in reports)),
            kept_mass=tuple(itertools.chain.from_iterable(report.kept_mass for report in reports)),
            is_complete=reports[-1].is_complete,
        )
