"""The tables of docs/models.md, from what the tests measured.

The figures are in tests/parity.json, which `tests/parity.py` says how to write.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from jsg.models.registry import FAMILIES
from jsg.models.vision_config import VISION_KINDS

RECORDS = pathlib.Path(__file__).parents[2] / "tests" / "parity.json"
COLUMNS = ("text", "image", "video", "int8", "fp8", "int4")
MEASURES = {"logits": "logits within {:.1e}", "KL": "KL {:.1e}"}


def figures() -> list[dict[str, Any]]:
    """One entry for each comparison; `tests.parity.Figure` has their fields."""
    return json.loads(RECORDS.read_text(encoding="utf-8"))


def parity() -> str:
    """One row for each architecture that jsg serves."""
    rows = [f"| `architectures` | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]
    for architecture in (*FAMILIES, *VISION_KINDS):
        found = [figure for figure in figures() if figure["architecture"] == architecture]
        cells = (_cell([figure for figure in found if figure["column"] == column]) for column in COLUMNS)
        rows.append(f"| `{architecture}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(found: list[dict[str, Any]]) -> str:
    """The largest figure of each measure, and the test without its variants."""
    parts = []
    for measure, test in sorted({(figure["measure"], _function(figure["test"])) for figure in found}):
        largest = max(
            figure["figure"] for figure in found if (figure["measure"], _function(figure["test"])) == (measure, test)
        )
        parts.append(f"{MEASURES[measure].format(largest)}, `{test}`")
    return "; ".join(parts) or "–"


def _function(test: str) -> str:
    return test.partition("[")[0]


def variants() -> str:
    """One row for each recorded variant."""
    rows = ["| test | column | largest difference | bound |", "|---|---|---|---|"]
    for figure in figures():
        largest, bound = MEASURES[figure["measure"]].format(figure["figure"]), f"{figure['bound']:.1e}"
        file, _, name = figure["test"].rpartition("/")[2].partition("::")
        variant = name.partition("[")[2].removesuffix("]") or name
        rows.append(f"| `{variant}` in `{file}` | {figure['column']} | {largest} | {bound} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[], str]] = {"parity": parity, "variants": variants}
