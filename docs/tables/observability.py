"""The tables of docs/observability.md: every metric, its other names, and the fields of a line of the log."""

import inspect
import re
from collections.abc import Callable

from jsg.server.telemetry.aliases import ALIASES
from jsg.server.telemetry.engine_stats import ALL_SERIES
from jsg.server.telemetry.metrics import Metrics
from jsg.server.telemetry.request_log import LogLine
from jsg.server.telemetry.series import Series
from jsg.waits import WHY, WaitReason


def metrics() -> str:
    """One row for each metric."""

    def row(series: Series) -> str:
        return f"| `{series.name}` | {series.kind} | {', '.join(f'`{n}`' for n in series.labels)} | {series.text} |"

    rows = [row(series) for series in (*Metrics().series(), *ALL_SERIES)]
    return "\n".join(["| name | type | labels | |", "|---|---|---|---|", *rows])


def aliases() -> str:
    """One row for each alias."""
    rows = ["| theirs | ours |", "|---|---|"]
    for server in sorted(ALIASES):
        for alias in ALIASES[server]:
            constants = ", ".join(f'{name}="{value}"' for name, value in alias.constants.items())
            rows.append(f"| `{alias.name}{f'{{{constants}}}' if constants else ''}` | `{alias.source}` |")
    return "\n".join(rows)


def log_fields() -> str:
    """One row for each field of a line, or for several that are described together."""
    attributes = inspect.cleandoc(LogLine.__doc__ or "").split("Attributes:\n")[1]
    pattern = r"^    ([\w, ]+): (.+?)(?=\n    [\w, ]+: |\Z)"
    rows = [
        f"| {', '.join(f'`{name}`' for name in names.split(', '))} | {re.sub(r'\s+', ' ', text)} |"
        for names, text in re.findall(pattern, attributes, re.DOTALL | re.MULTILINE)
    ]
    return "\n".join(["| field | |", "|---|---|", *rows])


def waits() -> str:
    """One row for each thing that a request may wait for."""
    rows = [f"| `{reason.value}` | {WHY[reason]} |" for reason in WaitReason]
    return "\n".join(["| reason | |", "|---|---|", *rows])


TABLES: dict[str, Callable[[], str]] = {"waits": waits, "metrics": metrics, "aliases": aliases, "log": log_fields}
