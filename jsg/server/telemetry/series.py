"""Counters, gauges and histograms as Prometheus knows them, cheap enough to be written once per token.

The counters of `prometheus_client` take a lock and walk the buckets at each observation, which costs too much for each
token. Here one event loop writes everything, so no lock is needed.
"""

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, final

Kind = Literal["counter", "gauge", "histogram"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Series:
    """The description of a metric. Each is made once, so it is compared by identity, which costs a scrape nothing.

    Attributes:
        name: The name in a scrape, without the suffixes of a histogram.
        kind: The type.
        text: One sentence for people.
        labels: The names of the labels, except `le`.
        bounds: The upper ends of a histogram's buckets, ascending, except infinity; they belong to their buckets.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()

    def family(self, values: Mapping[tuple[str, ...], float]) -> "Family":
        """The family of a counter or a gauge: label values → value."""
        return Family(self, {labels: (value,) for labels, value in values.items()})


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """What is scraped of one series at a moment.

    Attributes:
        series: The description.
        samples: Label values → the numbers: the value of a counter or a gauge; for a histogram how many values were at
            most each bound, how many there were (the bucket that ends nowhere), the same once more, and their sum.
    """

    series: Series
    samples: Mapping[tuple[str, ...], tuple[float, ...]]


type Samples = Mapping[tuple[str, ...], tuple[int | float, ...]]
"""The samples of a series: see `Family`."""


def summed(each: Iterable[Mapping[str, Samples]]) -> dict[str, Samples]:
    """What several processes have counted together: the samples of each series by its name."""
    sums: dict[str, dict[tuple[str, ...], tuple[int | float, ...]]] = {}
    for counted in each:
        for name, samples in counted.items():
            known = sums.setdefault(name, {})
            for labels, numbers in samples.items():
                known[labels] = tuple(map(operator.add, known[labels], numbers)) if labels in known else tuple(numbers)
    return dict(sums)


@final
class Counter:
    """A total for each combination of label values; it never falls."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...] = ()) -> None:
        self.series = Series(name, "counter", text, labels)
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}

    def add(self, amount: float, labels: tuple[str, ...] = ()) -> None:
        """Adds to the total of these label values."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def value(self, labels: tuple[str, ...] = ()) -> float:
        """The total of these label values."""
        return self._values.get(labels, 0)

    def family(self) -> Family:
        """What is scraped of it."""
        return self.series.family(self._values)


@final
class Histogram:
    """How often values fell into each bucket, and their sum."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """Makes an empty one; see `Series` for the bounds."""
        self.series = Series(name, "histogram", text, bounds=tuple(bounds))
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` times."""
        self._counts[bisect.bisect_left(self.series.bounds, value)] += times
        self._sum += value * times

    def family(self) -> Family:
        """What is scraped of it."""
        below = [*itertools.accumulate(self._counts)]
        return Family(self.series, {(): (*below, below[-1], self._sum)})
