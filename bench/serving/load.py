"""Sends the requests: in an open loop at given times, or in a closed loop of clients with one request each."""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp

from bench.serving.client import Clock, Outcome, Target, send, sleep_until
from bench.serving.dialects import Prompt
from bench.serving.workloads import Session

LAG_PERIOD_S = 0.01
ARRIVALS = ("poisson", "uniform", "burst")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """When requests are sent.

    Attributes:
        concurrency: For a closed loop, the number of clients, each of which sends its next request when it has its
            answer; None for an open loop.
        arrival: For an open loop, the gaps: exponential ("poisson"), equal ("uniform"), or none ("burst").
        rate: For an open loop, sessions per second. A session of one turn is one request.
        num_requests: The number of requests after which the load ends.
        duration_s: The seconds after which nothing more is sent. Open answers are waited for.
        seed: The seed of the arrivals.
    """

    concurrency: int | None = None
    arrival: str = "poisson"
    rate: float | None = None
    num_requests: int | None = None
    duration_s: float | None = None
    seed: int = 0


@dataclasses.dataclass(slots=True)
class Run:
    """The result of a load.

    Attributes:
        outcomes: One for each request, in the order in which requests were sent.
        wall_s: Seconds from the start of the load to the end of the last request.
        cpu_s: Processor time of this client.
        lags_s: For every 10 ms, how late a timer of the client's event loop was.
    """

    outcomes: list[Outcome]
    wall_s: float
    cpu_s: float
    lags_s: list[float]


async def run_load(http: aiohttp.ClientSession, target: Target, sessions: Iterator[Session], plan: Plan) -> Run:
    """Sends the sessions as planned and waits for all answers. Times are counted from the start of the load."""
    started = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - started

    load = _Load(http, target, plan, clock)
    cpu = time.process_time()
    async with _lags(clock) as lags:
        await (load.open_loop(sessions) if plan.concurrency is None else load.closed_loop(sessions))
    return Run(load.outcomes, clock(), time.process_time() - cpu, lags)


def gaps(plan: Plan) -> Iterator[float]:
    """Seconds between arrivals, the first one included."""
    rng = random.Random(plan.seed)
    if plan.arrival == "burst":
        return itertools.repeat(0.0)
    assert plan.rate is not None
    if plan.arrival == "uniform":
        return itertools.chain([0.0], itertools.repeat(1 / plan.rate))
    return (rng.expovariate(plan.rate) for _ in itertools.count())


class _Load:
    """One load under way."""

    def __init__(self, http: aiohttp.ClientSession, target: Target, plan: Plan, clock: Clock):
        self.outcomes: list[Outcome] = []
        self._http = http
        self._target = target
        self._plan = plan
        self._clock = clock

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be sent."""
        plan = self._plan
        has_all = plan.num_requests is not None and len(self.outcomes) >= plan.num_requests
        return has_all or (plan.duration_s is not None and self._clock() >= plan.duration_s)

    async def open_loop(self, sessions: Iterator[Session]) -> None:
        due_s, num_planned, plan = 0.0, 0, self._plan
        async with asyncio.TaskGroup() as group:
            for session, gap in zip(sessions, gaps(plan), strict=False):
                due_s += gap
                if plan.duration_s is not None and due_s >= plan.duration_s:
                    break
                await sleep_until(due_s, self._clock)
                group.create_task(self._converse(session, due_s))
                num_planned += len(session.turns)
                if plan.num_requests is not None and num_planned >= plan.num_requests:
                    break

    async def closed_loop(self, sessions: Iterator[Session]) -> None:
        async def client() -> None:
            while not self.is_over:
                await self._converse(next(sessions), self._clock())

        async with asyncio.TaskGroup() as group:
            for _ in range(self._plan.concurrency or 1):
                group.create_task(client())

    async def _converse(self, session: Session, due_s: float) -> None:
        """Sends the turns of a session one after the other. The session ends when a turn fails."""
        said: list[Prompt] = []
        length = 0
        for turn in session.turns:
            if said and self.is_over:
                return
            said.append(turn.text)
            length += turn.approximate_len
            outcome = Outcome(group=session.group, due_s=due_s, sent_s=due_s, approximate_prompt_len=length)
            self.outcomes.append(outcome)
            await send(self._http, self._target, said, turn.max_tokens, outcome, self._clock)
            if outcome.error is not None:
                return
            answer = outcome.reading
            said.append(answer.text if isinstance(turn.text, str) else answer.token_ids)
            length += answer.num_tokens or turn.max_tokens
            due_s = outcome.ended_s


@contextlib.asynccontextmanager
async def _lags(clock: Clock) -> AsyncIterator[list[float]]:
    """Records inside the `with` how late the event loop wakes."""
    lags: list[float] = []

    async def measure() -> None:
        while True:
            due = clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            lags.append(max(0.0, clock() - due))

    measuring = asyncio.create_task(measure())
    try:
        yield lags
    finally:
        measuring.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await measuring
