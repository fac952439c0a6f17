"""Measures how processor time grows: `python -m bench.growth [--only WORD ...] [--quick] [--output FILE]`.

Each curve is measured at several sizes, and is held to a bound of its exponent and of its longest single call; see
`bench/growth/curve.py`. The exit status is 1 where a curve is beyond a bound. Such a curve is measured again before,
because other processes share caches and memory with this one.
"""

import argparse
import importlib
import json
import math
import pkgutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from bench import growth
from bench.growth.curve import Curve, measure
from bench.report import Report

ATTEMPTS = 3
AddOthers = Callable[..., list[str]]


def all_curves() -> dict[str, tuple[Curve, ...]]:
    """The curves of each topic."""
    names = sorted(module.name for module in pkgutil.iter_modules(growth.__path__) if module.name != "__main__")
    modules = {name: importlib.import_module(f"bench.growth.{name}") for name in names}
    return {name: module.CURVES for name, module in modules.items() if hasattr(module, "CURVES")}


def others(topics: Iterable[str], words: Sequence[str]) -> list[AddOthers]:
    """What topics measure beside curves: their functions `add_others`, of the topics that are chosen."""
    modules = [sys.modules.get(f"bench.growth.{name}") for name in topics if not words or name in words]
    return [module.add_others for module in modules if module and hasattr(module, "add_others")]


def chosen(topics: dict[str, tuple[Curve, ...]], words: Sequence[str]) -> list[Curve]:
    """The curves whose topic is one of the words, or whose name has one; all without words."""
    return [
        curve
        for topic, curves in topics.items()
        for curve in curves
        if not words or any(word == topic or word in curve.name for word in words)
    ]


def add(report: Report, curve: Curve, *, is_quick: bool) -> list[str]:
    """Measures a curve, again where it is beyond a bound, and adds its figure. Gives what is wrong with it."""
    num_attempts, measured = 0, None
    while measured is None or (measured.problems() and num_attempts < ATTEMPTS):
        num_attempts += 1
        try:
            measured = measure(curve, is_quick=is_quick)
        except Exception as error:
            problem = f"{curve.name}: it ended with {type(error).__name__}: {error}"
            report.add(curve.name, "s", [math.nan], error=problem)
            return [problem]
    facts = {
        "sizes": [point.size for point in measured.points],
        "cpu_s": [float(f"{point.cpu_s:.3g}") for point in measured.points],
        "exponent": round(measured.exponent, 2),
        "max_exponent": curve.max_exponent,
        "stall_ms": float(f"{measured.stall_ms:.3g}"),
        "max_stall_ms": curve.max_stall_ms,
        "attempts": num_attempts,
    }
    if measured.work_exponent is not None:
        facts["work"] = [point.work for point in measured.points]
        facts["work_exponent"] = round(measured.work_exponent, 2)
    report.add(curve.name, "s", [measured.points[-1].cpu_s], **facts)
    return measured.problems()


def as_markdown(file: Path) -> str:
    """The figures of a recorded run as a table of a page."""
    lines = ["| | n | CPU time at n | exponent | longest call |", "|---|---|---|---|---|"]
    for figure in json.loads(file.read_text(encoding="utf-8"))["figures"]:
        facts = figure["facts"]
        if "sizes" not in facts:
            continue
        n, cpu_ms = f"{facts['sizes'][-1]:,}".replace(",", " "), 1e3 * facts["cpu_s"][-1]
        stall = "" if facts["max_stall_ms"] is None else f"{facts['stall_ms']:.2g} ms"
        lines.append(f"| {figure['name']} | {n} | {cpu_ms:.3g} ms | {facts['exponent']:.2f} | {stall} |")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    topics = all_curves()
    parser.add_argument(
        "--only", nargs="+", default=[], help=f"topics, of {', '.join(topics)}, or words of curves' names"
    )
    parser.add_argument("--quick", action="store_true", help="measure each size once, without the largest")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="print the table of such a file, and measure nothing"
    )
    options = parser.parse_args(arguments)
    if options.markdown:
        print(as_markdown(options.markdown))
        return 0
    curves = chosen(topics, options.only)
    if not curves:
        parser.error(f"no curve is called by {' or '.join(options.only)}; topics: {', '.join(topics)}")
    report = Report("bench.growth", arguments, options.output)
    problems = [problem for curve in curves for problem in add(report, curve, is_quick=options.quick)]
    for add_others in others(topics, options.only):
        problems += add_others(report, is_quick=options.quick)
    report.close()
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
