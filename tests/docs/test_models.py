"""docs/models.md says what the tests measured, of tests that there are."""

import ast
import subprocess
import sys

import pytest

from docs.tables import models
from jsg.models.registry import FAMILIES, WRAPPERS
from tests import parity
from tests.test_layout import ROOT

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def comparing_tests() -> set[str]:
    """Every test that hands its figure to the fixture `parity`, without variants."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "parity" in source else ():
            if isinstance(node, ast.FunctionDef) and "parity" in {each.arg for each in node.args.args}:
                found.add(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found


def test_every_comparing_test_was_measured():
    assert {figure.test.partition("[")[0] for figure in parity.read()} == comparing_tests()


@pytest.mark.slow
def test_so_was_every_variant_of_it():
    tests = comparing_tests()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", "", *sorted(tests)]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    there = {line for line in collected.splitlines() if line.partition("[")[0] in tests}
    assert {figure.test for figure in parity.read()} == there, f"record them: {parity.__doc__}"


def test_the_figures_are_within_their_bounds():
    assert [figure for figure in parity.read() if not 0 < figure.figure <= figure.bound] == []


def test_every_family_has_a_row_and_a_description():
    for architecture in (*FAMILIES, *WRAPPERS):
        assert f"| `{architecture}` | " in PAGE.partition("## Parity")[0]
        row = next(line for line in models.parity().splitlines() if line.startswith(f"| `{architecture}` |"))
        assert "logits within" in row, "nothing compares this family with another implementation"


def test_the_readme_says_how_many_architectures_are_served():
    assert f"{len(FAMILIES)} architectures of text models" in (ROOT / "README.md").read_text(encoding="utf-8")
