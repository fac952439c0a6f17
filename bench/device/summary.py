"""Puts figures beside their floors and targets, and derives results from several figures."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.device.plan import PLANS, TPU, Plan
from bench.report import Figure


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One target.

    Attributes:
        what: What should be reached.
        figure: What was measured, as text.
        ratio: The number that is compared with the target.
        at_least: The target for `ratio`. If the figure should be small, both are reciprocals.
        reference: The floor, or whatever else the figure is compared with.
        is_across_calls: Whether two figures were measured in different calls of the program, between which a device
            may have become warmer or slower.
    """

    what: str
    figure: str
    ratio: float
    at_least: float
    reference: str
    is_across_calls: bool = False

    @property
    def is_met(self) -> bool:
        """Whether the target is reached."""
        return self.ratio >= self.at_least

    def as_json(self) -> dict[str, Any]:
        """All fields, and whether the target is reached."""
        return dataclasses.asdict(self) | {"is_met": self.is_met}


def targets(figures: Sequence[Figure]) -> list[Row]:
    """A row for each target whose figures were measured, on any device and shape."""
    found = Figures(figures)
    rows = (_steps, _attention, _states, _engine, _torch, _vllm, _start)
    return [row for each in rows for row in each(found)]


def not_meant(plan: Plan) -> str:
    """Why the targets are not meant for what was measured; empty if they are."""
    whole = PLANS[plan.name].shape["num_hidden_layers"]
    if not plan.is_for_accelerators:
        return "The targets are those of an H200 at the shape of plan 8b, not of this run, whose speeds say little."
    if plan.name == TPU.name:
        return "The targets are those of an H200, and a TPU is measured beside its floors only."
    if (layers := plan.shape["num_hidden_layers"]) < whole:
        return (
            f"The model has {layers} of its {whole} layers here, because no more fit. Floors are those of these "
            "layers, and tokens per second are more than the whole model would give."
        )
    return ""


def table(rows: Sequence[Row]) -> str:
    """Rows as lines of fixed columns."""
    lines = [f"{'target':<50}{'figure':>22}{'beside':>26}{'ratio':>9}{'wanted':>9}"]
    for row in rows:
        verdict = ("met" if row.is_met else "missed") + (", of two calls" if row.is_across_calls else "")
        lines.append(
            f"{row.what:<50}{row.figure:>22}{row.reference:>26}{row.ratio:>9.3g}{row.at_least:>9.3g}  {verdict}"
        )
    return "\n".join(lines)


class Figures:
    """Finds figures by their facts."""

    def __init__(self, figures: Iterable[Figure]):
        self._figures = tuple(figures)

    def all(self, **facts: Any) -> list[Figure]:
        """The figures that have all these facts."""
        return [figure for figure in self._figures if facts.items() <= _hashable(figure.facts)]

    def first(self, **facts: Any) -> Figure | None:
        """The first figure that has all these facts."""
        return next(iter(self.all(**facts)), None)

    def fastest(self, **facts: Any) -> Figure | None:
        """The figure with the most tokens per second."""
        return max(self.all(**facts), key=lambda figure: figure.facts["tokens_per_s"], default=None)


def _hashable(facts: dict[str, Any]) -> Any:
    return {name: value for name, value in facts.items() if isinstance(value, str | int | float | bool)}.items()


def _are_apart(*figures: Figure) -> bool:
    return len({figure.facts.get("call") for figure in figures}) > 1


def _rate(figure: Figure) -> str:
    return f"{figure.facts['tokens_per_s']:.0f} tokens/s"


def _steps(found: Figures) -> Iterator[Row]:
    for figure in found.all(kind="decode"):
        if "floor" in figure.facts:
            floor = f"floor {figure.facts['floor_tokens_per_s']:.0f} tokens/s"
            yield Row(f"bare step, B={figure.facts['rows']}", _rate(figure), figure.facts["of_floor"], 0.8, floor)
    if (best := found.fastest(kind="prefill")) is not None:
        wanted = 35_000
        yield Row("prefill", _rate(best), best.facts["tokens_per_s"] / wanted, 1.0, f"target {wanted} tokens/s")


def _attention(found: Figures) -> Iterator[Row]:
    for figure in found.all(kind="attention"):
        if "floor" in figure.facts:
            best = f"{max(figure.samples):.0f} GB/s"
            yield Row(figure.name, best, figure.facts["of_floor"], 0.8, f"copy {figure.facts['floor']:.0f} GB/s")
    if (empty := found.first(kind="attention-cascade", case="nothing shared")) is not None:
        ratio = empty.facts["times_plain"]
        yield Row("cascade with nothing to share", f"{empty.smallest:.1f} us", 1 / ratio, 1 / 1.02, f"x {ratio:.3f}")


def _states(found: Figures) -> Iterator[Row]:
    for figure in found.all(kind="states", length=1):
        if "floor" in figure.facts:
            floor = f"floor {1e3 * figure.facts['floor']:.1f} us"
            yield Row(figure.name, f"{1e3 * figure.smallest:.1f} us", figure.facts["of_floor"], 1 / 1.15, floor)


def _engine(found: Figures) -> Iterator[Row]:
    for figure in found.all(kind="engine"):
        rows = figure.facts["rows"]
        if (bare := found.first(kind="decode", rows=rows)) is not None:
            ratio = bare.smallest / figure.smallest
            what = f"through the engine, B={rows}"
            yield Row(what, _rate(figure), ratio, 0.95, f"bare {_rate(bare)}", _are_apart(figure, bare))
    gain = found.first(kind="cascade-gain")
    with_it, without = (found.first(kind="engine-load", load="shared", shares=shares) for shares in (True, False))
    if gain is not None and gain.facts["can_share"] and with_it is not None and without is not None:
        yield Row("shared prefix, with cascade", _rate(with_it), gain.smallest, 1.5, f"without {_rate(without)}")


def _torch(found: Figures) -> Iterator[Row]:
    ours, theirs = found.first(kind="engine-alone"), found.fastest(kind="torch-alone")
    if ours is not None and theirs is not None:
        ratio = ours.facts["tokens_per_s"] / theirs.facts["tokens_per_s"]
        reference, is_apart = f"PyTorch {_rate(theirs)}", _are_apart(ours, theirs)
        yield Row("against PyTorch, one request", _rate(ours), ratio, 1.0, reference, is_apart)
    for load, wanted in (("concurrent", 3.0), ("shared", 6.0)):
        ours = found.first(kind="engine-load", load=load, shares=True)
        theirs = found.fastest(kind="torch-load", load=load)
        if ours is not None and theirs is not None:
            ratio = ours.facts["tokens_per_s"] / theirs.facts["tokens_per_s"]
            reference, is_apart = f"PyTorch {_rate(theirs)}", _are_apart(ours, theirs)
            yield Row(f"against PyTorch, {load} load", _rate(ours), ratio, wanted, reference, is_apart)


def _vllm(found: Figures) -> Iterator[Row]:
    for ours in found.all(kind="http", server="jsg"):
        load = ours.facts["load"]
        if (theirs := found.first(kind="http", server="vllm", load=load)) is not None:
            ratio = ours.facts["tokens_per_s"] / theirs.facts["tokens_per_s"]
            reference, is_apart = f"vLLM {_rate(theirs)}", _are_apart(ours, theirs)
            yield Row(f"against vLLM over HTTP, {load}", _rate(ours), ratio, 1.0, reference, is_apart)


def _start(found: Figures) -> Iterator[Row]:
    if (warm := found.first(kind="start-warm")) is not None:
        yield Row("start, warm cache, weights aside", f"{warm.smallest:.1f} s", 30 / warm.smallest, 1.0, "target 30 s")
