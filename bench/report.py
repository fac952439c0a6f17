"""The report of a benchmark: where and how it ran, and every sample, as a table for people and as JSON for machines.

The file is written again after every figure, so an aborted run keeps what it has measured. No JAX here, because
benchmarks of host code import this too.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "numba")


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """One measurement.

    Attributes:
        name: What was measured.
        unit: The unit of the samples.
        samples: All samples in order.
        facts: Further information, such as a target, a floor, or the shape.
    """

    name: str
    unit: str
    samples: tuple[float, ...]
    facts: dict[str, Any]

    @property
    def smallest(self) -> float:
        """The smallest sample. If less is better, it is the one with the least disturbance."""
        return min(self.samples)

    @property
    def median(self) -> float:
        """The median of the samples."""
        return statistics.median(self.samples)

    def as_json(self) -> dict[str, Any]:
        """All fields, with rounded numbers."""
        return {
            "name": self.name,
            "unit": self.unit,
            "min": _rounded(self.smallest),
            "median": _rounded(self.median),
            "samples": [_rounded(sample) for sample in self.samples],
            "facts": self.facts,
        }


class Report:
    """The figures of one run in the order in which they are measured. It prints each one at once."""

    def __init__(self, module: str, arguments: Sequence[str], output: Path | None, **header: Any):
        """Records the circumstances of the run.

        Args:
            module: The module that runs, as in `python -m bench.engine`.
            arguments: Its command line.
            output: JSON file; None for no file.
            **header: Further circumstances, such as the device.
        """
        self.header = describe_run(module, arguments) | header
        self.figures: list[Figure] = []
        self._output = output
        for name, value in self.header.items():
            print(f"{name}: {value}", flush=True)

    def add(self, name: str, unit: str, samples: Iterable[float], **facts: Any) -> Figure:
        """Adds and prints a figure, and writes the file."""
        figure = Figure(name, unit, tuple(samples), facts)
        self.figures.append(figure)
        print(table([figure], with_head=len(self.figures) == 1), flush=True)
        self._write()
        return figure

    def close(self) -> None:
        """Records the machine's load at the end, and prints the table."""
        self.header["load_average_at_end"] = _load_average()
        self._write()
        print("\n" + table(self.figures))

    def _write(self) -> None:
        if self._output is None:
            return
        self._output.parent.mkdir(parents=True, exist_ok=True)
        content = {"header": self.header, "figures": [figure.as_json() for figure in self.figures]}
        partial = self._output.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self._output)


def table(figures: Sequence[Figure], *, with_head: bool = True) -> str:
    """Figures as lines of fixed columns."""
    lines = [f"{'figure':<52}{'min':>10}{'median':>10}  {'unit':<8}{'n':>4}  facts"] if with_head else []
    for figure in figures:
        facts = ", ".join(f"{name.replace('_', ' ')} {_rounded(value)}" for name, value in figure.facts.items())
        numbers = f"{_rounded(figure.smallest):>10}{_rounded(figure.median):>10}"
        lines.append(f"{figure.name:<52}{numbers}  {figure.unit:<8}{len(figure.samples):>4}  {facts}")
    return "\n".join(lines)


def describe_run(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Date, command, commit, hardware, versions and load. Of paths in the command only the last part is kept."""
    shown = [Path(argument).name if argument.startswith("/") else argument for argument in arguments]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", module, *shown]),
        "commit": commit(),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "versions": _versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "load_average": _load_average(),
    }


def commit() -> str:
    """The commit of the working tree, with a mark if the tree differs from it; "unknown" outside a repository."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + (" (changed)" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or sys.platform
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _load_average() -> list[float]:
    return [round(load, 2) for load in os.getloadavg()]


def _rounded(value: Any) -> Any:
    """Four significant digits for a float; anything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value
