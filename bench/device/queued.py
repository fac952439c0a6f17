"""Single programs, compiled as the engine compiles them and timed in a queue, beside their floor."""

from collections.abc import Callable
from typing import Any

import jax

from bench.device.events import Part
from bench.roofline import Cost, Rates
from jsg.engine.device.executables import COMPILER_OPTIONS, QUANTISED_OPTIONS

QUEUED = 10
"""The number of calls that are timed together, because starting a single call may take longer than running it."""


def options(quantization: str = "none") -> dict[str, Any] | None:
    """The engine's compiler options on this platform."""
    chosen = COMPILER_OPTIONS if quantization == "none" else QUANTISED_OPTIONS
    found = chosen.get(jax.default_backend())
    return None if found is None else dict(found)


def time_queued(part: Part, call: Callable[[], jax.Array]) -> list[float]:
    """Milliseconds of a call, as the mean of several calls that are started without waiting for each other."""

    def run() -> None:
        outs = [call() for _ in range(QUEUED)]
        outs[-1].block_until_ready()

    return [ms / QUEUED for ms in part.time(run, budget_s=1)]


def floor_facts(part: Part, cost: Cost, best_ms: float) -> dict[str, Any]:
    """Facts beside a figure: bytes and operations, and the least possible time if the device's rates are known."""
    facts: dict[str, Any] = {"num_bytes": cost.num_bytes, "num_flops": cost.num_flops}
    if part.rates is not None:
        floor_ms = cost.floor_ms(Rates(*part.rates))
        facts |= {"floor": floor_ms, "of_floor": floor_ms / best_ms}
    return facts


def temporary_mib(compiled: jax.stages.Compiled) -> dict[str, float]:
    """Memory of the program beside arguments and results in MiB, if the compiler gives it."""
    analysis = compiled.memory_analysis()
    return {} if analysis is None else {"temporary_mib": analysis.temp_size_in_bytes / 2**20}
