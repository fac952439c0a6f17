"""Metric families → the body of a scrape in the format that the scraper asks for."""

from collections.abc import Iterable
from typing import final

from prometheus_client import exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

TEXT = "text/plain"
OPENMETRICS = "application/openmetrics-text"


def encoded(families: Iterable[Metric], *, as_openmetrics: bool) -> tuple[bytes, str]:
    """The body and its media type, in OpenMetrics or in Prometheus' text format.

    Names are never escaped. By default `prometheus_client` writes `jsg_` in place of `jsg:` in the samples, but not in
    the comments, if the scraper names no escaping.
    """
    scrape = _Scrape(families)
    if as_openmetrics:
        body = openmetrics.generate_latest(scrape, escaping=openmetrics.ALLOWUTF8)
        return body, f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
    return exposition.generate_latest(scrape), exposition.CONTENT_TYPE_PLAIN_0_0_4


def prefers_openmetrics(accept: str) -> bool:
    """Whether an `Accept` header asks for OpenMetrics rather than for the text format."""
    weights = _weights(accept)
    return weights.get(OPENMETRICS, 0.0) > 0 and weights[OPENMETRICS] >= weights.get(TEXT, 0.0)


def _weights(accept: str) -> dict[str, float]:
    """The weight of each media type in an `Accept` header."""
    weights: dict[str, float] = {}
    for item in accept.split(","):
        media_type, *parameters = (part.strip() for part in item.lower().split(";"))
        weight = next((part[2:] for part in parameters if part.startswith("q=")), "1")
        try:
            weights[media_type] = max(float(weight), weights.get(media_type, 0.0))
        except ValueError:
            continue
    return weights


@final
class _Scrape(Collector):
    """Families in the form that `prometheus_client` takes."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
