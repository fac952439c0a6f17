"""Measures the gain of forks and the radix cache: programs in parallel and serially, with and without the cache."""

import contextlib
import itertools
import time
from pathlib import Path
from typing import Any

from bench import settled
from bench.lang.workloads import PROGRAMS, Sizes
from bench.report import Report

ARMS = {
    "parallel": (False, False),
    "branches awaited one by one": (True, False),
    "--disable-radix-cache": (False, True),
}
"""The arms: (is_serial, disable_radix_cache) by name."""
TARGET = ">= 2"
WARM_UP = 1


def measure_sharing(report: Report, model: str, *, rounds: int, sizes: Sizes, **knobs: Any) -> None:
    """Measures the wall time of one program at a time. The arms take turns, and no engine gets a text twice."""
    with contextlib.ExitStack() as stack:
        engines = {
            disabled: stack.enter_context(settled.compiled_engine(model, disable_radix_cache=disabled, **knobs))
            for disabled in (False, True)
        }
        seeds = itertools.count()
        for name, program in PROGRAMS.items():
            samples: dict[str, list[float]] = {arm: [] for arm in ARMS}
            for turn in range(rounds + WARM_UP):
                for arm, (is_serial, disabled) in ARMS.items():
                    seed = next(seeds)
                    started = time.perf_counter()
                    state = program.run(seed, sizes, is_serial, backend=engines[disabled])
                    state.sync()
                    seconds = time.perf_counter() - started
                    if (failure := state.error()) is not None:
                        raise failure
                    if turn >= WARM_UP:
                        samples[arm].append(seconds)
            _note(report, name, samples, sizes)


def _note(report: Report, name: str, samples: dict[str, list[float]], sizes: Sizes) -> None:
    figures = {arm: report.add(f"{name}: {arm}", "s", values) for arm, values in samples.items()}
    ours = figures["parallel"]
    for arm, figure in figures.items():
        if figure is not ours:
            ratio = figure.median / ours.median
            of_smallest = figure.smallest / ours.smallest
            facts = {"target": TARGET, "of_smallest": of_smallest} | sizes._asdict()
            report.add(f"{name}: {arm} / parallel", "x", [ratio], **facts)


def model_100m(directory: Path) -> str:
    """The model of 100 million parameters, with a tokenizer because programs are text."""
    from bench.jump_forward import make_100m

    return str(make_100m(directory))
