"""What each optimisation of a compiled program is worth: all of them, against all but that one.

Each is shown on a program that has a use for it. `release_early` saves memory, not time: its figure is the largest
number of tokens that programs kept from being evicted.
"""

import contextlib
import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jsg as sgl
from bench import settled
from bench.lang.workloads import Sizes, passage, thought
from bench.report import Report
from jsg.lang.executor.compiled import CompiledFunction
from jsg.lang.graphs.optimise import ALL_ON, Optimisations


class Ablation(NamedTuple):
    """A program that has a use for an optimisation.

    Attributes:
        name: Of the field of `Optimisations`.
        make: The program for sizes and a seed, so that each run has texts of its own.
        items: Arguments of each run of a batch.
        is_watched: What is measured is memory, not time.
    """

    name: str
    make: Callable[[Sizes, int], CompiledFunction]
    items: Sequence[dict[str, str]]
    is_watched: bool = False


def reordered(sizes: Sizes, seed: int) -> CompiledFunction:
    """The question comes first as it is written, and nothing would be shared; the program says that order is free."""
    text = passage(seed, sizes.passage_words)

    @sgl.function
    def ask(s, question):
        s += sgl.unordered(f"Question: {question}\n", f"Text: {text}\n")
        s += "Answer:" + thought("answer", 4)

    return ask.compile()


def branching(sizes: Sizes, seed: int) -> CompiledFunction:
    """Each branch begins with the same long text, which was not put in front of the fork."""
    text = passage(seed, sizes.passage_words)

    @sgl.function
    def judge(s, question):
        s += f"{question} {seed}\n"
        for index, branch in enumerate(s.fork(sizes.num_dimensions)):
            branch += f"Article: {text}\nDimension {index}:" + thought("judgment", sizes.thought_tokens)

    return judge.compile()


def batched(sizes: Sizes, seed: int) -> CompiledFunction:
    """A long constant text in front of short questions."""
    text = passage(seed, sizes.passage_words)

    @sgl.function
    def ask(s, question):
        s += f"Text: {text}\nQuestion: {question}\nAnswer:" + thought("answer", 4)

    return ask.compile()


def side_by_side(sizes: Sizes, seed: int) -> CompiledFunction:
    """Branches that need nothing of each other."""
    text = passage(seed, sizes.passage_words)

    @sgl.function
    def judge(s, question):
        s += f"{question} {text}\n"
        for index, branch in enumerate(s.fork(sizes.num_dimensions)):
            branch += f"Dimension {index}:" + thought("judgment", sizes.thought_tokens)

    return judge.compile()


def waiting(sizes: Sizes, seed: int) -> CompiledFunction:
    """A long text stands before a value that another conversation is still writing."""
    text = passage(seed, sizes.passage_words)

    @sgl.function
    def outline(s, question):
        s += f"Outline {seed}: {question}" + thought("points", sizes.thought_tokens)

    @sgl.function
    def write(s, question):
        points = outline(question)
        s += f"Text: {text}\nOutline: "
        s += points["points"] + thought("answer", 4)

    return write.compile()


def chained(sizes: Sizes, seed: int) -> CompiledFunction:
    """One conversation after another, each with branches behind a text of its own that nobody needs later."""

    @sgl.function
    def stage(s, number, before):
        s += f"{before} Stage {number}: {passage(seed + number, sizes.passage_words // 2)}"
        branches = s.fork(2)
        for index, branch in enumerate(branches):
            branch += f" Way {index}:" + thought("answer", 4)
        return branches[0]["answer"]

    @sgl.function
    def chain(s, question):
        answer = question
        for number in range(sizes.num_dimensions):
            answer = stage(number, answer).ret_value
        s += answer + thought("answer", 4)

    return chain.compile()


ONE = [{"question": "Why so?"}]
MANY = [{"question": f"Why the {word}?"} for word in ("man", "day", "way", "hand", "part", "eye")]
ABLATIONS = (
    Ablation("reorder", reordered, MANY),
    Ablation("share_prefixes", branching, ONE),
    Ablation("batch_prefix", batched, MANY),
    Ablation("parallel", side_by_side, ONE),
    Ablation("prefetch", waiting, ONE),
    Ablation("release_early", chained, ONE, is_watched=True),
)


class Run(NamedTuple):
    """What one run of a batch took.

    Attributes:
        seconds: Wall time.
        computed_tokens: Prompt tokens that no cache had.
        protected_tokens: Most tokens that were kept from being evicted at a time; 0 where nobody looked.
    """

    seconds: float
    computed_tokens: int
    protected_tokens: int


def measure_ablations(report: Report, model: str, *, rounds: int, sizes: Sizes, **knobs: Any) -> None:
    """Wall time and prompt tokens that had to be computed; both sides take turns, with texts of their own."""
    seeds = iter(range(0, 10**9, 1000))
    with settled.compiled_engine(model, **knobs) as engine:
        for ablation in ABLATIONS:
            sides = {"all on": ALL_ON, "without it": dataclasses.replace(ALL_ON, **{ablation.name: False})}
            runs: dict[str, list[Run]] = {side: [] for side in sides}
            for turn in range(rounds + 1):
                for side, options in sides.items():
                    run = run_once(engine, ablation, sizes, next(seeds), options)
                    if turn:
                        runs[side].append(run)
            _note(report, ablation, runs)


def run_once(engine: sgl.Engine, ablation: Ablation, sizes: Sizes, seed: int, options: Optimisations) -> Run:
    """Runs a new program of an ablation once, from an empty cache."""
    program = ablation.make(sizes, seed)
    if not engine.flush_cache():
        raise RuntimeError("the cache should be empty, but requests run")
    before = engine.get_server_info()
    with watched(engine, ablation.is_watched) as protected:
        started = time.perf_counter()
        states = list(program.run_batch(ablation.items, backend=engine, optimisations=options))
        seconds = time.perf_counter() - started
    for state in states:
        if (failure := state.error()) is not None:
            raise failure
    after = engine.get_server_info()
    prompt, cached = (after[name] - before[name] for name in ("prompt_tokens", "cached_tokens"))
    return Run(seconds, prompt - cached, max(protected))


@contextlib.contextmanager
def watched(engine: sgl.Engine, is_watched: bool) -> Iterator[list[int]]:
    """Looks again and again at how many tokens are kept; looking costs time, so only where that is not measured."""
    protected, ended = [0], threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            protected.append(engine.get_server_info()["num_protected_tokens"])

    watcher = threading.Thread(target=look)
    if is_watched:
        watcher.start()
    try:
        yield protected
    finally:
        ended.set()
        if is_watched:
            watcher.join()


def _note(report: Report, ablation: Ablation, runs: dict[str, list[Run]]) -> None:
    figures = {}
    for side, found in runs.items():
        if ablation.is_watched:
            values, unit = [run.protected_tokens for run in found], "tokens"
        else:
            values, unit = [run.seconds for run in found], "s"
        computed = statistics.median(run.computed_tokens for run in found)
        figures[side] = report.add(f"{ablation.name}: {side}", unit, values, computed_tokens=computed)
    with_it, without = figures.values()
    ratio = without.median / with_it.median
    report.add(f"{ablation.name}: without it / all on", "x", [ratio], of_smallest=without.smallest / with_it.smallest)
