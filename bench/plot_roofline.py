"""Draws the figures of a `bench.device` run as a roofline plot.

    python -m bench.plot_roofline bench/results/RUN.json -o docs/roofline.svg

The left panel is the roofline: operations per byte that is moved, and operations per second. The sloped roof is copy
bandwidth, and the flat roof is the rate of a large matmul, both from the same run. The right panel shows how near each
step and kernel comes to its own floor, which counts matmuls and attention one after the other. It needs matplotlib.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.plots import save

STYLES = {
    "decode": ("o", "C0", "decode step"),
    "decode-shared": ("D", "C3", "decode step, shared prefix"),
    "prefill": ("s", "C1", "prefill"),
    "attention": ("^", "C2", "attention of one layer"),
}
"""The marker, colour and legend of each kind of figure."""
MOST_BARS = 24


class Point(NamedTuple):
    """One figure: operations per byte, operations per second, and how near it comes to its floor."""

    kind: str
    name: str
    intensity: float
    flops_per_s: float
    of_floor: float | None


def points(figures: Sequence[dict[str, Any]]) -> list[Point]:
    """The figures that have the bytes that they moved and the operations that they computed."""
    found = []
    for figure in figures:
        facts = figure["facts"]
        if facts.get("kind") in STYLES:
            seconds = facts.get("ms", figure["min"]) / 1e3
            intensity = facts["num_flops"] / facts["num_bytes"]
            of_floor = facts.get("of_floor")
            found.append(Point(facts["kind"], figure["name"], intensity, facts["num_flops"] / seconds, of_floor))
    return found


def draw(run: dict[str, Any]) -> Figure:
    """Draws both panels. Raises ValueError if the run has no rates or nothing to draw."""
    best = {figure["facts"].get("kind"): max(figure["samples"]) for figure in run["figures"]}
    found = points(run["figures"])
    if not {"copy", "matmul"} <= set(best) or not found:
        raise ValueError("the run has no rates or no steps; run bench.device with the parts rates and steps")
    bandwidth, rate = best["copy"] * 1e9, best["matmul"] * 1e12
    figure = Figure(figsize=(13, 6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_roofs(left, found, bandwidth, rate)
    _draw_floors(right, [point for point in found if point.of_floor is not None][:MOST_BARS])
    header = run["header"]
    device = header.get("device_kind", header["cpu"])
    figure.suptitle(f"{device}, plan {header['plan']}, {header['date'][:10]}, commit {header['commit']}", fontsize=10)
    return figure


def _draw_roofs(axes: Axes, found: Sequence[Point], bandwidth: float, rate: float) -> None:
    ridge = rate / bandwidth
    low, high = (f(point.intensity for point in found) for f in (min, max))
    low, high = min(low, ridge) / 2, max(high, ridge) * 4
    roof = [(x, min(x * bandwidth, rate) / 1e12) for x in (low, ridge, high)]
    axes.plot(*zip(*roof, strict=True), color="black", linewidth=1)
    axes.annotate(f"copy {bandwidth / 1e9:.0f} GB/s", roof[0], xytext=(6, -2), textcoords="offset points", va="top")
    axes.annotate(f"matmul {rate / 1e12:.3g} TFLOP/s", roof[1], xytext=(0, 5), textcoords="offset points")
    for kind, (marker, colour, label) in STYLES.items():
        chosen = [point for point in found if point.kind == kind]
        if chosen:
            axes.plot(
                [point.intensity for point in chosen],
                [point.flops_per_s / 1e12 for point in chosen],
                marker,
                color=colour,
                label=label,
                alpha=0.8,
            )
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte moved", ylabel="TFLOP/s")
    axes.legend(loc="lower right")


def _draw_floors(axes: Axes, found: Sequence[Point]) -> None:
    names = [point.name for point in found][::-1]
    values = [100 * (point.of_floor or 0) for point in found][::-1]
    bars = axes.barh(names, values, color=[STYLES[point.kind][1] for point in found][::-1])
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=7)
    axes.axvline(80, color="black", linestyle=":", linewidth=1)
    axes.tick_params(axis="y", labelsize=7)
    axes.set(xlim=(0, 110), xlabel="% of the floor")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.plot_roofline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="result file of bench.device (JSON)")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, help="file for the image; its ending names the format"
    )
    options = parser.parse_args(arguments)
    save(draw(json.loads(options.run.read_text(encoding="utf-8"))), options.output)


if __name__ == "__main__":
    main(sys.argv[1:])
