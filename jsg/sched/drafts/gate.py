"""When drafts are worth it: what a larger step costs, and how many more tokens it is expected to give.

The costs are measured once, after the programs are compiled. So every decision follows from them and from tokens, and
not from a clock.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import final

import numpy as np

from jsg.sched.buckets import BucketKey, Buckets, Phase

GAIN = 1.05
"""Drafts must promise so many times the tokens per second that the step gives without them."""
LEAST_CHANCE = 0.1
"""No token with a smaller chance is drafted, even where the step has room."""
BESIDE_PROMPTS = 0.5
"""Nor one with a smaller chance than this beside tokens of prompts, which it delays."""
HOST_SECONDS, HOST_SECONDS_A_ROW = 1e-4, 18e-6
"""The time from a step with drafts to the next one, which is planned after its end: 0.1 ms with one row and 4.8 ms with
256, of which proposals take 4.0 (`python -m bench.sched`). Without drafts, the next step is planned while the device
computes."""
MEASURED_ROWS = (1, 8, 32)
"""The decode shapes nearest to these sizes are measured, and the largest one; others lie between them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Which drafts a step should have: of each proposal so many tokens, and of rows of logits so many in all."""

    counts: tuple[int, ...]
    num_rows: int


@final
class Gate:
    """Decides which drafts are worth it. Until all costs are measured none are, but for those that are sure.

    In deterministic mode every step has one shape, so that drafts cost nothing.

    Attributes:
        to_measure: The shapes whose cost is not known yet, and the rows of drafts by the model itself.
        seconds: The costs of shapes that are known.
        repeat_seconds: By rows, what the model takes to draft one token of each.
        is_wanted: Whether some request may have drafts that are not sure. Otherwise none could gain.
        num_open: Steps in which drafts were worth it.
        num_shut: Steps in which some were proposed, and none was worth it.
    """

    def __init__(self, buckets: Buckets):
        sizes = {key.num_rows: key for key in buckets.decode}
        near = [min(sizes, key=lambda size: abs(size - rows)) for rows in (*MEASURED_ROWS, buckets.max_rows) if sizes]
        self._plain = [sizes[size] for size in sorted(set(near))]
        self._drafted = buckets.drafts
        self._buckets = buckets
        self._gains: dict[tuple[int, int], bool] = {}
        self.to_measure: list[BucketKey | int] = [*self._plain, *self._drafted]
        self.seconds: dict[BucketKey, float] = {}
        self.repeat_seconds: dict[int, float] = {}
        self.num_open = self.num_shut = 0
        self.is_wanted = False

    def expect_repeats(self) -> None:
        """Has the drafts of the model itself measured too."""
        self.to_measure += self._buckets.repeats if self._drafted else ()

    def note(self, key: BucketKey | int, seconds: float) -> None:
        """Notes what a step of a shape takes: of a decode step how much later the next one ends, and else its time.

        What else the machine does makes a step longer and never shorter. So none costs more than a larger one.
        """
        self.to_measure.remove(key)
        if isinstance(key, int):
            self.repeat_seconds[key] = seconds
            return
        self.seconds[key] = seconds
        for other in self.seconds:
            larger = [cost for each, cost in self.seconds.items() if each.num_rows >= other.num_rows]
            self.seconds[other] = min(larger)

    @property
    def is_open(self) -> bool:
        """Whether drafts that are not sure may be chosen."""
        return all(isinstance(key, int) for key in self.to_measure)

    def plain_seconds(self, num_rows: int) -> float:
        """What a decode step takes without drafts, between the measured sizes along a line."""
        size = self._buckets.pick(Phase.DECODE, num_rows).num_rows
        sizes, costs = [key.num_rows for key in self._plain], [self.seconds[key] for key in self._plain]
        return float(np.interp(size, sizes, costs))

    def may_gain(self, num_rows: int, most_rows: int) -> bool:
        """Whether a step with so many requests could ever gain by drafts, if nearly all of them were right."""
        if not self.is_wanted or not self._drafted:
            return self.is_wanted
        key = num_rows, most_rows
        if self.is_open and key not in self._gains:
            self._gains[key] = self.choose(num_rows, [[0.95] * most_rows], most_rows) is not None
        return self._gains.get(key, False)

    def choose(self, num_rows: int, chances: Sequence[Sequence[float]], most_rows: int) -> Choice | None:
        """The drafts with which a decode step of `num_rows` requests gives the most tokens per second.

        Args:
            num_rows: Requests.
            chances: For each proposal, the chance of each token that it becomes output; they fall.
            most_rows: Rows of logits that a step may have now.

        Returns:
            None if the step is better without drafts.
        """
        ranked = self._ranked(chances)
        if not self._drafted:
            return self._choice(ranked, len(chances), most_rows - num_rows, most_rows)
        key, _ = self._best(num_rows, ranked, most_rows, 0.0)
        return key and self._choice(ranked, len(chances), key.num_rows - num_rows, key.num_rows)

    def num_repeats(
        self, num_rows: int, others: Sequence[Sequence[float]], own: Sequence[Sequence[float]], most_rows: int
    ) -> int:
        """How many tokens the model should draft itself for a decode step; 0 for none.

        Args:
            num_rows: Requests.
            others: The chances of the proposals that there are without it: see `choose`.
            own: Of each request for which it would draft, those of the tokens; one of these is the longest.
            most_rows: Rows of logits that a step may have now.
        """
        longest = max(map(len, own), default=0)
        if not self._drafted:
            return longest if most_rows > num_rows else 0
        size = next((size for size in self._buckets.repeats if size >= len(own)), None)
        if size not in self.repeat_seconds or not self.is_open:
            return 0
        best, best_rate = 0, self._best(num_rows, self._ranked(others), most_rows, 0.0)[1]
        for count in range(1, longest + 1):
            ranked = self._ranked([*others, *(each[:count] for each in own)])
            rate = self._best(num_rows, ranked, most_rows, count * self.repeat_seconds[size])[1]
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    @staticmethod
    def _ranked(chances: Sequence[Sequence[float]]) -> list[tuple[float, int]]:
        """The chances that count and the proposals that they are of, the best first."""
        return sorted(
            ((chance, index) for index, each in enumerate(chances) for chance in each if chance >= LEAST_CHANCE),
            key=lambda pair: -pair[0],
        )

    def _best(
        self, num_rows: int, ranked: Sequence[tuple[float, int]], most_rows: int, more_seconds: float
    ) -> tuple[BucketKey | None, float]:
        """The shape with the most tokens per second, and that rate; without drafts None, and what they must promise.

        Steps with drafts take `more_seconds` longer than their shapes.
        """
        if not self.is_open:
            return None, 0.0
        best, best_rate = None, GAIN * num_rows / self.plain_seconds(num_rows)
        expected = [*itertools.accumulate((chance for chance, _ in ranked), initial=float(num_rows))]
        host_seconds = more_seconds + HOST_SECONDS + HOST_SECONDS_A_ROW * num_rows
        for key in self._drafted:
            room = key.num_rows - num_rows
            if room <= 0 or key.num_rows > most_rows or not ranked:
                continue
            rate = expected[min(room, len(ranked))] / (self.seconds[key] + host_seconds)
            if rate > best_rate:
                best, best_rate = key, rate
        return best, best_rate

    @staticmethod
    def _choice(ranked: Sequence[tuple[float, int]], num_proposals: int, room: int, num_rows: int) -> Choice:
        counts = [0] * num_proposals
        for _, index in ranked[:room]:
            counts[index] += 1
        return Choice(tuple(counts), num_rows)
