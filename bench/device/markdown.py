"""The report of a run for people: what to do next, figures beside their targets, and what ran. No JAX here."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.device import advice, summary
from bench.device.results import Record, figures_of

SHOWN_FIGURES = 40
"""So many figures of a part are in the report; `run.json` has all."""


def report(run: advice.Run, *, head: Mapping[str, Any], not_meant: str) -> str:
    """The whole report as Markdown. `not_meant` is why the targets are not for this run, if they are not."""
    sections = [
        _title(run, head),
        _next(run),
        _targets(run, not_meant=not_meant),
        _parts(run),
        _failures(run),
        _figures(run),
    ]
    return "\n\n".join("\n".join(section) for section in sections) + "\n"


def _title(run: advice.Run, head: Mapping[str, Any]) -> Iterator[str]:
    yield f"# {run.card}: plan {head['plan']}"
    yield ""
    yield f"Commit {head['commit']}, jax {head['versions'].get('jax', '?')}, {head['cpu']}, {head['date']}."
    rates = {record.call: record.rates for record in run.records.values() if record.rates is not None}
    for call, (copy, matmul) in sorted(rates.items()):
        yield f"Floors of call {call}: copy bandwidth {copy / 1e9:.4g} GB/s, matmul {matmul / 1e12:.4g} TFLOP/s."
    commits = sorted({record.commit for record in run.records.values()})
    if len(commits) > 1:
        yield f"The code of jsg is the same in all parts, though they ran at several commits: {', '.join(commits)}."
    yield "Weights are random. `python -m bench.device --help` says what each part is."


def _next(run: advice.Run) -> Iterator[str]:
    yield "## What to do next"
    yield ""
    for number, each in enumerate(advice.advise(run), 1):
        yield f"{number}. **{_sentence(each.what)}** {_sentence(each.do)} Why: {each.why}."


def _targets(run: advice.Run, *, not_meant: str) -> Iterator[str]:
    yield "## Figures beside floors and targets"
    yield ""
    if not_meant:
        yield from (not_meant, "")
    rows = summary.targets(figures_of(run.records.values()))
    cells = [
        [row.what, row.figure, row.reference, f"{row.ratio:.3g}", f"{row.at_least:.3g}", _verdict(row)] for row in rows
    ]
    yield from _table(["target", "figure", "beside", "ratio", "wanted", ""], cells)
    if any(row.is_across_calls for row in rows):
        yield ""
        yield "† The two figures are of different calls, between which a device may have changed."


def _verdict(row: summary.Row) -> str:
    return ("met" if row.is_met else "**missed**") + (" †" if row.is_across_calls else "")


def _parts(run: advice.Run) -> Iterator[str]:
    yield "## What ran"
    yield ""
    doubts = advice.distrusted(run)
    cells = []
    for name in run.parts:
        record = run.records.get(name)
        reason = run.omitted.get(name, "")
        if record is not None:
            note = doubts.get(name, "")
            seconds = f"{record.seconds:.0f} s"
            cells.append([name, _state(record), str(record.call), seconds, str(len(record.figures)), note])
        elif reason:
            cells.append([name, "did not run", "", "", "", reason])
    yield from _table(["part", "state", "call", "time", "figures", "note"], cells)


def _state(record: Record) -> str:
    if not record.has_ended:
        return "**the run ended in it**"
    if record.failures:
        kinds = dict.fromkeys(failure.kind.value for failure in record.failures)
        return f"**failed** ({', '.join(kinds)})"
    return "cut off" if record.was_too_short else "done"


def _failures(run: advice.Run) -> Iterator[str]:
    yield "## What failed or was left out"
    yield ""
    lines = [
        line
        for record in run.records.values()
        for line in [*(f"{each.reason} ({each.kind.value})" for each in record.failures), *record.left_out]
    ]
    yield from (f"- {_escaped(line)}" for line in lines or ["nothing"])


def _figures(run: advice.Run) -> Iterator[str]:
    yield "## Figures"
    doubts = advice.distrusted(run)
    for name, record in run.records.items():
        if record.figures:
            yield ""
            yield f"### {name}, call {record.call}" + (f": {doubts[name]}" if name in doubts else "")
            yield ""
            shown = record.figures[:SHOWN_FIGURES]
            cells = [
                [figure.name, f"{figure.smallest:.4g}", f"{figure.median:.4g}", figure.unit, _floor(figure.facts)]
                for figure in shown
            ]
            yield from _table(["figure", "min", "median", "unit", "of its floor"], cells)
            if len(shown) < len(record.figures):
                yield f"\nand {len(record.figures) - len(shown)} more in run.json"


def _floor(facts: Mapping[str, Any]) -> str:
    return f"{facts['of_floor']:.0%}" if "of_floor" in facts else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _sentence(text: str) -> str:
    text = _escaped(text)
    return text[:1].upper() + text[1:] + "."


def _escaped(text: str) -> str:
    """Text whose bars and line ends do not end a cell, and whose names are not read as emphasis or tags."""
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
