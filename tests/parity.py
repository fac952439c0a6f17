"""How near the models are to what they are compared with: the figures that docs/models.md shows.

A test that compares takes the fixture `parity` and hands its figure over, which must be within the bound. This command
writes the figures down, those of the tests that it ran:

    python -m pytest tests/golden tests/models/test_quantise.py -m "" -k "logits or next_tokens" -n 0 --record-parity
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).with_name("parity.json")


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Figure:
    """One comparison.

    Attributes:
        architecture: As config.json names it.
        column: Of the page's table: "text", "image", "video", "int8", "fp8", "int4".
        test: Its id.
        measure: What differs, such as "logits".
        figure: By how much at most.
        bound: What the test allows.
    """

    architecture: str
    column: str
    test: str
    measure: str
    figure: float
    bound: float


@dataclasses.dataclass(frozen=True, slots=True)
class Parity:
    """Takes the figures of tests."""

    test: str
    found: list[Figure]

    def __call__(self, column: str, config: dict[str, Any], measure: str, figure: float, bound: float) -> None:
        """Notes the figure, for the checkpoint with this config.json; it must be a number within the bound."""
        (architecture,) = config["architectures"]
        self.found.append(Figure(architecture, column, self.test, measure, float(f"{figure:.1e}"), bound))
        assert figure <= bound


def read() -> list[Figure]:
    """The figures that were written last."""
    return [Figure(**fields) for fields in json.loads(RECORDS.read_text(encoding="utf-8"))]


def write(found: list[Figure], *, instead_of: list[Figure]) -> None:
    """Adds figures; those of the same tests give way."""
    tests = {figure.test for figure in found}
    kept = [figure for figure in instead_of if figure.test not in tests]
    lines = ",\n".join(json.dumps(dataclasses.asdict(figure)) for figure in sorted(kept + found))
    RECORDS.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
