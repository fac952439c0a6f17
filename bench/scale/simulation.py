"""Plays a trace through routers and replicas, and the same trace through one cache that has all their pools.

Everything is a function of the arguments: time is that of the model, and chance comes from the seed.
"""

import dataclasses
import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from bench.scale.policies import MakePolicy, Policy, Setting
from bench.scale.replicas import ROW_S, TOKEN_S, BlockCache, Live, Replica, cached_len
from bench.scale.traces import Call
from jsg.engine.front.prefix_index import Chain


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas and their routers.

    Attributes:
        num_replicas: Number of replicas.
        pool_blocks: Blocks in the pool of each.
        num_routers: Number of routers. Each call goes to one of them by chance.
        event_delay_s: After how long routers hear what a cache has gained or lost; None if they do not.
        load: Part of the work that a fleet could do at most with the hits of one pooled cache.
        seed: Decides what chance decides.
    """

    num_replicas: int
    pool_blocks: int
    num_routers: int = 1
    event_delay_s: float | None = None
    load: float = 0.5
    seed: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Pooled:
    """The trace with one cache that has the pools of all replicas: what no fleet of replicas can exceed by much.

    Attributes:
        hit_rate: The part of the prompts' tokens that it had, of the calls that count.
        work_s: How long a call occupies a replica at the least, in the mean over all calls.
    """

    hit_rate: float
    work_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The calls that count, those of the second half of the trace.

    Attributes:
        hit_rate: The part of their prompts' tokens that was cached.
        ttft_s: Times to the first token, sorted.
        computed: The tokens that each replica computed for them, those of answers included.
    """

    hit_rate: float
    ttft_s: np.ndarray
    computed: np.ndarray

    @property
    def balance(self) -> float:
        """What the busiest replica computed, over the mean."""
        return float(self.computed.max() / self.computed.mean())

    def ttft_ms(self, percent: float) -> float:
        """A percentile of the times to the first token."""
        return float(1e3 * np.percentile(self.ttft_s, percent))


def counting_from(calls: Sequence[Call]) -> float:
    """The time from which calls count, when caches are filled."""
    return calls[-1].at / 2


def pool(calls: Sequence[Call], fleet: Fleet) -> Pooled:
    """Plays the trace through one cache, whose answers are there at once."""
    cache, start = BlockCache(fleet.num_replicas * fleet.pool_blocks), counting_from(calls)
    hits = tokens = computed = 0
    for call in calls:
        cached = cached_len(call, cache.match(call.prompt))
        cache.use(call.kept)
        cache.take_changes()
        computed += call.prompt_len - cached
        if call.at >= start:
            hits += cached
            tokens += call.prompt_len
    outputs = sum(call.output_len for call in calls)
    return Pooled(hits / tokens, (computed * TOKEN_S + outputs * ROW_S) / len(calls))


def simulate(calls: Sequence[Call], fleet: Fleet, pooled: Pooled, make: MakePolicy) -> Outcome:
    """Plays the trace through a fleet whose routers have a policy."""
    return _Simulation(calls, fleet, pooled.work_s / fleet.load, make).run()


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """The end of a replica's step, with the calls that got their first and their last token in it."""

    replica: int
    begun: Sequence[Live] = ()
    ended: Sequence[Live] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class _Changes:
    """What a replica's cache has gained and lost, when it comes to the routers."""

    replica: int
    gained: Chain
    lost: Chain


class _Simulation:
    """The state of one run: what happens next, and what has been counted.

    Invariant: a replica that is not idle has exactly one step among the events.
    """

    def __init__(self, calls: Sequence[Call], fleet: Fleet, turn_s: float, make: MakePolicy) -> None:
        self._calls, self._fleet, self._turn_s = calls, fleet, turn_s
        self._start = counting_from(calls)
        self._rng = np.random.default_rng(fleet.seed)
        self._replicas = [Replica(fleet.pool_blocks) for _ in range(fleet.num_replicas)]
        has_events, digests = fleet.event_delay_s is not None, dict[bytes, bytes]()
        self._routers = list[Policy]()
        for rng in self._rng.spawn(fleet.num_routers):
            setting = Setting(self._replicas, fleet.pool_blocks, rng, has_events, digests, self._routers)
            self._routers.append(make(setting))
        self._events: list[tuple[float, int, Call | _Step | _Changes]] = []
        self._order = itertools.count()
        self._stepping: set[int] = set()
        self._followers: dict[Call, list[Call]] = defaultdict(list)
        self._hits = self._tokens = 0
        self._ttft_s: list[float] = []
        self._computed = np.zeros(fleet.num_replicas)

    def run(self) -> Outcome:
        for call in self._calls:
            if call.follows is None:
                self._plan(call.at * self._turn_s, call)
            else:
                self._followers[call.follows].append(call)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            match event:
                case Call():
                    self._send(now, event)
                case _Step():
                    self._end_step(now, event)
                case _Changes():
                    for router in self._routers:
                        router.note_stored(event.replica, event.gained)
                        router.note_removed(event.replica, event.lost)
        assert not self._followers, "every call has come"
        return Outcome(self._hits / self._tokens, np.sort(self._ttft_s), self._computed)

    def _plan(self, at_s: float, event: Call | _Step | _Changes) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def _send(self, now: float, call: Call) -> None:
        router = int(self._rng.integers(len(self._routers)))
        number = self._routers[router].choose(call, now)
        self._replicas[number].add(Live(call, router, now))
        if number not in self._stepping:
            self._stepping.add(number)
            self._begin_step(now, number)

    def _begin_step(self, now: float, number: int) -> None:
        seconds, begun, ended = self._replicas[number].step()
        self._plan(now + seconds, _Step(number, begun, ended))

    def _end_step(self, now: float, step: _Step) -> None:
        replica = self._replicas[step.replica]
        for live in step.begun:
            self._count(now, live, step.replica)
            self._routers[live.router].begin(live.call, live.cached)
        for live in step.ended:
            self._routers[live.router].end(live.call)
            for follower in self._followers.pop(live.call, ()):
                self._plan(max(follower.at * self._turn_s, now), follower)
        gained, lost = replica.cache.take_changes()
        if self._fleet.event_delay_s is not None and (gained or lost):
            self._plan(now + self._fleet.event_delay_s, _Changes(step.replica, gained, lost))
        if replica.is_idle:
            self._stepping.remove(step.replica)
        else:
            self._begin_step(now, step.replica)

    def _count(self, now: float, live: Live, replica: int) -> None:
        if live.call.at >= self._start:
            self._hits += live.cached
            self._tokens += live.call.prompt_len
            self._ttft_s.append(now - live.came_s)
            self._computed[replica] += live.call.prompt_len - live.cached + live.call.output_len
