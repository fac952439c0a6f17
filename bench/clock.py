"""Taking time on a machine that has other users: processor time, one core, and turns.

Processor time does not count what others run, but what they do to caches and memory it does; so whatever is compared
takes turns, and the smallest of several samples is what is compared.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Sample(NamedTuple):
    """What one run took, in milliseconds: of all threads of this process, and on the wall."""

    cpu_ms: float
    wall_ms: float


Timed = Callable[[int], list[Sample]]
"""Runs something so many times."""


def pin_to_one_core() -> int:
    """Keeps this process, and what it starts from now on, on one core; returns which.

    Call it before JAX is used: its thread pool is as large as the cores it may run on.
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
    """Lets the sides take turns: each runs `per_round` times in each round."""
    for run in sides.values():
        run(warm_up)
    samples: dict[str, list[Sample]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            samples[name] += run(per_round)
    return samples


def sample_until(run: Callable[[], object], *, count: int, warm_up: int, budget_s: float) -> list[float]:
    """Wall milliseconds of `count` calls after `warm_up` others; of fewer, but at least one, when time runs out."""
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
