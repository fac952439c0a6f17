"""The engine: requests in, tokens out, one step at a time."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from jsg.cache.radix import RadixCache
from jsg.cache.states import SLOT_TERMS
from jsg.cache.tree_log import TreeLog
from jsg.config import EngineConfig
from jsg.engine.child.protocol import Call, Failure, ModelInfo, Progress, Refusal
from jsg.engine.device.executables import Executables
from jsg.engine.device.results import InFlight
from jsg.engine.drafter import Drafter
from jsg.engine.gather import Gatherer
from jsg.engine.profile import StepProfiler
from jsg.engine.selfcheck import SelfCheck, check_steps
from jsg.engine.startup import start
from jsg.errors import JsgError, waited_too_long
from jsg.sched.batch import Batch
from jsg.sched.buckets import BucketKey
from jsg.sched.put_off import put_off
from jsg.sched.table import POOL_TERMS
from jsg.types import Request, RequestOutput
from jsg.waits import IN_THE_ENGINE, stat_of

STEPS_PER_FIRST_RUN = 16
"""While requests run, a program that was compiled in the background makes a first run only every so many steps. On a
GPU a run of the largest shape takes as long as twenty steps that decode."""


class EngineCore:
    """An engine for tokens and for one thread. `offline/` puts text around it, and `child/process.py` a socket.

    Raises from its constructor:
        JsgError: The model, the options or the memory do not allow it. The message says what to change.
    """

    def __init__(self, config: EngineConfig, *, report: Callable[[Progress], None] | None = None):
        parts = start(config, report or (lambda progress: None))
        self.info: ModelInfo = parts.info
        self.scheduler = parts.scheduler
        self._cache = parts.cache
        self._tree_log = TreeLog(parts.cache)
        self._runner = parts.runner
        self.grammars = parts.constraints
        self._drafter = Drafter(
            parts.scheduler.gate,
            parts.constraints,
            vocab_size=parts.info.vocab_size,
            eos_token_ids=frozenset(parts.info.eos_token_ids),
            page_size=parts.info.page_size,
            is_on=config.speculative != "off",
            own_layer=parts.runner if parts.runner.has_drafts else None,
        )
        parts.scheduler.gate.is_wanted = config.speculative != "off"
        if parts.runner.has_drafts:
            parts.scheduler.gate.expect_repeats()
        self._decode_steps = parts.decode_steps
        self._in_flight: InFlight | None = None
        self._outputs: list[RequestOutput] = []  # of a step that was committed outside of `step`
        self._num_steps = 0
        self._num_generated = 0
        self._gatherer = Gatherer()
        self._config = config
        self._profiler = None if config.profile_dir is None else StepProfiler(config.profile_dir)

    @property
    def _executables(self) -> Executables:
        return self._runner.programs.executables

    @property
    def has_work(self) -> bool:
        """Whether a step would serve requests, run a program that has just been compiled, or measure one."""
        return self._serves or not self._runner.is_warm or self._unmeasured is not None

    @property
    def _unmeasured(self) -> BucketKey | int | None:
        """A shape whose cost drafts depend on, or rows of such, that can be measured now; None if there is none."""
        gate = self.scheduler.gate
        keys = gate.to_measure if gate.is_wanted else ()
        return next((key for key in keys if self._runner.can_time(key)), None)

    @property
    def is_settled(self) -> bool:
        """Whether all loading and compiling in the background has ended, with or without success."""
        return self.grammars.are_loaded and not self._executables.is_compiling

    @property
    def _serves(self) -> bool:
        """Whether a step would serve requests, or return outputs of an earlier step."""
        return self._in_flight is not None or bool(self._outputs) or not self.scheduler.is_idle

    @property
    def cache(self) -> RadixCache:
        """The prefix cache."""
        return self._cache

    def add(self, request: Request) -> None:
        """Queues a request.

        Raises:
            RequestError: It can never run, its rid is in use, or its grammar is not known.
            QueueFullError: Too many requests wait.
        """
        constraint = self.grammars.prepare(request)
        self.scheduler.add(request, time.monotonic())
        if constraint is not None:
            self.grammars.put(request.rid, constraint)
        self.scheduler.gate.is_wanted |= request.sampling.speculative not in (None, "off")
        if not request.is_streamed:
            self._gatherer.add(request.rid)

    def abort(self, rid: str) -> None:
        """Ends a request and frees its memory. Its last output comes with the next step. Ignores an unknown rid."""
        self.scheduler.abort(rid)

    def step(self) -> list[RequestOutput]:
        """Plans and starts the next step, then takes the results of the step before it.

        The device works on the new step while the host handles the old one. Where a grammar may force text behind the
        next token, or has proposed tokens, the old step is taken first, because the new one depends on it. A program
        that was compiled in the background makes one of its first runs here, if no request runs or now and then.
        """
        try:
            return self._step()
        except Exception:
            self._runner.calls.find_out()
            raise

    def _step(self) -> list[RequestOutput]:
        if not self._serves or self._num_steps % STEPS_PER_FIRST_RUN == 0:
            self._run_idly()
        if self._profiler is not None and self._serves:
            self._profiler.before_step()
        outputs, self._outputs = self._outputs, []
        if self._must_commit_first():
            outputs += self._commit_in_flight()
        max_rows = self._runner.max_draft_rows
        proposals = self._drafter.proposals(self.scheduler.running, max_rows)
        outputs += self._run(self.scheduler.plan(time.monotonic(), proposals, max_rows))
        if self._config.disable_overlap_schedule:
            outputs += self._commit_in_flight()
        outputs += self.scheduler.take_finished()
        self.scheduler.table.check_integrity()  # one that lost count would use pages of other requests
        for output in outputs:
            self._num_generated += len(output.token_ids)
            if self._drafter.has_reports:
                output.drafts = self._drafter.report(output.rid)
            if output.finish is not None:
                self.grammars.forget(output.rid)
                self._drafter.end(output.rid)
        return self._gatherer.gather(outputs)

    def _must_commit_first(self) -> bool:
        flight = self._in_flight
        if flight is None:
            return False
        if flight.batch.has_drafts:
            return True
        return self._drafter.must_know_tokens(self.scheduler.running, self._runner.max_draft_rows)

    def _run_idly(self) -> None:
        """Makes a first run of a program, or measures a step of a shape."""
        self._runner.warm_one()
        if self._runner.is_warm and (key := self._unmeasured) is not None:
            self.scheduler.gate.note(key, self._runner.time_step(key, is_idle=not self._serves))

    def _run(self, batch: Batch | None) -> list[RequestOutput]:
        """Starts a step and commits the one before. Masks need that commit, so they are made before the sampling."""
        if batch is None:
            return self._commit_in_flight()
        self._num_steps += 1
        table = self.scheduler.table
        if not self.grammars.concerns(batch):
            flight = self._runner.dispatch(batch, table)
            outputs = self._commit_in_flight()
        else:
            sample = self._runner.begin(batch, table)
            outputs = self._commit_in_flight()
            masks = self.grammars.mask_rows(batch, self._runner.masks)
            for entry in masks.put_off:
                put_off(entry, table)
            flight = sample(masks.rows)
        self._in_flight = flight
        return outputs

    def _commit_in_flight(self) -> list[RequestOutput]:
        flight = self._in_flight
        if flight is None:
            return []
        result = flight.read()
        self._in_flight = None  # after the read, so that an error of the device is raised by the next step too
        self.grammars.accept(flight.batch, result)
        outputs = self.scheduler.commit(flight.batch, result)
        self._drafter.count(flight.batch)
        return outputs

    def refuse_overdue(self) -> list[Refusal]:
        """Removes the requests that have waited longer than `--queue-timeout` for their first step."""
        limit_s = self._config.queue_timeout
        if limit_s is None:
            return []
        failure = Failure.of(waited_too_long(limit_s))
        expired = self.scheduler.expire(time.monotonic() - limit_s)
        for rid in expired:
            self.grammars.forget(rid)
            self._gatherer.forget(rid)
        return [Refusal(rid, failure) for rid in expired]

    def answer(self, call: Call) -> bool | dict[str, Any]:
        """Answers a question of the front. Raises RequestError for limits out of range."""
        match call.name:
            case "flush_cache":
                return self.flush_cache()
            case "stats":
                return self.stats()
            case "watch_cache":
                return self._tree_log.look(call.cursor, with_tokens=call.with_tokens) | {"pool": self._pool()}

    def flush_cache(self) -> bool:
        """Forgets every cached prefix, even held ones, encoded images, and the outputs that drafts are copied from.

        Returns:
            False, without any change, while requests run or wait.
        """
        if not self._end_stale_step():
            return False
        self.scheduler.break_holds(len(self.scheduler.holds))
        self.scheduler.table.vision.reset()
        self._drafter.flush()
        return self._cache.reset()

    def _end_stale_step(self) -> bool:
        """Whether no request runs or waits. If so, a step that is still in flight serves no request, and ends here."""
        if self.scheduler.num_waiting or self.scheduler.running:
            return False
        try:
            self._outputs += self._commit_in_flight()
        except Exception:
            self._runner.calls.find_out()
            raise
        return True

    def selfcheck(self, budget_s: float) -> SelfCheck:
        """Times decode steps and the best that the device can do, in about `budget_s` seconds.

        Raises:
            JsgError: Requests run or wait.
        """
        if not self._end_stale_step():
            raise JsgError("steps are timed while nothing runs, but requests run or wait; try again later")
        try:
            return check_steps(self._decode_steps, self.info.dtype, budget_s)
        finally:
            table = self.scheduler.table
            self._runner.write_pages(range(1, len(table.pages)), table.pages, table.maps)

    def stats(self) -> dict[str, int | float]:
        """Gauges and totals: see `protocol.CORE_STATS`, and for a model with states `STATE_STATS`."""
        cache, totals = self._cache.stats(), self.scheduler.totals
        return {
            "num_running": len(self.scheduler.running),
            "num_waiting": self.scheduler.num_waiting,
            **{stat_of(reason): self.scheduler.waits.get(reason, 0) for reason in IN_THE_ENGINE},
            "num_holds": len(self.scheduler.holds),
            "num_steps": self._num_steps,
            **dataclasses.asdict(totals),
            "generated_tokens": self._num_generated,
            "cache_hit_rate": totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0,
            "num_cached_tokens": cache.num_cached_tokens,
            "num_inserted_tokens": cache.inserted_tokens,
            "num_evicted_tokens": cache.evicted_tokens,
            **self._pool_stats(),
            **self._state_stats(),
            **self.grammars.stats(self._runner.masks),
            **self._drafter.stats(),
            **self._vision_stats(),
            "num_lowered": self._executables.num_lowered,
            "num_compiled": self._executables.num_compiled,
            "num_loaded": self._executables.num_loaded,
            "num_programs_pending": self._executables.num_pending,
        }

    def _pool_stats(self) -> dict[str, int | float]:
        """How the KV pool is used, in tokens. Pages that only the cache holds can be evicted when they are needed."""
        table, size = self.scheduler.table, self._cache.page_size
        held = self._cache.num_protected + table.num_uncached_pages
        return {
            "num_free_tokens": table.num_free_pages * size,
            "num_evictable_tokens": self._cache.num_evictable * size,
            "num_protected_tokens": self._cache.num_protected * size,
            "num_uncached_tokens": table.num_uncached_pages * size,
            "kv_usage": max([held / table.num_pages, *(group.num_in_use / group.num_total for group in table.windows)]),
        }

    def _state_stats(self) -> dict[str, int]:
        """How the slots of states are used; nothing if the model has none."""
        if (slots := self.scheduler.table.slots) is None:
            return {}
        terms = {f"num_{term}_states": count for term, count in zip(SLOT_TERMS, slots.counts, strict=True)}
        return {**terms, "num_kept_states": slots.num_kept, "num_forgotten_states": slots.num_forgotten}

    def _pool(self) -> dict[str, Any]:
        """The equation that `RowTable.check_integrity` asserts, in tokens: the terms and their sum."""
        table, size = self.scheduler.table, self._cache.page_size
        terms = {term: pages * size for term, pages in zip(POOL_TERMS, table.page_counts, strict=True)}
        return {"total": table.num_pages * size, **terms, "terms": POOL_TERMS}

    def _vision_stats(self) -> dict[str, int]:
        vision = self.scheduler.table.vision
        return {
            "num_encoder_calls": self._runner.num_encoder_calls,
            "num_encoded_tiles": vision.num_encoded,
            "num_found_images": vision.num_found,
            "num_evicted_images": vision.num_evicted,
            "vision_bytes": vision.num_used_rows * self._runner.vision_row_bytes,
        }

    def close(self, *, waits: bool = True) -> None:
        """Ends background work and frees the device. Forgets requests that still run.

        Args:
            waits: Whether it waits for threads that load or compile. If it does not, the process must end at once,
                because Python's own end would abort while they run.
        """
        self._in_flight = None
        if self._profiler is not None:
            self._profiler.close()
        self.grammars.close(waits=waits)
        self._runner.calls.close()
        self._executables.close(waits=waits)
