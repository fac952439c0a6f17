"""The engine's own counters, as Prometheus families: asked for at each scrape, never waited for long."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import final

from prometheus_client.metrics_core import Metric

from jsg.engine.client import EngineClient
from jsg.errors import JsgError
from jsg.server.telemetry.series import Kind, Series

ANSWER_TIMEOUT_S = 1.0

Stats = Mapping[str, int | float]

UP = Series("jsg:engine_up", "gauge", "1 while the engine process works; 0 while it loads or stalls and when it ended.")
STATS_AGE = Series(
    "jsg:engine_stats_age_seconds",
    "gauge",
    f"How old the engine's values are: more than {ANSWER_TIMEOUT_S:g} when it is busy or stopped.",
)
CAPACITY = Series("jsg:kv_capacity_tokens", "gauge", "Tokens that the KV pool holds.")


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSeries:
    """One metric of the engine, and where in its `stats()` the values are.

    Attributes:
        series: What is scraped.
        keys: For each combination of label values, the keys whose sum it is.
    """

    series: Series
    keys: Mapping[tuple[str, ...], tuple[str, ...]]

    def family(self, stats: Stats) -> Metric | None:
        """What is scraped of it; None where the engine does not tell."""
        if not all(key in stats for keys in self.keys.values() for key in keys):
            return None
        return self.series.family({labels: sum(stats[key] for key in keys) for labels, keys in self.keys.items()})


def _plain(name: str, kind: Kind, text: str, *keys: str) -> EngineSeries:
    return EngineSeries(Series(name, kind, text), {(): keys})


ENGINE_SERIES = (
    _plain("jsg:requests_running", "gauge", "Requests in the engine's batch.", "num_running"),
    _plain("jsg:requests_waiting", "gauge", "Requests that wait for their first step.", "num_waiting"),
    _plain("jsg:holds", "gauge", "Prompts that are held in the cache for requests to come.", "num_holds"),
    _plain(
        "jsg:holds_broken_total", "counter", "Holds that ended because their memory was needed.", "num_holds_broken"
    ),
    _plain("jsg:retracts_total", "counter", "Times a running request went back for want of memory.", "num_retracts"),
    _plain("jsg:grammars", "gauge", "Grammars that the engine has tables of.", "num_grammars"),
    _plain(
        "jsg:grammar_bytes",
        "gauge",
        "Memory of the grammars that are known or that requests have, about.",
        "grammar_bytes",
    ),
    _plain("jsg:grammar_failures_total", "counter", "Requests that failed by their grammar.", "num_grammar_failures"),
    _plain("jsg:token_masks", "gauge", "Token masks on the device.", "num_masks"),
    _plain("jsg:token_masks_made_total", "counter", "Token masks that were sent to the device.", "num_masks_made"),
    _plain("jsg:token_masks_found_total", "counter", "Times a token mask was there already.", "num_masks_found"),
    _plain("jsg:draft_tokens_total", "counter", "Tokens that jump-forward proposed.", "num_drafts"),
    _plain("jsg:draft_tokens_taken_total", "counter", "Those that became output.", "num_drafts_taken"),
    _plain("jsg:encoder_calls_total", "counter", "Times that the vision encoder ran.", "num_encoder_calls"),
    _plain(
        "jsg:encoded_tiles_total",
        "counter",
        "Tiles of images and frames of videos that the vision encoder took, several at a time.",
        "num_encoded_tiles",
    ),
    _plain(
        "jsg:encoded_images_found_total",
        "counter",
        "Times that a prompt came to an image or a video whose encoded tiles were there.",
        "num_found_images",
    ),
    _plain(
        "jsg:encoded_images_evicted_total",
        "counter",
        "Images and videos whose encoded tiles were dropped for others.",
        "num_evicted_images",
    ),
    _plain("jsg:vision_cache_bytes", "gauge", "Memory of the device that encoded images have.", "vision_bytes"),
    EngineSeries(
        Series("jsg:kv_tokens", "gauge", "Tokens of the KV pool, by what holds them.", ("state",)),
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
        "Tokens of the KV pool that running requests hold; those that only the cache holds can be evicted.",
        "num_protected_tokens",
        "num_uncached_tokens",
    ),
    _plain("jsg:kv_usage", "gauge", "Part of the KV pool that running requests hold, from 0 to 1.", "kv_usage"),
    _plain("jsg:prefix_cache_tokens", "gauge", "Tokens in the prefix cache.", "num_cached_tokens"),
    _plain(
        "jsg:inserted_tokens_total", "counter", "Tokens that were put into the prefix cache.", "num_inserted_tokens"
    ),
    _plain(
        "jsg:evicted_tokens_total", "counter", "Tokens that were evicted from the prefix cache.", "num_evicted_tokens"
    ),
    _plain("jsg:cache_hit_rate", "gauge", "Part of all prompt tokens that came from the cache.", "cache_hit_rate"),
    _plain(
        "jsg:engine_prompt_tokens_total",
        "counter",
        "Prompt tokens of admitted requests; the n answers to a prompt are n requests.",
        "prompt_tokens",
    ),
    _plain(
        "jsg:engine_cached_tokens_total",
        "counter",
        "Prompt tokens of admitted requests that came from the cache.",
        "cached_tokens",
    ),
    _plain(
        "jsg:engine_generated_tokens_total",
        "counter",
        "Tokens that the engine made, those after a stop string or a disconnect too.",
        "generated_tokens",
    ),
    _plain("jsg:engine_steps_total", "counter", "Steps of the engine.", "num_steps"),
    _plain("jsg:scheduler_idle_seconds_total", "counter", "Seconds in which the step loop had no work.", "idle_s"),
    _plain("jsg:scheduler_busy_seconds_total", "counter", "Seconds in which the step loop had work.", "busy_s"),
    _plain("jsg:programs_lowered_total", "counter", "Programs that were traced.", "num_lowered"),
    _plain("jsg:programs_compiled_total", "counter", "Programs that were compiled.", "num_compiled"),
    _plain("jsg:programs_pending", "gauge", "Programs still to be compiled.", "num_programs_pending"),
)

ALL_SERIES = (UP, CAPACITY, STATS_AGE, *(engine_series.series for engine_series in ENGINE_SERIES))


@final
class EngineStats:
    """The engine's values as it told them last.

    At most one question is under way, however many scrapes want an answer and however long the engine takes.
    """

    def __init__(self, client: EngineClient, now: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known before the first `refresh`."""
        self._client = client
        self._now = now
        self._stats: Stats | None = None
        self._told_at = 0.0
        self._asking: asyncio.Task[None] | None = None

    async def refresh(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Asks the engine, or waits for the answer that somebody else has asked for; no longer than `timeout_s`."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait({self._asking}, timeout=timeout_s)

    def families(self) -> Iterator[Metric]:
        """What is scraped of the engine."""
        yield UP.family({(): int(self._client.is_alive and not self._client.is_stalled)})
        yield CAPACITY.family({(): self._client.info.max_total_tokens})
        if self._stats is None:
            return
        yield STATS_AGE.family({(): self._now() - self._told_at})
        for series in ENGINE_SERIES:
            family = series.family(self._stats)
            if family is not None:
                yield family

    async def _ask(self) -> None:
        try:
            self._stats = await self._client.stats()
        except JsgError:
            return  # it has ended, or could not tell: what it told last gets older
        self._told_at = self._now()
