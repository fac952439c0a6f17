"""Measures models with states of linear attention beside models without: `python -m bench.hybrid --output RUN.json`.

    hits    what the cache finds of loads that go through the scheduler without a device, with so many states
    steps   decode steps and prompts of a model of 100 million parameters on one core of this CPU, in turns
    points  the first token of prompts with a point, at which a state is kept, beside the same without, on that core

Weights are random and float32.
"""

import argparse
import functools
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.clock import alternate, pin_to_one_core, timed
from bench.hybrid.hits import measure_hits, measure_shrinking
from bench.loop import Decoding, greedy, make_engine, random_prompt
from bench.report import Report
from bench.shapes import HYBRID_100M, LLAMA_100M, write_model
from bench.shared_prefix import run_all
from jsg.engine.device.executables import use_compilation_cache
from jsg.prompt_ids import PromptIds
from jsg.types import Request

ROWS = (1, 8, 32)
CACHED, PROMPT, CONTEXT = 256, 512, 1024
STEPS = 4
POINTED = (512, 4096)
SHAPES = {"Llama": LLAMA_100M, "hybrid": HYBRID_100M}
TARGET = "<= 1.3 (median)"


def measure_steps(report: Report, folder: Path, rounds: int) -> None:
    """Measures decode steps, and prompts. Each sample of one model has one of the other beside it."""
    knobs = {"max_running_requests": max(ROWS), "context_length": CONTEXT, "max_total_tokens": max(ROWS) * CONTEXT}
    cores = {
        name: make_engine(write_model(folder / name, shape), chunked_prefill_size=PROMPT, **knobs)
        for name, shape in SHAPES.items()
    }
    for rows in ROWS:
        decoding = {name: Decoding(core, rows, CACHED) for name, core in cores.items()}
        runs = {name: lambda each=each: each.run(STEPS) for name, each in decoding.items()}
        _compare(report, f"decode step of {rows}", runs, rounds, STEPS)
        for each in decoding.values():
            each.end()
    prompt = random_prompt(0, PROMPT, LLAMA_100M["vocab_size"])
    runs = {name: lambda core=core: run_all(core, [prompt], 1) for name, core in cores.items()}
    _compare(report, f"prompt of {PROMPT}", runs, rounds, 1)
    for core in cores.values():
        core.close()


def measure_points(report: Report, folder: Path, rounds: int) -> None:
    """Measures how much later the first token of a prompt comes with one point, in turns with none."""
    longest = max(POINTED)
    knobs = {"max_running_requests": 4, "context_length": longest + 1, "max_total_tokens": 2 * longest}
    core = make_engine(write_model(folder / "pointed", HYBRID_100M | {"max_position_embeddings": 2 * longest}), **knobs)

    def first_token(prompt: PromptIds, *points: int) -> None:
        assert core.flush_cache()
        core.add(Request(rid="asked", input_ids=prompt, sampling=greedy(1), snapshot_at=points))
        while core.has_work:
            core.step()

    for length in POINTED:
        prompt = PromptIds.of(random_prompt(0, length, HYBRID_100M["vocab_size"]))
        places = {"without": (), "in the middle": (length // 2 + 1,), "5 tokens before its end": (length - 5,)}
        runs = {name: timed(functools.partial(first_token, prompt, *points)) for name, points in places.items()}
        samples = alternate(runs, rounds=rounds, per_round=1)
        base = samples.pop("without")
        report.add(f"first token of {length}", "ms cpu", [sample.cpu_ms for sample in base])
        for name, own in samples.items():
            ratios = [one.cpu_ms / other.cpu_ms for one, other in zip(own, base, strict=True)]
            report.add(f"first token of {length}, a point {name} / without", "x", ratios)
    core.close()


def _compare(report: Report, what: str, runs: Mapping[str, Callable[[], object]], rounds: int, steps: int) -> None:
    samples = alternate({name: timed(run) for name, run in runs.items()}, rounds=rounds, per_round=1)
    for name, own in samples.items():
        wall = statistics.median(sample.wall_ms for sample in own) / steps
        report.add(f"{what}, {name}", "ms cpu", [sample.cpu_ms / steps for sample in own], median_wall_ms=wall)
    pairs = [*zip(samples["hybrid"], samples["Llama"], strict=True)]
    wall = statistics.median(one.wall_ms / other.wall_ms for one, other in pairs)
    ratios = [one.cpu_ms / other.cpu_ms for one, other in pairs]
    report.add(f"{what}, hybrid / Llama", "x", ratios, median_of_wall=wall, target=TARGET)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.hybrid", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=("hits", "steps", "points"), help="one of the parts")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each step; default: 20")
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    options = parser.parse_args(arguments)
    report = Report("bench.hybrid", arguments, options.output, pinned_to_core=pin_to_one_core())
    if options.only in (None, "hits"):
        measure_hits(report)
        measure_shrinking(report)
    for part, run in (("steps", measure_steps), ("points", measure_points)):
        if options.only in (None, part):
            use_compilation_cache(None)
            with tempfile.TemporaryDirectory() as folder:
                run(report, Path(folder), options.rounds)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
