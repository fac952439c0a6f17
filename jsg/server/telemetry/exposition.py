"""Metric families → the body of a scrape, in the format that the scraper asks for."""

from collections.abc import Iterable
from typing import final

from prometheus_client import exposition
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

TEXT = "text/plain"
OPENMETRICS = "application/openmetrics-text"


def encoded(families: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """The body and its media type: OpenMetrics where `accept` prefers it, the text format for everybody else.

    Names are never escaped: `prometheus_client`, left to choose, writes `jsg_` for `jsg:` in the samples (and not in
    the comments) for a scraper that says nothing of escaping.
    """
    scrape = _Scrape(families)
    weights = _weights(accept)
    if weights.get(OPENMETRICS, 0.0) > 0 and weights[OPENMETRICS] >= weights.get(TEXT, 0.0):
        body = openmetrics.generate_latest(scrape, escaping=openmetrics.ALLOWUTF8)
        return body, f"{OPENMETRICS}; version=1.0.0; charset=utf-8"
    return exposition.generate_latest(scrape), exposition.CONTENT_TYPE_PLAIN_0_0_4


def _weights(accept: str) -> dict[str, float]:
    """How much each media type of an `Accept` header is wanted."""
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
    """What `prometheus_client` wants to be given."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families
