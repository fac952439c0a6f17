"""The engine's own counters as Prometheus families. A scrape asks for them, and never waits long.

Several engines are all asked, and their values are added up under the same names as those of one engine. A total keeps
the values of an engine that has ended, because totals never fall. A gauge adds up the engines that live.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

from prometheus_client.metrics_core import Metric

from jsg.engine.front.client import EngineClient
from jsg.engine.front.served import ServedEngine
from jsg.errors import JsgError
from jsg.server.telemetry.series import Kind, Series

ANSWER_TIMEOUT_S = 1.0

Stats = Mapping[str, int | float]

UP = Series(
    "jsg:engine_up",
    "gauge",
    "1 while at least one engine works; 0 while it loads or stalls, and after it has ended.",
)
STATS_AGE = Series(
    "jsg:engine_stats_age_seconds",
    "gauge",
    f"The age of the engine's values. More than {ANSWER_TIMEOUT_S:g} means that the engine is busy or stopped.",
)
ENGINES = Series("jsg:engines", "gauge", "The number of engines that the server was started with (--dp-size).")
ENGINES_UP = Series("jsg:engines_up", "gauge", "The number of engines that work.")
CAPACITY = Series("jsg:kv_capacity_tokens", "gauge", "The size of the KV pool in tokens.")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSeries:
    """One metric of the engine, and where in its `stats()` the values are.

    Attributes:
        series: What is scraped.
        keys: Label values → the keys in `stats()` whose sum is the value.
    """

    series: Series
    keys: Mapping[tuple[str, ...], tuple[str, ...]]

    def family(self, stats: Stats) -> Metric | None:
        """The family as it is scraped; None where the engine does not give the values."""
        if not all(key in stats for keys in self.keys.values() for key in keys):
            return None
        return self.series.family({labels: sum(stats[key] for key in keys) for labels, keys in self.keys.items()})


def _plain(name: str, kind: Kind, text: str, *keys: str) -> EngineSeries:
    return EngineSeries(Series(name, kind, text), {(): keys})


ENGINE_SERIES = (
    _plain("jsg:requests_running", "gauge", "The requests in the engine's batch.", "num_running"),
    _plain("jsg:requests_waiting", "gauge", "The requests that wait for their first step.", "num_waiting"),
    _plain("jsg:holds", "gauge", "The holds, which keep prompts in the cache for requests to come.", "num_holds"),
    _plain(
        "jsg:holds_broken_total", "counter", "The holds that ended because their memory was needed.", "num_holds_broken"
    ),
    _plain(
        "jsg:retracts_total",
        "counter",
        "The retracts: running requests that went back to the queue for want of memory.",
        "num_retracts",
    ),
    _plain("jsg:grammars", "gauge", "The grammars whose tables the engine has.", "num_grammars"),
    _plain(
        "jsg:grammar_bytes",
        "gauge",
        "The approximate memory of all grammars, cached ones and those of requests.",
        "grammar_bytes",
    ),
    _plain(
        "jsg:grammar_failures_total",
        "counter",
        "The requests that failed because of their grammar.",
        "num_grammar_failures",
    ),
    _plain("jsg:token_masks", "gauge", "The token masks on the device.", "num_masks"),
    _plain("jsg:token_masks_made_total", "counter", "The token masks that were sent to the device.", "num_masks_made"),
    _plain(
        "jsg:token_masks_found_total",
        "counter",
        "The token masks that were on the device already when they were needed.",
        "num_masks_found",
    ),
    _plain("jsg:draft_tokens_total", "counter", "The draft tokens that jump-forward proposed.", "num_drafts"),
    _plain("jsg:draft_tokens_taken_total", "counter", "The draft tokens that became output.", "num_drafts_taken"),
    _plain("jsg:encoder_calls_total", "counter", "The calls of the vision encoder.", "num_encoder_calls"),
    _plain(
        "jsg:encoded_tiles_total",
        "counter",
        "The tiles of images and frames of videos that the vision encoder encoded.",
        "num_encoded_tiles",
    ),
    _plain(
        "jsg:encoded_images_found_total",
        "counter",
        "The images and videos of prompts whose encoded tiles were on the device already.",
        "num_found_images",
    ),
    _plain(
        "jsg:encoded_images_evicted_total",
        "counter",
        "The images and videos whose encoded tiles were evicted for others.",
        "num_evicted_images",
    ),
    _plain("jsg:vision_cache_bytes", "gauge", "The device memory of encoded images and videos.", "vision_bytes"),
    EngineSeries(
        Series("jsg:kv_tokens", "gauge", "The tokens of the KV pool, by their state.", ("state",)),
        {
            ("free",): ("num_free_tokens",),
            ("evictable",): ("num_evictable_tokens",),
            ("protected",): ("num_protected_tokens",),
            ("uncached",): ("num_uncached_tokens",),
        },
    ),
    _plain(
        "jsg:kv_used_tokens",
        "gauge",
        "The tokens of the KV pool that running requests use. Tokens that only the cache keeps can be evicted.",
        "num_protected_tokens",
        "num_uncached_tokens",
    ),
    _plain("jsg:kv_usage", "gauge", "The share of the KV pool that running requests use, from 0 to 1.", "kv_usage"),
    _plain("jsg:prefix_cache_tokens", "gauge", "The tokens in the prefix cache.", "num_cached_tokens"),
    _plain(
        "jsg:inserted_tokens_total", "counter", "The tokens that were put into the prefix cache.", "num_inserted_tokens"
    ),
    _plain(
        "jsg:evicted_tokens_total",
        "counter",
        "The tokens that were evicted from the prefix cache.",
        "num_evicted_tokens",
    ),
    _plain(
        "jsg:cache_hit_rate",
        "gauge",
        "The share of all prompt tokens that came from the cache, from 0 to 1.",
        "cache_hit_rate",
    ),
    _plain(
        "jsg:engine_prompt_tokens_total",
        "counter",
        "The prompt tokens of admitted requests. The n answers to a prompt are n requests.",
        "prompt_tokens",
    ),
    _plain(
        "jsg:engine_cached_tokens_total",
        "counter",
        "The prompt tokens of admitted requests that came from the cache.",
        "cached_tokens",
    ),
    _plain(
        "jsg:engine_generated_tokens_total",
        "counter",
        "The tokens that the engine generated, with those after a stop string or a disconnect.",
        "generated_tokens",
    ),
    _plain("jsg:engine_steps_total", "counter", "The steps of the engine.", "num_steps"),
    _plain("jsg:scheduler_idle_seconds_total", "counter", "The seconds in which the step loop had no work.", "idle_s"),
    _plain("jsg:scheduler_busy_seconds_total", "counter", "The seconds in which the step loop had work.", "busy_s"),
    _plain("jsg:programs_lowered_total", "counter", "The programs that were traced.", "num_lowered"),
    _plain("jsg:programs_compiled_total", "counter", "The programs that were compiled.", "num_compiled"),
    _plain("jsg:programs_pending", "gauge", "The programs that are still to be compiled.", "num_programs_pending"),
)

_ENGINE = ("engine",)
DP_UP = Series("jsg:dp_up", "gauge", "1 while this engine works, and 0 otherwise.", _ENGINE)
DP_ROUTED = Series(
    "jsg:dp_routed_total",
    "counter",
    "The requests that this engine has begun, by the reason for its choice: it has most of the prompt in its cache "
    "(prefix), no engine has any of it (load), or an engine that has more of it is overloaded (overload).",
    (*_ENGINE, "reason"),
)


def _of_each(name: str, kind: Kind, text: str, key: str) -> tuple[Series, str]:
    return Series(f"jsg:dp_{name}", kind, f"{text}, for this engine.", _ENGINE), key


DP_SERIES = (
    _of_each("requests_running", "gauge", "The requests in the batch", "num_running"),
    _of_each("requests_waiting", "gauge", "The requests that wait for their first step", "num_waiting"),
    _of_each("kv_usage", "gauge", "The share of the KV pool that running requests use", "kv_usage"),
    _of_each("cache_hit_rate", "gauge", "The share of all prompt tokens that came from the cache", "cache_hit_rate"),
    _of_each("prompt_tokens_total", "counter", "The prompt tokens of admitted requests", "prompt_tokens"),
    _of_each("cached_tokens_total", "counter", "The prompt tokens that came from the cache", "cached_tokens"),
    _of_each("generated_tokens_total", "counter", "The tokens that were generated", "generated_tokens"),
)
"""What is scraped of each of several engines, and where in its `stats()` it is."""

ALL_SERIES = (
    *(UP, ENGINES, ENGINES_UP, CAPACITY, STATS_AGE),
    *(engine_series.series for engine_series in ENGINE_SERIES),
    *(DP_UP, DP_ROUTED, *(series for series, _ in DP_SERIES)),
)
_GAUGES = {
    key
    for engine_series in ENGINE_SERIES
    if engine_series.series.kind == "gauge"
    for keys in engine_series.keys.values()
    for key in keys
}


@final
class _Told:
    """The last `stats()` of one engine.

    At most one question is under way, however many scrapes want an answer and however long the engine takes.
    """

    def __init__(self, engine: EngineClient, now: Callable[[], float]) -> None:
        self.engine = engine
        self.stats: Stats | None = None
        self._now = now
        self._told_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    @property
    def works(self) -> bool:
        """Whether the engine process lives and gives signs of life."""
        return self.engine.is_alive and not self.engine.is_stalled

    @property
    def age_s(self) -> float:
        """Seconds since the engine answered; only valid where it has answered."""
        return self._now() - self._told_at

    def ask(self) -> asyncio.Task[None]:
        """Asks the engine, unless a question is under way. The task ends when there is an answer or a failure."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        return self._asking

    async def _ask(self) -> None:
        try:
            self.stats = await self.engine.stats()
        except JsgError:
            return  # the engine has ended or could not answer, so its last answer gets older
        self._told_at = self._now()


@final
class EngineStats:
    """The last known values of the engines."""

    def __init__(self, client: ServedEngine, now: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known before the first `refresh`."""
        self._client = client
        self._each = [_Told(engine, now) for engine in client.engines]

    async def refresh(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Asks the engines, or waits for the answers to an earlier question, for `timeout_s` at most."""
        await asyncio.wait([told.ask() for told in self._each], timeout=timeout_s)

    def families(self) -> Iterator[Metric]:
        """The families of the engines, as they are scraped."""
        yield UP.family({(): int(self._client.is_alive and not self._client.is_stalled)})
        yield ENGINES.family({(): len(self._each)})
        yield ENGINES_UP.family({(): sum(told.works for told in self._each)})
        living = [told for told in self._each if told.engine.is_alive] or self._each
        yield CAPACITY.family({(): sum(told.engine.info.max_total_tokens for told in living)})
        if len(self._each) > 1:
            yield from self._families_of_each()
        if all(told.stats is None for told in self._each):
            return
        if ages := [told.age_s for told in living if told.stats is not None]:
            yield STATS_AGE.family({(): max(ages)})
        stats = _joined(self._each)
        for series in ENGINE_SERIES:
            family = series.family(stats)
            if family is not None:
                yield family

    def _families_of_each(self) -> Iterator[Metric]:
        """The families that are labelled with the number of the engine."""
        yield DP_UP.family({(str(number),): int(told.works) for number, told in enumerate(self._each)})
        routed = self._client.routed.items()
        yield DP_ROUTED.family({(str(number), reason): count for (number, reason), count in routed})
        for series, key in DP_SERIES:
            values = {}
            for number, told in enumerate(self._each):
                if told.stats is not None and key in told.stats and (told.engine.is_alive or series.kind == "counter"):
                    values[str(number),] = told.stats[key]
            yield series.family(values)


def _joined(each: Sequence[_Told]) -> Stats:
    """The values of all engines together, under the names of one."""
    if len(each) == 1:
        return each[0].stats or {}
    joined: dict[str, int | float] = {}
    for told in each:
        for key, value in (told.stats or {}).items():
            joined[key] = joined.get(key, 0) + (value if told.engine.is_alive or key not in _GAUGES else 0)
    held = joined.get("num_protected_tokens", 0) + joined.get("num_uncached_tokens", 0)
    size = held + joined.get("num_free_tokens", 0) + joined.get("num_evictable_tokens", 0)
    prompt_tokens = joined.get("prompt_tokens", 0)
    joined["kv_usage"] = held / size if size else 0.0
    joined["cache_hit_rate"] = joined.get("cached_tokens", 0) / prompt_tokens if prompt_tokens else 0.0
    return joined
