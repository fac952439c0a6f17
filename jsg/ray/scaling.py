"""How many replicas autoscaling asks for. It needs no Ray."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, final

WAITING = "waiting"
KV_USAGE = "kv_usage"
Scrape = Mapping[str, float]


def load_of(scrape: Scrape) -> dict[str, float]:
    """What a replica tells of its load, from its metrics."""
    return {WAITING: scrape["jsg:requests_waiting"], KV_USAGE: scrape["jsg:kv_usage"]}


def parse_scrape(text: str) -> dict[str, float]:
    """Metrics without labels → their values; of `jsg:cache_info` the size of a page."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("jsg:cache_info{"):
            values["page_size"] = float(name.split('page_size="')[1].split('"')[0])
        elif name.startswith("jsg:") and "{" not in name:
            values[name] = float(value)
    return values


@final
class LoadPolicy:
    """Serve's policy: one more replica for every so many waiting requests, and the KV pools used to a share.

    Serve applies the bounds, and waits before it changes the number.
    """

    def __init__(self, waiting: float, kv_usage: float) -> None:
        """Takes the waiting requests that one more replica is for, and the share."""
        self._waiting = waiting
        self._kv_usage = kv_usage

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The number for a state of the deployment, and no state of its own."""
        told = context.aggregated_metrics or {}
        waiting, usage = told.get(WAITING, {}).values(), told.get(KV_USAGE, {}).values()
        return self.wanted(context.current_num_replicas, waiting, usage), {}

    def wanted(self, num_replicas: int, waiting: Iterable[float], kv_usage: Iterable[float]) -> int:
        """The number of replicas for what they tell; the present one where they tell nothing."""
        usages = list(kv_usage)
        if not usages:
            return num_replicas
        num_waiting = sum(waiting)
        for_waiting = num_replicas + math.ceil(num_waiting / self._waiting) if num_waiting else 0
        return max(for_waiting, math.ceil(sum(usages) / self._kv_usage), 1)
