"""Measures the cost and the gain of the language: `python -m bench.lang`. The machine should be quiet.

Parts:
    sharing: tree of thought, judge and skeleton, in parallel and serially, with and without the radix cache
    overhead: milliseconds of each primitive, and memory of programs in flight
    round-trips: a program sent to a server as a whole, and one interpreted over HTTP, with the embedded model
    select: `select` in one call, and in three
    lines: lines of code of programs, and of the same programs with the raw client
    reordering: what `unordered` saves in a compiled batch

The parts sharing, select and reordering run a model of 100 million parameters with random weights; `--model tiny` is
for a quick try.
"""

import argparse
import datetime
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import report as reporting
from bench.lang.line_counts import measure_lines
from bench.lang.overhead import measure_in_flight, measure_primitives
from bench.lang.reordering import measure_reordering
from bench.lang.round_trips import measure_round_trips
from bench.lang.selecting import measure_select
from bench.lang.sharing import measure_sharing, model_100m
from bench.lang.workloads import Sizes

KNOBS = {"max_running_requests": 32, "max_total_tokens": 24_576, "context_length": 2048}


class Bench(NamedTuple):
    """What the parts share."""

    report: reporting.Report
    model: str
    rounds: int
    sizes: Sizes
    num_in_flight: int


def sharing(bench: Bench) -> None:
    measure_sharing(bench.report, bench.model, rounds=bench.rounds, sizes=bench.sizes, **KNOBS)


def overhead(bench: Bench) -> None:
    measure_primitives(bench.report, rounds=2 * bench.rounds)
    measure_in_flight(bench.report, count=bench.num_in_flight)


def round_trips(bench: Bench) -> None:
    measure_round_trips(bench.report, rounds=4 * bench.rounds)


def select(bench: Bench) -> None:
    measure_select(bench.report, bench.model, rounds=4 * bench.rounds, **KNOBS)


def reordering(bench: Bench) -> None:
    measure_reordering(bench.report, bench.model, rounds=bench.rounds, sizes=bench.sizes, **KNOBS)


def lines(bench: Bench) -> None:
    measure_lines(bench.report)


PARTS: dict[str, Callable[[Bench], None]] = {
    "sharing": sharing,
    "overhead": overhead,
    "round-trips": round_trips,
    "select": select,
    "reordering": reordering,
    "lines": lines,
}


MODEL_PARTS = {"sharing", "select", "reordering"}
"""The parts that run the model of `--model`."""


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    with tempfile.TemporaryDirectory() as folder:
        is_made = options.model == "100m" and MODEL_PARTS & set(options.only)
        model = model_100m(Path(folder)) if is_made else options.model
        report = reporting.Report("bench.lang", arguments, options.output, model=options.model)
        sizes = Sizes(options.passage_words, options.thought_tokens, options.depth, options.dimensions)
        bench = Bench(report, model, options.rounds, sizes, options.in_flight)
        for name in options.only:
            PARTS[name](bench)
        report.close()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.lang", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    today = datetime.datetime.now(datetime.UTC).date()
    default = Sizes()
    parser.add_argument(
        "--only", type=_part_names, default=list(PARTS), help="the parts to run, separated by commas; default: all"
    )
    parser.add_argument("--model", default="100m", help="100m, or any model that jsg.Engine can load")
    parser.add_argument(
        "--rounds", type=int, default=5, help="rounds of the part sharing; other parts run a multiple of them"
    )
    parser.add_argument(
        "--passage-words", type=int, default=default.passage_words, help="words of the text that all branches share"
    )
    parser.add_argument("--thought-tokens", type=int, default=default.thought_tokens, help="tokens of each answer")
    parser.add_argument("--depth", type=int, default=default.depth, help="depth of the tree of thought")
    parser.add_argument(
        "--dimensions",
        type=int,
        default=default.num_dimensions,
        help="branches of the judge, and points of the skeleton",
    )
    parser.add_argument("--in-flight", type=int, default=1000, help="number of programs in flight at once")
    parser.add_argument("--output", type=Path, default=reporting.ROOT / "bench" / "results" / f"lang-cpu-{today}.json")
    return parser.parse_args(arguments)


def _part_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"the parts are {', '.join(PARTS)}, but got {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    main(sys.argv[1:])
