"""The report of a run of `bench.paper`: a table for people, and plots after figures 5, 6 and 8 of the paper.

`python -m bench.paper.report FOLDER` makes them again from the samples.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.paper.arms import ARMS, FULL
from bench.paper.programs import WORKLOADS
from bench.plots import save

Run = Mapping[str, Any]


def facts_by_workload(run: Run) -> dict[str, dict[str, dict[str, Any]]]:
    """For each workload and engine the facts of its figure, with the median wall time as `wall_s`."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for figure in run["figures"]:
        facts = figure["facts"]
        if "target" in facts:
            found.setdefault(facts["workload"], {})[facts["target"]] = facts | {"wall_s": figure["median"]}
    return found


def markdown(run: Run) -> str:
    """One table for each question that a reader has."""
    found = facts_by_workload(run)
    header = run["header"]
    names = list(dict.fromkeys(name for engines in found.values() for name in engines))
    peers = [name for name in names if name not in ARMS]
    arms = [name for name in names if name in ARMS and name != FULL]
    rows = [(workload, engines) for workload, engines in found.items() if FULL in engines]
    parts = [
        f"`{header['command']}`, {header['date'][:10]}, {header['cpu']}, {header['model']} {header['dtype']}, "
        f"commit {header['commit']}.",
        "This engine with everything on.",
        table(
            "workload programs programs/s alone calls prompt computed generated hit best".split(),
            [ours(workload, engines[FULL]) for workload, engines in rows],
        ),
    ]
    if arms:
        parts += [
            "; ".join(f"`{arm}`: {ARMS[arm].title}" for arm in arms) + ".",
            "The wall time of each arm divided by that of `full`; above 1 the arm is slower.",
            table(["workload", *arms], [[w, *(ratio(e, arm, "wall_s") for arm in arms)] for w, e in rows]),
            "The hit rate of each arm.",
            table(
                ["workload", FULL, *arms],
                [[w, *(share(e.get(arm, {}).get("hit_rate")) for arm in (FULL, *arms))] for w, e in rows],
            ),
        ]
    if peers:
        parts += [
            "The wall time of each peer divided by that of this engine, for all programs at once.",
            table(["workload", *peers], [[w, *(ratio(e, peer, "wall_s") for peer in peers)] for w, e in rows]),
            "The same for one program alone.",
            table(["workload", *peers], [[w, *(ratio(e, peer, "alone_s") for peer in peers)] for w, e in rows]),
        ]
    return "\n\n".join(parts) + "\n"


def ours(workload: str, facts: Mapping[str, Any]) -> list[str]:
    """The row of this engine."""
    counts = [str(facts[name]) for name in ("calls", "prompt_tokens", "computed_tokens", "generated_tokens")]
    speed = [f"{facts['programs_per_s']:.3g}", f"{facts['alone_s']:.3g} s"]
    hits = [share(facts["hit_rate"]), share(facts["best_hit_rate"])]
    return [WORKLOADS[workload].title, str(facts["programs"]), *speed, *counts, *hits]


def ratio(engines: Mapping[str, Mapping[str, Any]], name: str, field: str) -> str:
    """A time divided by that of `full`; a dash where the engine was left out."""
    return f"{engines[name][field] / engines[FULL][field]:.2f}" if name in engines else "–"


def share(value: float | None) -> str:
    """A share in percent; a dash where it is not known."""
    return "–" if value is None else f"{100 * value:.1f} %"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(run: Run) -> dict[str, Any]:
    """The plots by name, of what the run has."""
    from matplotlib.figure import Figure

    found = {workload: engines for workload, engines in facts_by_workload(run).items() if FULL in engines}
    plots: dict[str, Any] = {}

    def bars(title: str, value: Any) -> Any:
        names = list(dict.fromkeys(name for engines in found.values() for name in engines))
        figure = Figure(figsize=(9, 1 + 0.12 * len(found) * len(names)), layout="constrained")
        axes = figure.subplots()
        height = 0.85 / len(names)
        for number, name in enumerate(names):
            drawn = [
                (index + number * height, drawable)
                for index, engines in enumerate(found.values())
                if name in engines and (drawable := value(engines[name], engines[FULL])) is not None
            ]
            axes.barh(
                [place for place, _ in drawn],
                [width for _, width in drawn],
                height,
                label=name,
                color=f"C{number % 10}",
            )
        axes.set_yticks([index + 0.4 for index in range(len(found))], [WORKLOADS[name].title for name in found])
        axes.invert_yaxis()
        axes.set_xlabel(title)
        axes.legend(fontsize=7, loc="lower right")
        return figure

    if found:
        plots["throughput"] = bars("programs/s beside `full`", lambda its, full: full["wall_s"] / its["wall_s"])
        plots["latency"] = bars("one program alone, s", lambda its, _: its["alone_s"])
        plots["hits"] = bars("hit rate", lambda its, _: its["hit_rate"])
    batches = [figure["facts"] for figure in run["figures"] if "forgotten" in figure["facts"]]
    if batches:
        figure = Figure(figsize=(8, 3), layout="constrained")
        left, right = figure.subplots(1, 2)
        rates = [100 * facts["hit_rate"] for facts in batches]
        left.plot(rates, [facts["generated_tokens"] / facts["steps"] for facts in batches], "o-")
        left.set_ylabel("tokens in a step")
        right.plot(rates, [facts["programs_per_s"] for facts in batches], "o-")
        right.set_ylabel("programs/s")
        for axes in (left, right):
            axes.set_xlabel("hit rate, %")
        plots["batches"] = figure
    return plots


def write(run: Run, folder: Path) -> None:
    """Writes the table and the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.md").write_text(markdown(run), encoding="utf-8")
    for name, figure in draw(run).items():
        save(figure, folder / f"{name}.svg")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.paper.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the --output of a run")
    folder = parser.parse_args().folder
    write(json.loads((folder / "run.json").read_text(encoding="utf-8")), folder)


if __name__ == "__main__":
    main()
