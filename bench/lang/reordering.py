"""Measures the gain of `unordered`: with it, a compiled batch may move its long constant text to the front."""

import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jsg as sgl
from bench import settled
from bench.lang.workloads import Sizes, passage, thought
from bench.report import Figure, Report
from jsg.lang.executor.compiled import CompiledFunction

QUESTIONS = [{"question": f"Why the {word}?"} for word in ("man", "day", "way", "hand", "part", "eye")]


class Run(NamedTuple):
    """The cost of one run of a batch.

    Attributes:
        seconds: Wall time.
        computed_tokens: Prompt tokens that were not cached.
    """

    seconds: float
    computed_tokens: int


def reordered(sizes: Sizes, seed: int) -> CompiledFunction:
    """The question comes first, so that no prefix is shared as written, but the program says that the order is free."""
    text = passage(seed, sizes.passage_words)

    @sgl.function
    def ask(s, question):
        s += sgl.unordered(f"Question: {question}\n", f"Text: {text}\n")
        s += "Answer:" + thought("answer", 4)

    return ask.compile()


def as_written(sizes: Sizes, seed: int) -> CompiledFunction:
    """The same program, whose parts keep their order."""
    text = passage(seed, sizes.passage_words)

    @sgl.function
    def ask(s, question):
        s += f"Question: {question}\nText: {text}\nAnswer:" + thought("answer", 4)

    return ask.compile()


SIDES = {"unordered": reordered, "as it is written": as_written}


def measure_reordering(report: Report, model: str, *, rounds: int, sizes: Sizes, **knobs: Any) -> None:
    """Measures wall time and computed prompt tokens. Both sides take turns, with different texts."""
    seeds = iter(range(0, 10**9, 1000))
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    with settled.compiled_engine(model, **knobs) as engine:
        for turn in range(rounds + 1):
            for side, make in SIDES.items():
                run = run_once(engine, make(sizes, next(seeds)))
                if turn:
                    runs[side].append(run)
    unordered, written = (_note(report, side, found) for side, found in runs.items())
    report.add("reorder: as it is written / unordered", "x", [written.median / unordered.median])


def _note(report: Report, side: str, runs: Sequence[Run]) -> Figure:
    computed = statistics.median(run.computed_tokens for run in runs)
    return report.add(f"reorder: {side}", "s", [run.seconds for run in runs], computed_tokens=computed)


def run_once(engine: sgl.Engine, program: CompiledFunction) -> Run:
    """Runs a batch of a new program once, beginning with an empty cache."""
    if not engine.flush_cache():
        raise RuntimeError("the cache should be empty, but requests run")
    before = engine.get_server_info()
    started = time.perf_counter()
    states = list(program.run_batch(QUESTIONS, backend=engine))
    seconds = time.perf_counter() - started
    for state in states:
        if (failure := state.error()) is not None:
            raise failure
    after = engine.get_server_info()
    prompt, cached = (after[name] - before[name] for name in ("prompt_tokens", "cached_tokens"))
    return Run(seconds, prompt - cached)
