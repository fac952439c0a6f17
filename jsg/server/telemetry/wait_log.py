"""A line in the log for a request that waited long, with what it waited for."""

import logging
import math
import time
from collections.abc import Callable
from typing import final

from jsg.server.telemetry.exchange import Exchange
from jsg.waits import by_name

logger = logging.getLogger(__name__)

LONG_S = 10.0
"""A request that waited longer has a line."""
SECONDS_PER_LINE = 10.0
"""At most one line comes in this time, however many requests wait."""


@final
class WaitLog:
    """An `ExchangeObserver` that logs the requests that waited for longer than `LONG_S` before their first step."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._logged_at = -math.inf
        self._num_others = 0

    def on_exchange(self, exchange: Exchange) -> None:
        """Logs a request that waited long, or counts it for the next line."""
        if exchange.ended_at - exchange.started_at <= LONG_S:
            return
        waited = exchange.waited
        total_s, has_begun = sum(waited.values()), any(answer.elapsed_s > 0 for answer in exchange.answers)
        if exchange.answers and not has_begun and exchange.begun_at is not None:
            total_s += exchange.ended_at - exchange.begun_at  # the engine has not told for what
        if total_s <= LONG_S:
            return
        if self._now() - self._logged_at < SECONDS_PER_LINE:
            self._num_others += 1
            return
        reasons = ", ".join(f"{reason} {seconds:.1f} s" for reason, seconds in by_name(waited).items())
        others = f"; {self._num_others} others since the last such line" if self._num_others else ""
        logger.warning(
            "request %s to %s waited for %.1f s%s%s%s",
            exchange.state.get("request_id"),
            exchange.endpoint.route,
            total_s,
            "" if not exchange.answers or has_begun else " and had no first step",
            f": {reasons}" if reasons else "",
            others,
        )
        self._logged_at, self._num_others = self._now(), 0
