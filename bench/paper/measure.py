"""Runs one workload on one engine: all programs at once, then some one at a time."""

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import httpx

import jsg
from bench.paper.recorded import TIMEOUT_S, NotedBackend, RecordedBackend, Ways
from bench.paper.sequences import Sequences
from bench.paper.workload import Need, Workload
from jsg.lang.program.state import ProgramState
from jsg.lang.remote.dialects import Dialect
from jsg.lang.words.backend import Backend

COUNTERS = ("prompt_tokens", "cached_tokens", "num_steps")
"""What a jsg server has counted since its start. They know also what a fork asked for."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An engine that programs can run on.

    Attributes:
        name: Its name in the report.
        url: Its address.
        dialect: The fields that a server with OpenAI's API takes; None for a jsg server.
        model: The name of its model, for such a server.
        can: What it is able to do.
        ways: How programs are run on it.
        settle: Waits until nothing is left to compile.
        pid: The process whose tree it is; None where it runs elsewhere.
    """

    name: str
    url: str
    dialect: Dialect | None = None
    model: str = ""
    can: frozenset[Need] = frozenset[Need]({"choices", "forms", "joins"})
    ways: Ways = dataclasses.field(default_factory=Ways)
    settle: Callable[[], None] = lambda: None
    pid: int | None = None

    def opened(self) -> tuple[Backend, Sequences | None]:
        """A backend of it; and for a jsg server the tokens of all prompts."""
        if self.dialect is None:
            sequences = Sequences()
            return NotedBackend(self.url, sequences, self.ways.forgotten), sequences
        url = f"{self.url}/v1"
        return jsg.OpenAI(self.model, base_url=url, api="completions", dialect=self.dialect, timeout_s=TIMEOUT_S), None

    def counters(self) -> Mapping[str, int] | None:
        """The counters of a jsg server; None for another one."""
        if self.dialect is not None:
            return None
        info = httpx.get(f"{self.url}/get_server_info", timeout=60).json()["internal_states"]
        return {name: sum(state[name] for state in info) for name in COUNTERS}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One workload on one engine, once.

    Attributes:
        programs: How many programs ran at once.
        wall_s: Their wall time.
        alone_s: The wall time of each program that ran alone.
        first_s: For each call of the programs that ran at once, the time to its first text.
        calls: The calls of the model of those programs.
        prompt_tokens: The tokens of the prompts of these calls.
        computed_tokens: Those of them that were computed; None where the engine does not say.
        least_tokens: Those that any prefix cache must compute; None where the tokens are not known.
        generated_tokens: The tokens of the answers.
        steps: The steps of the engine; None where it does not say.
        states: The programs that ran at once, in order.
    """

    programs: int
    wall_s: float
    alone_s: Sequence[float]
    first_s: Sequence[float]
    calls: int
    prompt_tokens: int
    computed_tokens: int | None
    least_tokens: int | None
    generated_tokens: int
    steps: int | None
    states: Sequence[ProgramState]

    @property
    def per_s(self) -> float:
        """Programs per second."""
        return self.programs / self.wall_s

    @property
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that were not computed."""
        return None if self.computed_tokens is None else 1 - self.computed_tokens / self.prompt_tokens

    @property
    def best_hit_rate(self) -> float | None:
        """The share that any prefix cache could leave out."""
        return None if self.least_tokens is None else 1 - self.least_tokens / self.prompt_tokens

    def facts(self) -> dict[str, Any]:
        """What a report keeps beside the wall time."""
        return {
            "programs": self.programs,
            "programs_per_s": self.per_s,
            "alone_s": statistics.median(self.alone_s),
            "first_text_s": statistics.median(self.first_s),
            "calls": self.calls,
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "generated_tokens": self.generated_tokens,
            "steps": self.steps,
            "hit_rate": self.hit_rate,
            "best_hit_rate": self.best_hit_rate,
        }


def measure(
    workload: Workload, target: Target, at_once: Sequence[Mapping[str, Any]], alone: Sequence[Mapping[str, Any]]
) -> Measured:
    """Runs programs with these arguments. The cache is empty before, where there is a way to empty it.

    Raises:
        JsgError: A program failed.
    """
    inner, sequences = target.opened()
    backend = RecordedBackend(inner, target.ways)
    if target.dialect is None:
        httpx.post(f"{target.url}/flush_cache", timeout=60).raise_for_status()
    before = target.counters()
    try:
        states, wall_s = timed(workload, at_once, backend)
        after = target.counters()
        calls, least = list(backend.calls), sequences.least() if sequences else None
        alone_s = [timed(workload, [arguments], backend)[1] for arguments in alone]
    finally:
        asyncio.run(backend.close())
    prompt_tokens = sum(call.prompt_tokens or 0 for call in calls)
    grown = {name: after[name] - before[name] for name in after} if before and after else None
    if grown is not None:
        computed = grown["prompt_tokens"] - grown["cached_tokens"]
    elif all(call.cached_tokens is not None for call in calls):
        computed = prompt_tokens - sum(call.cached_tokens or 0 for call in calls)
    else:
        computed = None
    return Measured(
        programs=len(at_once),
        wall_s=wall_s,
        alone_s=alone_s,
        first_s=[call.first_s - call.sent_s for call in calls],
        calls=len(calls),
        prompt_tokens=prompt_tokens,
        computed_tokens=computed,
        least_tokens=least,
        generated_tokens=sum(call.completion_tokens or 0 for call in calls),
        steps=grown["num_steps"] if grown is not None else None,
        states=states,
    )


def timed(
    workload: Workload, arguments: Sequence[Mapping[str, Any]], backend: Backend
) -> tuple[list[ProgramState], float]:
    """Runs programs at once, to the end of all their calls, and gives the wall time. Raises what one failed with."""
    started = time.perf_counter()
    states = workload.program.run_batch(arguments, backend=backend, num_threads=len(arguments))
    wall_s = time.perf_counter() - started
    for state in states:
        if (failure := state.error()) is not None:
            raise failure
    return states, wall_s
