"""Takes time on a machine that has other users: it measures processor time, uses one core, and alternates.

Processor time does not count what other processes run, but it does grow with what they do to caches and memory. So
sides that are compared take turns, and the smallest of several samples of each is compared.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Sample(NamedTuple):
    """The time of one run in milliseconds: processor time of all threads of this process, and wall time."""

    cpu_ms: float
    wall_ms: float


Timed = Callable[[int], list[Sample]]
"""Runs something the given number of times, and returns a sample for each run."""


def pin_to_one_core() -> int:
    """Keeps this process, and what it starts from now on, on one core. Returns the core's number.

    Call it before JAX is used, because JAX makes a thread for each core that it may run on.
    """
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def timed(run: Callable[[], object]) -> Timed:
    """Times each of several calls."""

    def samples(count: int) -> list[Sample]:
        return [_time(run) for _ in range(count)]

    return samples


def alternate(sides: Mapping[str, Timed], *, rounds: int, per_round: int, warm_up: int = 2) -> dict[str, list[Sample]]:
    """Samples of sides that take turns: each runs `per_round` times in each round."""
    for run in sides.values():
        run(warm_up)
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            samples[name] += run(per_round)
    return samples


def sample_until(run: Callable[[], object], *, count: int, warm_up: int, budget_s: float) -> list[float]:
    """Wall milliseconds of `count` calls after `warm_up` other calls; of at least one if time runs out."""
    end = time.monotonic() + budget_s
    for done in range(warm_up):
        if done and time.monotonic() > end - budget_s / 2:
            break
        run()
    samples: list[float] = []
    while len(samples) < count and (not samples or time.monotonic() < end):
        samples.append(_time(run).wall_ms)
    return samples


def _time(run: Callable[[], object]) -> Sample:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return Sample((time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3)
