"""Measures what drafts gain, and that they cost nothing where they gain nothing: `python -m bench.drafts`.

Two engines in this process have the same model, one with `--speculative auto` and one with `off`, and take turns at the
same requests, which each round draws anew. Of JSON a third side has no jump-forward either. Steps and drafts are
counted. Times are wall and processor time of `jsg.Engine.generate`, and count only on a quiet machine.

    tiny        the embedded model
    copying     the same trained on, to copy from its prompt (once, which takes minutes)
    wide        the answers of `copying`, with 12 layers and a width of 768: a step takes many times as long
    wide-prose  the answers of `tiny` in that shape, at prose
    full        the embedded model at prose, with 256 requests at once
"""

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsg
from bench import settled
from bench.drafts.models import copying_model, wide_model
from bench.drafts.workloads import WORKLOADS, Draw, Wave, Workload
from bench.report import ROOT, Report

SOURCES = ("forced", "tree", "text", "past")
AUTO, OFF, PLAIN = "auto", "off", "plain"
LEAST_REQUESTS = 4
EMBEDDED = ROOT / "jsg" / "assets" / "tiny"
COPYING_TASKS = tuple(name for name in WORKLOADS if name != "prose")


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    """A model, and what is measured on it.

    Attributes:
        path: Gives its directory, which may be made in a folder.
        workloads: What it can be asked.
        is_embedded: Whether it knows what the embedded model knows, and else what the one that copies knows.
        most_rows: The most requests at once.
        sizes: The numbers of requests at once, where the command line does not say.
    """

    path: Callable[[Path], Path]
    workloads: Sequence[str]
    is_embedded: bool = False
    most_rows: int = 32
    sizes: Sequence[int] = (1, 16)


MODELS = {
    "tiny": Model(lambda folder: EMBEDDED, ("extraction", "json", "repeats", "samples", "prose"), is_embedded=True),
    "copying": Model(copying_model, COPYING_TASKS),
    "wide": Model(lambda folder: wide_model(copying_model(folder), folder / "wide"), COPYING_TASKS),
    "wide-prose": Model(
        lambda folder: wide_model(EMBEDDED, folder / "wide-prose"), ("prose",), is_embedded=True, sizes=(1, 8, 16)
    ),
    "full": Model(lambda folder: EMBEDDED, ("prose",), is_embedded=True, most_rows=256, sizes=(256,)),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """What a round took.

    Attributes:
        wall_s, cpu_s: Its time, and the processor time of this process.
        num_tokens: The tokens of its answers.
        texts: The answers.
        counts: How much the engine's counters grew.
    """

    wall_s: float
    cpu_s: float
    num_tokens: int
    texts: list[str]
    counts: Mapping[str, int]


def run(engine: jsg.Engine, waves: Sequence[Wave], more: Mapping[str, Any]) -> Ran:
    """Answers waves, one after another."""
    before, answers = engine.get_server_info(), list[Any]()
    wall, cpu = time.perf_counter(), time.process_time()
    for wave in waves:
        answers += engine.generate([each.prompt for each in wave], [{**each.params, **more} for each in wave])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = engine.get_server_info()
    counts = {name: after[name] - before[name] for name in after if name.startswith("num_")}
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    return Ran(wall, cpu, tokens, [answer["text"] for answer in answers], counts)


def wait_until_measured(engine: jsg.Engine) -> None:
    """Returns when the engine knows what its steps cost, without which its gate lets no drafts pass."""
    while not engine._driver.call(lambda core: core.scheduler.gate.is_open):
        time.sleep(0.1)


def measure(
    report: Report, model: str, engines: Mapping[str, jsg.Engine], name: str, size: int, options: argparse.Namespace
) -> None:
    """Measures a workload with so many requests at once. The first round warms up."""
    workload = WORKLOADS[name]
    sides: dict[str, tuple[jsg.Engine, dict[str, Any]]] = {side: (each, {}) for side, each in engines.items()}
    if name == "json":
        sides[PLAIN] = engines[OFF], {"jump_forward": "off"}
    rounds: dict[str, list[Ran]] = {side: [] for side in sides}
    right, asked = 0, 0
    for engine in engines.values():
        engine.flush_cache()
    for number in range(options.rounds + 1):
        draw = Draw(f"{name} {number}", is_embedded=MODELS[model].is_embedded)
        waves = workload.waves(draw, size, options.requests)
        for side, (engine, more) in sides.items():
            if workload.is_asked_before:
                run(engine, waves, more)
            if side == PLAIN:
                engine.flush_cache()  # the side that shares the engine has cached these prompts
            ran = run(engine, waves, more)
            if number:
                rounds[side].append(ran)
        answers = [each.answer for wave in waves for each in wave]
        if number and answers[0] is not None:
            texts = rounds[AUTO][-1].texts
            right += sum(text == answer for text, answer in zip(texts, answers, strict=True))
            asked += len(answers)
    facts = {"right": right / asked} if asked else {}
    add(report, f"{model} B={size} {name}", workload, size, rounds, facts)


def add(
    report: Report, label: str, workload: Workload, size: int, rounds: Mapping[str, list[Ran]], facts: dict[str, Any]
) -> None:
    """Adds the steps per token, the drafts by source, and how much faster drafts are."""
    counts = {side: total([ran.counts for ran in found]) for side, found in rounds.items()}
    tokens = {side: sum(ran.num_tokens for ran in found) for side, found in rounds.items()}
    per_token = {side: counts[side]["num_steps"] * size / tokens[side] for side in rounds}
    by_source = {
        source: f"{counts[AUTO][f'num_drafts_taken_{source}']}/{counts[AUTO][f'num_drafts_{source}']}"
        for source in SOURCES
        if counts[AUTO][f"num_drafts_{source}"]
    }
    pairs = [*zip(rounds[AUTO], rounds[OFF], strict=True)]
    same = statistics.fmean(
        one == other for left, right in pairs for one, other in zip(left.texts, right.texts, strict=True)
    )
    targets = {} if size > 1 or workload.target is None else {"target": f"<= {workload.target}"}
    gate = f"{counts[AUTO]['num_gate_open']}/{counts[AUTO]['num_gate_shut']}"
    report.add(
        f"{label}: steps per token",
        "steps",
        [per_token[AUTO]],
        **{f"without_{side}": value for side, value in per_token.items() if side != AUTO},
        **facts | by_source,
        gate_open_shut=gate,
        same=same,
        tokens=tokens[AUTO],
        **targets,
    )
    gain = f">= {workload.gain if size == 1 else min(workload.gain, 1.0)}"
    for side in rounds:
        if side == AUTO:
            continue
        for unit, key in (("wall", "wall_s"), ("cpu", "cpu_s")):
            ratios = [
                (getattr(other, key) / other.num_tokens) / (getattr(own, key) / own.num_tokens)
                for own, other in zip(rounds[AUTO], rounds[side], strict=True)
            ]
            more = {"target": gain} if unit == "wall" and (side == PLAIN or PLAIN not in rounds) else {}
            ms = 1000 * sum(getattr(ran, key) for ran in rounds[side]) / tokens[side]
            report.add(f"{label}: {side} / {AUTO}, {unit}", "x", ratios, ms_per_token_without=ms, **more)


def total(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The sums of counters."""
    return {name: sum(each[name] for each in counts) for name in counts[0]}


def two_engines(stack: contextlib.ExitStack, path: str, **knobs: Any) -> dict[str, jsg.Engine]:
    """An engine with drafts and one without, in which nothing is left to compile or to measure."""
    engines = {
        side: stack.enter_context(settled.compiled_engine(path, dtype="float32", speculative=side, **knobs))
        for side in (AUTO, OFF)
    }
    wait_until_measured(engines[AUTO])
    return engines


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.drafts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=",".join(MODELS), help="some of these, separated by commas")
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, separated by commas")
    parser.add_argument("--batch", help="numbers of requests at once, separated by commas; default: 1,16, and 256")
    parser.add_argument("--requests", type=int, default=LEAST_REQUESTS, help="the least requests of a round")
    parser.add_argument("--rounds", type=int, default=5, help="how many times each side is timed")
    parser.add_argument("--directory", type=Path, default=ROOT / ".cache" / "drafts", help="where models are kept")
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    options = parser.parse_args(arguments)
    report = Report("bench.drafts", arguments, options.output)
    for name in options.model.split(","):
        model = MODELS[name]
        sizes = [int(size) for size in options.batch.split(",")] if options.batch else model.sizes
        with contextlib.ExitStack() as stack:
            path, rows = str(model.path(options.directory)), model.most_rows
            pool = {"max_running_requests": rows, "max_total_tokens": 512 * rows, "context_length": 2048}
            engines = two_engines(stack, path, **pool)
            for workload in options.only.split(","):
                for size in sizes if workload in model.workloads else ():
                    measure(report, name, engines, workload, size, options)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
