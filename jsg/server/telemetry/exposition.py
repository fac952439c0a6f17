"""Metric families → the body of a scrape in the format that the scraper asks for.

Some routers scrape 20 times a second, so all but the numbers is written once: `_lines` keeps the text around them.
"""

import functools
from collections.abc import Iterable

from jsg.server.telemetry.series import Family, Series

TEXT = "text/plain"
OPENMETRICS = "application/openmetrics-text"


def encoded(families: Iterable[Family], *, as_openmetrics: bool) -> tuple[bytes, str]:
    """The body and its media type, in OpenMetrics or in Prometheus' text format."""
    texts: list[str] = []
    for family in families:
        texts.append(_comments(family.series, as_openmetrics))
        texts += [_lines(family.series, labels) % numbers for labels, numbers in family.samples.items()]
    if as_openmetrics:
        texts.append("# EOF\n")
    version = f"{OPENMETRICS}; version=1.0.0" if as_openmetrics else f"{TEXT}; version=0.0.4"
    return "".join(texts).encode(), f"{version}; charset=utf-8"


@functools.lru_cache(1024)
def _comments(series: Series, as_openmetrics: bool) -> str:
    """What a family begins with. The formats differ in the name of a counter and in the quotes of the description."""
    name, text = series.name, series.text.replace("\\", r"\\").replace("\n", r"\n")
    if as_openmetrics:
        text = text.replace('"', r"\"")
        name = name.removesuffix("_total") if series.kind == "counter" else name
    return f"# HELP {name} {text}\n# TYPE {name} {series.kind}\n"


@functools.lru_cache(4096)
def _lines(series: Series, labels: tuple[str, ...]) -> str:
    """The lines of the samples with these label values, with %s in place of each number."""
    pairs = [*zip(series.labels, labels, strict=True)]
    if series.kind == "histogram":
        ends = [*(str(float(bound)) for bound in series.bounds), "+Inf"]
        heads = [_head(f"{series.name}_bucket", [*pairs, ("le", end)]) for end in ends]
        heads += [_head(f"{series.name}_count", pairs), _head(f"{series.name}_sum", pairs)]
    else:
        heads = [_head(series.name, pairs)]
    return "".join(f"{head.replace('%', '%%')} %s\n" for head in heads)


def _head(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """A sample without its number."""
    text = ",".join(f'{label}="{_escaped(value)}"' for label, value in pairs)
    return f"{name}{{{text}}}" if text else name


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


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
