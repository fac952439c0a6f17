"""Watches what two processes use over time, and estimates whether it grows."""

import asyncio
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Sequence

from bench.served import Served, Usage

MIB = 2**20
NORMAL_95 = 1.96
NUM_QUARTERS = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Slope:
    """How fast something grows, by the median of the slopes of all pairs of points (Theil–Sen).

    Attributes:
        per_hour: The estimate.
        low, high: The 95 % confidence interval, if the errors of the points are independent.
    """

    per_hour: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """The usage of both processes at one moment, which is given in seconds since the watch began."""

    when_s: float
    usage: dict[str, Usage]


class Watch:
    """Takes samples of a server's processes at intervals."""

    def __init__(self, server: Served, period_s: float):
        self.samples: list[Sample] = []
        self._server = server
        self._period_s = period_s
        self._started = time.monotonic()

    async def run(self) -> None:
        """Takes samples until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(self._period_s)

    def look(self) -> Sample:
        """Takes one sample."""
        sample = Sample(time.monotonic() - self._started, self._server.usage())
        self.samples.append(sample)
        return sample


def minima(samples: Sequence[Sample], process: str, bin_s: float) -> list[tuple[float, float]]:
    """(seconds, MiB) of the least anonymous memory of a process in each period.

    Running requests take memory beside what the process keeps, and give it back. So the least of many samples is
    nearest to what the process keeps. An incomplete last period is left out.
    """
    found = []
    for number, group in itertools.groupby(samples, lambda sample: int(sample.when_s // bin_s)):
        held = [(sample.usage[process].anonymous / MIB, sample.when_s) for sample in group]
        if (number + 1) * bin_s <= samples[-1].when_s:
            least, when_s = min(held)
            found.append((when_s, least))
    return found


def most_threads(samples: Sequence[Sample], process: str) -> list[int]:
    """The greatest number of threads of a process in each quarter of the samples; quarters without a sample lack."""
    bounds = [len(samples) * quarter // NUM_QUARTERS for quarter in range(NUM_QUARTERS + 1)]
    parts = [samples[begin:end] for begin, end in itertools.pairwise(bounds)]
    return [max(sample.usage[process].num_threads for sample in part) for part in parts if part]


def theil_sen(points: Sequence[tuple[float, float]]) -> Slope | None:
    """The slope per hour of points over seconds; None if there are fewer than three points.

    Single steps, such as a table that doubles once, hardly change a median, but lasting growth does. The interval is
    that of Sen (1968), from the variance of Kendall's statistic.
    """
    slopes = sorted(
        3600 * (after[1] - before[1]) / (after[0] - before[0]) for before, after in itertools.combinations(points, 2)
    )
    count = len(points)
    if count < 3:
        return None
    width = NORMAL_95 * math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, math.floor((len(slopes) - width) / 2))
    high = min(len(slopes) - 1, math.ceil((len(slopes) + width) / 2))
    return Slope(statistics.median(slopes), slopes[low], slopes[high])
