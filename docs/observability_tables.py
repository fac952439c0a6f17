"""Writes the tables of docs/observability.md from the code: `python docs/observability_tables.py`.

What stands between two marker lines of the page is made here; a test compares it with what the code says now.
"""

import inspect
import pathlib
import re
from collections.abc import Callable

from jsg.server.telemetry.aliases import ALIASES
from jsg.server.telemetry.engine_stats import ALL_SERIES
from jsg.server.telemetry.metrics import Metrics
from jsg.server.telemetry.request_log import LogLine
from jsg.server.telemetry.series import Series

PAGE = pathlib.Path(__file__).parent / "observability.md"
BEGIN, END = "<!-- {}: made by docs/observability_tables.py -->", "<!-- end of {} -->"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        before, rest = page.split(BEGIN.format(name))
        after = rest.split(END.format(name))[1]
        page = f"{before}{BEGIN.format(name)}\n\n{make()}\n\n{END.format(name)}{after}"
    PAGE.write_text(page, encoding="utf-8")


def made_part(name: str) -> str:
    """What the page holds now between the markers of that table."""
    page = PAGE.read_text(encoding="utf-8")
    return page.split(BEGIN.format(name))[1].split(END.format(name))[0].strip()


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


TABLES: dict[str, Callable[[], str]] = {"metrics": metrics, "aliases": aliases, "log": log_fields}

if __name__ == "__main__":
    main()
