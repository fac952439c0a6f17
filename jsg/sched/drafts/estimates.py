"""How often tokens of each source are right: running estimates, of a request and of its namespace."""

from typing import Self, final

from jsg.step_reports import Source

LONGEST = 16
"""Tokens that are compared before a place. Of places where more are equal, the newest counts."""
CLASSES = LONGEST.bit_length() + 1
"""Tokens are counted by source, and by how many tokens before them are equal: 0, 1, 2 to 3, 4 to 7, 8 to 15, more. Of
MTP those count that were drafted before in the same call."""
FIRST_GUESSES = {
    Source.FORCED: (0.97,) * CLASSES,
    Source.TREE: (0.6, 0.7, 0.8, 0.85, 0.9, 0.95),
    Source.PREDICTION: (0.0, 0.4, 0.6, 0.8, 0.9, 0.95),
    Source.TEXT: (0.0, 0.2, 0.4, 0.6, 0.8, 0.9),
    Source.PAST: (0.0, 0.2, 0.4, 0.6, 0.8, 0.9),
    Source.MTP: (0.7, 0.6, 0.5, 0.0, 0.0, 0.0),
}
"""What is taken until there are counts. It decides a few tokens only."""
WEIGHT = 4.0
"""A guess counts as much as so many tokens that were seen."""
MOST = 64.0
"""Counts are halved when they reach it, so that the last tokens weigh most."""

type Kind = tuple[Source, int]
"""A source and a class."""


def kind_of(source: Source, num_equal: int) -> Kind:
    """The kind of a token after so many equal ones."""
    return source, min(num_equal.bit_length(), CLASSES - 1)


_RISING = {source: [kind_of(source, num_equal) for num_equal in range(LONGEST)] for source in Source}


def kinds_from(source: Source, num_equal: int, count: int) -> list[Kind]:
    """The kinds of so many tokens one after another, the first of which comes after so many equal ones."""
    rising = _RISING[source][num_equal : num_equal + count]
    return rising + [kind_of(source, LONGEST)] * (count - len(rising))


@final
class Estimates:
    """Estimates the chance that a token of a kind is right, if those before it are.

    Args:
        guess: What is taken where nothing was counted; None for `FIRST_GUESSES`.
    """

    def __init__(self, guess: Self | None = None):
        self._guess = guess
        self._counts: dict[Kind, tuple[float, float]] = {}

    def chance(self, kind: Kind) -> float:
        """The estimate, from 0 to 1."""
        guess = FIRST_GUESSES[kind[0]][kind[1]] if self._guess is None else self._guess.chance(kind)
        right, seen = self._counts.get(kind, (0.0, 0.0))
        return (right + WEIGHT * guess) / (seen + WEIGHT)

    def count(self, kind: Kind, *, is_right: bool) -> None:
        """Notes whether a token was right, whether or not it was verified as a draft."""
        right, seen = self._counts.get(kind, (0.0, 0.0))
        if seen >= MOST:
            right, seen = right / 2, seen / 2
        self._counts[kind] = right + is_right, seen + 1
        if self._guess is not None:
            self._guess.count(kind, is_right=is_right)
