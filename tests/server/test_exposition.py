"""The text of a scrape, beside the text that `prometheus_client` makes of the same numbers."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, exposition
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as text_families

from jsg.server.telemetry.exposition import encoded
from jsg.server.telemetry.series import Counter, Family, Histogram, Series

VALUES = ('"quoted" \\n', "two\nlines", "100 %s", "", "é")
"""Values of labels that a careless writer would break."""
NUMBERS = (0, 2**53, 1e-9, 1.5e17, 3)


def ours() -> list[Family]:
    counter = Counter("a:total_total", 'Counts "these" \\ those,\nby one.', ("kind",))
    gauge = Series("a:gauge", "gauge", "Is 1 %.")
    histogram = Histogram("a:seconds", "Lasts.", (0.001, 1, 20))
    for value, number in zip(VALUES, NUMBERS, strict=True):
        counter.add(number, (value,))
    for seconds in (0.001, 0.5, 20.5, 20.5):
        histogram.observe(seconds)
    return [counter.family(), gauge.family({(): 0.1}), histogram.family()]


def theirs() -> list[Metric]:
    counter = CounterMetricFamily("a:total_total", 'Counts "these" \\ those,\nby one.', labels=["kind"])
    for value, number in zip(VALUES, NUMBERS, strict=True):
        counter.add_metric([value], number)
    histogram = HistogramMetricFamily("a:seconds", "Lasts.")
    histogram.add_metric([], [("0.001", 1), ("1.0", 2), ("20.0", 2), ("+Inf", 4)], 0.001 + 0.5 + 20.5 + 20.5)
    return [counter, GaugeMetricFamily("a:gauge", "Is 1 %.", value=0.1), histogram]


class Collector(CollectorRegistry):
    def collect(self) -> list[Metric]:
        return theirs()


@pytest.mark.parametrize(
    ("as_openmetrics", "write", "parse"),
    [
        (False, exposition.generate_latest, text_families),
        (True, lambda registry: openmetrics.generate_latest(registry, escaping="allow-utf-8"), openmetrics_families),
    ],
)
def test_it_says_what_prometheus_client_says(as_openmetrics: bool, write: Callable, parse: Callable):
    body, _ = encoded(ours(), as_openmetrics=as_openmetrics)
    expected = write(Collector()).decode()
    assert comments(body.decode()) == comments(expected)
    assert [*parse(body.decode())] == [*parse(expected)]


def comments(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("#")]
