"""The engine: requests in, tokens out, one step at a time."""

import time
from collections.abc import Callable

from jsg.config import EngineConfig
from jsg.engine.protocol import ModelInfo, Progress
from jsg.engine.results import InFlight
from jsg.engine.startup import start
from jsg.types import Request, RequestOutput


class EngineCore:
    """Tokens only, one thread only; `offline.py` and `process.py` put text and sockets around it.

    Raises from its constructor:
        JsgError: The model, the knobs or the memory do not allow it; the message says what to change.
    """

    def __init__(self, config: EngineConfig, *, report: Callable[[Progress], None] | None = None):
        parts = start(config, report or (lambda progress: None))
        self.info: ModelInfo = parts.info
        self.scheduler = parts.scheduler
        self._cache = parts.cache
        self._runner = parts.runner
        self._executables = parts.executables
        self._overlaps = not config.disable_overlap_schedule
        self._in_flight: InFlight | None = None
        self._num_steps = 0
        self._totals = {"prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0}

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self._in_flight is not None or not self.scheduler.is_idle

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: It can never run, or its rid is in use.
            QueueFullError: Too many wait.
        """
        self.scheduler.add(request, time.monotonic())

    def abort(self, rid: str) -> None:
        """Ends a request and frees what it holds; its last output comes with the next step. Ignores an unknown rid."""
        self.scheduler.abort(rid)

    def step(self) -> list[RequestOutput]:
        """Plans and starts the next step, then takes the results of the one before it.

        The device works on the new step while the host handles the old one.
        """
        batch = self.scheduler.plan(time.monotonic())
        before, self._in_flight = self._in_flight, None
        if batch is not None:
            self._in_flight = self._runner.dispatch(batch, self.scheduler.table)
            self._num_steps += 1
        outputs = self._commit(before)
        if not self._overlaps:
            now, self._in_flight = self._in_flight, None
            outputs += self._commit(now)
        outputs += self.scheduler.take_finished()
        self.scheduler.table.check_integrity()  # better no answer than one from another request's pages
        self._count(outputs)
        return outputs

    def _commit(self, flight: InFlight | None) -> list[RequestOutput]:
        return [] if flight is None else self.scheduler.commit(flight.batch, flight.read())

    def flush_cache(self) -> bool:
        """Forgets every cached prefix; False, and no change, while requests run or wait."""
        return not self.has_work and self._cache.reset()

    def stats(self) -> dict[str, int | float]:
        """Gauges and totals, for `/get_server_info`."""
        cache = self._cache.stats()
        prompt = self._totals["prompt_tokens"]
        return {
            "num_running": len(self.scheduler.running),
            "num_waiting": len(self.scheduler.waiting),
            "num_steps": self._num_steps,
            "num_retracts": self.scheduler.num_retracts,
            "num_lowered": self._executables.num_lowered,
            "num_compiled": self._executables.num_compiled,
            "num_programs_pending": self._executables.num_pending,
            "num_cached_tokens": cache.num_cached_tokens,
            "num_evicted_tokens": cache.evicted_tokens,
            "cache_hit_rate": self._totals["cached_tokens"] / prompt if prompt else 0.0,
            **self._totals,
        }

    def _count(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self._totals["generated_tokens"] += len(output.token_ids)
            if output.finish is not None:
                self._totals["prompt_tokens"] += output.prompt_tokens
                self._totals["cached_tokens"] += output.cached_tokens

    def check_integrity(self) -> None:
        """Asserts the invariants of scheduler, cache and allocator; for tests."""
        self.scheduler.check_integrity()
        self._cache.check_integrity()

    def close(self) -> None:
        """Ends background work. Requests that still run are forgotten."""
        self._in_flight = None
        self._executables.close()
