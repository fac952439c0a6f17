"""Draws how fast jsg is beside each peer: `python -m bench.peers.plot bench/results/RUN.json -o docs/peers.svg`.

A bar is the median of the peer's wall time divided by jsg's in the same round, and its line the range over the rounds.
To the right of 1 jsg is faster. It needs matplotlib.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.peers.workloads import TITLES
from bench.plots import save


def draw(run: dict[str, Any]) -> Figure:
    """Draws the ratios of a run. Without a peer there are none, and the plot is empty."""
    found = [figure for figure in run["figures"] if "peer" in figure["facts"]]
    names = list(dict.fromkeys(figure["facts"]["workload"] for figure in found))
    peers = list(dict.fromkeys(figure["facts"]["peer"] for figure in found))
    figure = Figure(figsize=(8, 1.2 + 0.22 * max(1, len(found))), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / max(1, len(peers))
    for number, peer in enumerate(peers):
        chosen = [each for each in found if each["facts"]["peer"] == peer]
        places = [names.index(each["facts"]["workload"]) + (number - (len(peers) - 1) / 2) * height for each in chosen]
        middles = [each["median"] for each in chosen]
        low = [each["median"] - min(each["samples"]) for each in chosen]
        high = [max(each["samples"]) - each["median"] for each in chosen]
        bars = axes.barh(places, middles, height, xerr=[low, high], label=peer, color=f"C{number}")
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=7)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(names)), [TITLES[name] for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("the peer's time / jsg's time")
    if peers:
        axes.legend(fontsize=8)
    header = run["header"]
    axes.set_title(f"{header['cpu']}, {header['shape']} {header['dtype']}, {header['date'][:10]}", fontsize=9)
    return figure


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="result file of bench.peers (JSON)")
    parser.add_argument("-o", "--output", type=Path, required=True, help="file for the image")
    options = parser.parse_args(arguments)
    save(draw(json.loads(options.run.read_text(encoding="utf-8"))), options.output)


if __name__ == "__main__":
    main(sys.argv[1:])
