"""The engine's own counters as Prometheus families. A scrape asks for them, and never waits long.

Several engines are all asked, and their values are added up under the same names as those of one engine. A total keeps
the values of an engine that has ended, because totals never fall. A gauge adds up the engines that live.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

from jsg.cache.block_events import block_tokens_of
from jsg.cache.states import SLOT_TERMS
from jsg.engine.child.protocol import CORE_STATS, LOOP_STATS, STATE_STATS, ModelInfo
from jsg.engine.front.client import EngineClient
from jsg.engine.front.served import ServedEngine
from jsg.errors import JsgError
from jsg.server.telemetry.series import Family, Kind, Series
from jsg.step_reports import Source
from jsg.waits import WaitReason, stat_of

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
CACHE_INFO = Series(
    "jsg:cache_info",
    "gauge",
    "Always 1. The labels say how the pool of an engine is divided: into pages, and for routers into blocks.",
    ("page_size", "num_pages", "block_size", "num_blocks"),
)

WAITING = Series(
    "jsg:waiting_requests",
    "gauge",
    "The requests that wait, by what they wait for. Before they have answers to wait for, HTTP requests count.",
    ("reason",),
)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSeries:
    """One metric of the engine, and where in its `stats()` the values are.

    Attributes:
        series: What is scraped.
        keys: Label values → the keys in `stats()` whose sum is the value.
    """

    series: Series
    keys: Mapping[tuple[str, ...], tuple[str, ...]]

    def family(self, stats: Stats) -> Family | None:
        """The family as it is scraped; None where the engine does not give the values."""
        if not all(key in stats for keys in self.keys.values() for key in keys):
            return None
        return self.series.family({labels: sum(stats[key] for key in keys) for labels, keys in self.keys.items()})


_STATS = {**CORE_STATS, **STATE_STATS, **LOOP_STATS}
_POOL_KEYS = tuple(f"num_{state}_tokens" for state in ("free", "evictable", "protected", "uncached"))
_GAUGES = {key for key, stat in _STATS.items() if stat.kind == "gauge"} | {stat_of(reason) for reason in WaitReason}


def _name(series: str, kind: Kind) -> str:
    return f"jsg:{series}_total" if kind == "counter" else f"jsg:{series}"


ENGINE_SERIES = (
    EngineSeries(
        Series("jsg:kv_tokens", "gauge", "The tokens of the KV pool, by their state.", ("state",)),
        {(key.removeprefix("num_").removesuffix("_tokens"),): (key,) for key in _POOL_KEYS},
    ),
    EngineSeries(
        Series("jsg:state_slots", "gauge", "The slots of states of a hybrid model, by their use.", ("use",)),
        {(use,): (f"num_{use}_states",) for use in SLOT_TERMS},
    ),
    EngineSeries(
        Series(
            "jsg:draft_tokens_total", "counter", "The draft tokens that steps verified, by their source.", ("source",)
        ),
        {(source.label,): (f"num_drafts_{source.label}",) for source in Source},
    ),
    EngineSeries(
        Series(
            "jsg:draft_tokens_taken_total",
            "counter",
            "The draft tokens that became output, by their source. Each saved its request a step.",
            ("source",),
        ),
        {(source.label,): (f"num_drafts_taken_{source.label}",) for source in Source},
    ),
    EngineSeries(
        Series(
            "jsg:kv_used_tokens",
            "gauge",
            "The tokens of the KV pool that running requests use. Tokens that only the cache keeps can be evicted.",
        ),
        {(): ("num_protected_tokens", "num_uncached_tokens")},
    ),
    *(
        EngineSeries(Series(_name(stat.series, stat.kind), stat.kind, stat.text), {(): (key,)})
        for key, stat in _STATS.items()
        if stat.series is not None
    ),
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


def _of_each(name: str, key: str) -> tuple[Series, str]:
    stat = CORE_STATS[key]
    text = f"Of this engine: {stat.text[0].lower()}{stat.text[1:]}"
    return Series(_name(f"dp_{name}", stat.kind), stat.kind, text, _ENGINE), key


DP_SERIES = (
    *(_of_each("requests_running", "num_running"), _of_each("requests_waiting", "num_waiting")),
    *(
        _of_each(key, key)
        for key in ("kv_usage", "cache_hit_rate", "prompt_tokens", "cached_tokens", "generated_tokens")
    ),
)
"""What is scraped of each of several engines, and where in its `stats()` it is."""

ALL_SERIES = (
    *(UP, ENGINES, ENGINES_UP, CAPACITY, CACHE_INFO, STATS_AGE, WAITING),
    *(engine_series.series for engine_series in ENGINE_SERIES),
    *(DP_UP, DP_ROUTED, *(series for series, _ in DP_SERIES)),
)


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

    def __init__(
        self,
        client: ServedEngine,
        waits: Callable[[], Mapping[WaitReason, int]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is known before the first `refresh`. `waits` gives how many HTTP requests wait in the front."""
        self._client = client
        self._waits = waits
        self._each = [_Told(engine, now) for engine in client.engines]

    async def refresh(self, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """Asks the engines, or waits for the answers to an earlier question, for `timeout_s` at most."""
        await asyncio.wait([told.ask() for told in self._each], timeout=timeout_s)

    def families(self) -> Iterator[Family]:
        """The families of the engines, as they are scraped."""
        yield UP.family({(): int(self._client.is_alive and not self._client.is_stalled)})
        yield ENGINES.family({(): len(self._each)})
        yield ENGINES_UP.family({(): sum(told.works for told in self._each)})
        living = [told for told in self._each if told.engine.is_alive] or self._each
        yield CAPACITY.family({(): sum(told.engine.info.max_total_tokens for told in living)})
        yield CACHE_INFO.family({_division(living[0].engine.info): 1})
        if len(self._each) > 1:
            yield from self._families_of_each()
        if all(told.stats is None for told in self._each):
            return
        if ages := [told.age_s for told in living if told.stats is not None]:
            yield STATS_AGE.family({(): max(ages)})
        stats = _joined(self._each)
        waits = self._waits()
        counts = {reason: stats.get(stat_of(reason), 0) + waits.get(reason, 0) for reason in WaitReason}
        yield WAITING.family({(reason.value,): count for reason, count in counts.items()})
        for series in ENGINE_SERIES:
            family = series.family(stats)
            if family is not None:
                yield family

    def _families_of_each(self) -> Iterator[Family]:
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


def _division(info: ModelInfo) -> tuple[str, ...]:
    """The values of the labels of `CACHE_INFO`. Engines of one server are alike."""
    block_size = block_tokens_of(info.page_size)
    sizes = (info.page_size, info.max_total_tokens // info.page_size)
    return tuple(map(str, (*sizes, block_size, info.max_total_tokens // block_size)))


def _joined(each: Sequence[_Told]) -> Stats:
    """The values of all engines together, under the names of one."""
    if len(each) == 1:
        return each[0].stats or {}
    joined: dict[str, int | float] = {}
    for told in each:
        for key, value in (told.stats or {}).items():
            joined[key] = joined.get(key, 0) + (value if told.engine.is_alive or key not in _GAUGES else 0)
    living = [told.stats for told in each if told.stats and told.engine.is_alive]
    sizes = [sum(stats.get(key, 0) for key in _POOL_KEYS) for stats in living]
    used = sum(stats.get("kv_usage", 0) * size for stats, size in zip(living, sizes, strict=True))
    prompt_tokens = joined.get("prompt_tokens", 0)
    joined["kv_usage"] = used / sum(sizes) if any(sizes) else 0.0
    joined["cache_hit_rate"] = joined.get("cached_tokens", 0) / prompt_tokens if prompt_tokens else 0.0
    return joined
