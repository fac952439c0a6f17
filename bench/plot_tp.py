"""Draws the results of `bench.tp`: the time of each step on 1 to 8 H200s.

    python -m bench.plot_tp bench/results/RUN.json -o docs/tensor-parallel.svg

A bar is a calculated time and not a measurement. Its lower part is one device's time to read weights and keys, or to
compute. Above it are the exchanges, at the latency of two GPUs and at that of a ring. A bar is hatched if the weights
leave no room for a request. It needs matplotlib.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure

from bench.plots import save

PARTS = (("one device's part", "C0"), ("exchanges", "C1"), ("if latencies are a ring's", "C3"))


def draw(run: dict[str, Any]) -> Figure:
    """Draws a row for each model and a column for each step. Raises ValueError if the run has no steps."""
    steps = [figure for figure in run["figures"] if figure["facts"]["kind"] == "step"]
    if not steps:
        raise ValueError("the run has no steps; is it one of bench.tp?")
    models, names = (list(dict.fromkeys(each["facts"][fact] for each in steps)) for fact in ("model", "step"))
    memory = [figure["facts"] for figure in run["figures"] if figure["facts"]["kind"] == "memory"]
    fits = {(facts["model"], facts["devices"]): facts["kv_tokens"] > 0 for facts in memory}
    figure = Figure(figsize=(4 * len(names), 3.2 * len(models)), layout="constrained")
    rows = figure.subplots(len(models), len(names), squeeze=False)
    for model, row in zip(models, rows, strict=True):
        for name, axes in zip(names, row, strict=True):
            chosen = [each for each in steps if (each["facts"]["model"], each["facts"]["step"]) == (model, name)]
            _draw_step(axes, chosen, [fits[model, each["facts"]["devices"]] for each in chosen])
            axes.set_title(f"{model}: {name}", fontsize=9)
    rows[0][0].legend(fontsize=7)
    return figure


def _draw_step(axes: Axes, chosen: Sequence[dict[str, Any]], fits: Sequence[bool]) -> None:
    counts = [str(each["facts"]["devices"]) for each in chosen]
    floors = [each["facts"]["floor_ms"] for each in chosen]
    low, high = ([each["samples"][index] for each in chosen] for index in (0, 1))
    bottom = [0.0] * len(chosen)
    for (label, colour), tops in zip(PARTS, (floors, low, high), strict=True):
        heights = [top - base for top, base in zip(tops, bottom, strict=True)]
        bars = axes.bar(counts, heights, bottom=bottom, label=label, color=colour)
        for bar, has_room in zip(bars, fits, strict=True):
            bar.set(hatch=None if has_room else "//", alpha=1 if has_room else 0.4)
        bottom = tops
    last = axes.containers[-1]
    assert isinstance(last, BarContainer)
    axes.bar_label(last, [f"{top:.3g}" for top in high], fontsize=7)
    axes.margins(y=0.1)
    axes.set(xlabel="H200s", ylabel="ms")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot_tp", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="result file of bench.tp (JSON)")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="file for the image; its ending names the format"
    )
    options = parser.parse_args(arguments)
    save(draw(json.loads(options.run.read_text(encoding="utf-8"))), options.output)


if __name__ == "__main__":
    main(sys.argv[1:])
