"""Counters, gauges and histograms as Prometheus knows them, cheap enough to be written once per token.

`prometheus_client` makes the text of a scrape. Its own counters take a lock and walk the buckets at each observation,
which costs too much for each token. Here one event loop writes everything, so no lock is needed.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal, final

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Kind = Literal["counter", "gauge", "histogram"]


@dataclasses.dataclass(frozen=True, slots=True)
class Series:
    """The description of a metric.

    Attributes:
        name: The name in a scrape, without the suffixes of a histogram.
        kind: The type.
        text: One sentence for people.
        labels: The names of the labels, except `le`.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    def family(self, values: Mapping[tuple[str, ...], float]) -> Metric:
        """The family of a counter or a gauge: label values → value."""
        cls = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = cls(self.name, self.text, labels=self.labels)
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


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

    def family(self) -> Metric:
        """What is scraped of it."""
        return self.series.family(self._values)


@final
class Histogram:
    """How often values fell into each bucket, and their sum."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """Makes an empty one; `bounds` are the upper ends of the buckets, ascending, and belong to them."""
        self.series = Series(name, "histogram", text)
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Counts a value, `times` times."""
        self._counts[bisect.bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self) -> Metric:
        """What is scraped of it."""
        ends = [*map(float, self._bounds), "+Inf"]
        buckets = [(str(end), count) for end, count in zip(ends, itertools.accumulate(self._counts), strict=True)]
        family = HistogramMetricFamily(self.series.name, self.series.text)
        family.add_metric([], buckets, self._sum)
        return family
