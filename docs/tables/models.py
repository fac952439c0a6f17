"""The tables of docs/models.md, from what the tests measured.

The figures are in tests/parity.json, which `tests/parity.py` says how to write.
"""

import json
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

from jsg.errors import ModelError
from jsg.models.published.sections import read_published
from jsg.models.registry import FAMILIES, WRAPPERS
from jsg.sources import Fields

QUANTISED = pathlib.Path(__file__).parents[2] / "tests" / "models" / "data" / "quantised.json"
"""`quantization_config` of published checkpoints, or `hf_quant_config.json`, as remembered: nobody saw the files."""
RECORDS = pathlib.Path(__file__).parents[2] / "tests" / "parity.json"
COLUMNS = ("text", "image", "video", "int8", "fp8", "int4")
MEASURES = {"logits": "logits within {:.1e}", "KL": "KL {:.1e}"}


def figures() -> list[dict[str, Any]]:
    """One entry for each comparison; `tests.parity.Figure` has their fields."""
    return json.loads(RECORDS.read_text(encoding="utf-8"))


def parity() -> str:
    """One row for each architecture that jsg serves."""
    rows = [f"| `architectures` | {' | '.join(COLUMNS)} |", f"|---{'|---' * len(COLUMNS)}|"]
    for architecture in (*FAMILIES, *WRAPPERS):
        found = [figure for figure in figures() if figure["architecture"] == architecture]
        cells = (_cell([figure for figure in found if figure["column"] == column]) for column in COLUMNS)
        rows.append(f"| `{architecture}` | {' | '.join(cells)} |")
    return "\n".join(rows)


def _cell(found: list[dict[str, Any]]) -> str:
    """The largest figure of each measure."""
    largest: dict[str, float] = {}
    for figure in found:
        largest[figure["measure"]] = max(figure["figure"], largest.get(figure["measure"], 0.0))
    return "; ".join(MEASURES[measure].format(value) for measure, value in sorted(largest.items()))


def variants() -> str:
    """One row for each recorded variant."""
    rows = ["| checkpoint | column | largest difference | bound |", "|---|---|---|---|"]
    for figure in figures():
        largest, bound = MEASURES[figure["measure"]].format(figure["figure"]), f"{figure['bound']:.1e}"
        name, _, variant = figure["test"].rpartition("::")[2].partition("[")
        rows.append(f"| `{variant.removesuffix(']') or name}` | {figure['column']} | {largest} | {bound} |")
    return "\n".join(rows)


def quantised() -> str:
    """One row for each published checkpoint whose `quantization_config` is recorded: what is read, or why it is not."""
    rows = ["| checkpoint | what is read, or why it is refused |", "|---|---|"]
    for name, config in json.loads(QUANTISED.read_text(encoding="utf-8")).items():
        rows.append(f"| `{name}` | {verdict(config)} |")
    return "\n".join(rows)


def verdict(config: dict[str, Any]) -> str:
    """How kernels are quantised by a section of `config.json` or by `hf_quant_config.json`, or why it is refused."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "hf_quant_config.json").write_text(json.dumps(config), encoding="utf-8")
        whole = {} if "quantization" in config else {"quantization_config": config}
        try:
            found = read_published(pathlib.Path(folder), Fields("config.json", whole))
        except ModelError as error:
            return f"refused: {str(error).split(': ', 2)[-1].split(';')[0]}"
    return "" if found is None else found.title


TABLES: dict[str, Callable[[], str]] = {"parity": parity, "variants": variants, "quantised": quantised}
