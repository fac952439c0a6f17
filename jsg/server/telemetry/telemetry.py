"""Everything that watches a server. This module opens, shows and closes it."""

import asyncio
import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Protocol, final, get_args

from starlette.routing import BaseRoute

from jsg.config import ServerConfig
from jsg.server.caller import CurrentCall
from jsg.server.front import FrontDoor
from jsg.server.observer import Observer
from jsg.server.telemetry.aliases import AliasFamilies
from jsg.server.telemetry.engine_stats import ALL_SERIES, UP, EngineStats
from jsg.server.telemetry.exchange import EndpointTable, Exchange, ExchangeObserver, WatchExchanges
from jsg.server.telemetry.exposition import encoded, prefers_openmetrics
from jsg.server.telemetry.metrics import WORKERS_UP, Metrics
from jsg.server.telemetry.request_log import RequestLog
from jsg.server.telemetry.series import Family, Samples, summed
from jsg.server.telemetry.tracing import SpanExport
from jsg.server.telemetry.wait_log import WaitLog
from jsg.waits import WaitReason

TICK_S = 0.1
TICKS_PER_SAMPLE = 10
SCRAPE_AGE_S = 0.1


class Workers(Protocol):
    """The workers of a hub, as far as they have something to tell: see `jsg.server.workers.pool`."""

    @property
    def num_up(self) -> int:
        """How many take connections."""
        ...

    @property
    def waits(self) -> Counter[WaitReason]:
        """How many HTTP requests wait in them."""
        ...

    @property
    def families(self) -> Iterable[Mapping[str, Samples]]:
        """What each has counted: see `Telemetry.counted`."""
        ...

    async def refresh(self) -> None:
        """Asks them."""
        ...


@final
class Telemetry:
    """The metrics of a server, and where asked for its request log and its traces.

    Attributes:
        observers: They observe each generation.
        exchange_observers: They observe each HTTP request.
    """

    def __init__(self, config: ServerConfig, model_name: str = "", *, started_at: float | None = None) -> None:
        """Opens metrics, and the log and the traces that the options ask for.

        Args:
            config: The options.
            model_name: What the series call the model.
            started_at: `time.monotonic()` at the start of the program; None for this moment.

        Raises:
            ConfigError: As in `SpanExport`.
        """
        endpoint = config.otlp_traces_endpoint
        self.metrics = Metrics(started_at=started_at)
        self._model_name = model_name
        self._aliases: AliasFamilies | None = None
        if config.metrics_alias is not None:
            self._aliases = AliasFamilies(config.metrics_alias, model_name, (*self.metrics.series(), *ALL_SERIES))
        self._waits = Counter[WaitReason]()
        self._workers: Workers | None = None
        self._engine: EngineStats | None = None
        self._bodies: dict[bool, tuple[float, tuple[bytes, str]]] = {}
        self._spans = None if endpoint is None else SpanExport.open(endpoint, model_name)
        self._log = RequestLog(config.log_format, model_name) if config.log_requests else None
        self.observers: Sequence[Observer] = (self.metrics,)
        watching = (self.metrics, self._spans, self._log, WaitLog())  # spans before the log, which names the trace
        self.exchange_observers: Sequence[ExchangeObserver] = tuple(one for one in watching if one is not None)

    @property
    def waits(self) -> Counter[WaitReason]:
        """How many HTTP requests wait in the processes that answer them, by the reason."""
        return self._waits if self._workers is None else self._waits + self._workers.waits

    def add_workers(self, workers: Workers) -> None:
        """From now on what is scraped has what workers count too."""
        self._workers = workers

    def counted(self) -> dict[str, Samples]:
        """What other processes have counted too, by the name of the series."""
        return {family.series.name: family.samples for family in self.metrics.summable()}

    def watch(self, routes: Iterable[BaseRoute]) -> WatchExchanges:
        """What watches the requests to an app that has these routes."""
        endpoints = EndpointTable(routes, get_args(CurrentCall)[1].dependency)
        self.metrics.expect(endpoint.route for endpoint in endpoints if endpoint.generates)
        return WatchExchanges(endpoints, self.exchange_observers, self._waits)

    def on_refusal(self, state: dict[str, Any]) -> None:
        """Logs a request that was refused before its head was read. It is not counted, because it has no path."""
        if self._log is not None:
            self._log.on_exchange(Exchange.unread(state))

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Watches the event loop in the block. At its end, writes the rest of log and traces within a time limit."""
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            for sink in (self._spans, self._log):
                if sink is not None:
                    await sink.close()

    async def scrape(self, door: FrontDoor, accept: str, *, anew: bool = False) -> tuple[bytes, str]:
        """The body of `/metrics` and its media type, in the format that `accept` asks for.

        Scrapes within `SCRAPE_AGE_S` of another one get its body, unless it must be made anew: some routers scrape 20
        times a second.
        """
        as_openmetrics = prefers_openmetrics(accept)
        made_at, body = self._bodies.get(as_openmetrics, (-math.inf, None))
        if body is not None and not anew and time.monotonic() - made_at < SCRAPE_AGE_S:
            return body
        if door.front is not None:
            if self._engine is None:
                self._engine = EngineStats(door.front.client, lambda: self.waits)
            await self._engine.refresh()
        if self._workers is not None:
            await self._workers.refresh()
        body = encoded(self.families(door.status), as_openmetrics=as_openmetrics)
        self._bodies[as_openmetrics] = time.monotonic(), body
        return body

    def families(self, status: str = "loading") -> list[Family]:
        """All families with their present values. `status` is that of the `FrontDoor`."""
        own = [*self.metrics.families(self._model_name, status)]
        if self._workers is not None:
            sums = summed([self.counted(), *self._workers.families])
            own = [Family(each.series, sums.get(each.series.name, each.samples)) for each in own]
            own.append(WORKERS_UP.family({(): self._workers.num_up}))
        own += [UP.family({(): 0})] if self._engine is None else self._engine.families()
        return own if self._aliases is None else [*own, *self._aliases.of(own)]

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        for count in itertools.count():
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.metrics.loop_lag.observe(max(loop.time() - due, 0.0))
            if count % TICKS_PER_SAMPLE == 0:
                self.metrics.sample_rate()
