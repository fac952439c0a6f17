"""Synthetic data: texts of a given number of tokens, which depend on a seed only.

The published data sets are not in this repository. What a cache, a scheduler and a step cost depends on how long texts
are and on what they share, and not on what they say.
"""

import random
from collections.abc import Callable

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()


class Texts:
    """Draws texts and lengths.

    Args:
        seed: Equal seeds give equal texts.
        num_tokens: Counts the tokens of a text.
    """

    def __init__(self, seed: str, num_tokens: Callable[[str], int]):
        self.random = random.Random(seed)
        sample = " ".join(WORDS)
        self._tokens_per_word = num_tokens(sample) / len(WORDS)

    def text(self, num_tokens: int) -> str:
        """Words of about this many tokens, at least one."""
        return " ".join(self.random.choices(WORDS, k=max(1, round(num_tokens / self._tokens_per_word))))

    def length(self, mean: int, least: int, most: int) -> int:
        """A number of tokens with this mean, as those of answers are spread: many short ones and a few long ones."""
        return min(most, max(least, round(self.random.gammavariate(3.0, mean / 3.0))))

    def between(self, least: int, most: int) -> int:
        """A number from `least` to `most`, each equally likely."""
        return self.random.randint(least, most)
