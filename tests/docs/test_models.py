"""docs/models.md says what the tests measured, of tests that there are."""

import ast
import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest

from jsg.models.registry import BUILDERS
from jsg.models.vision_config import VISION_KINDS
from tests import parity
from tests.test_layout import ROOT

SCRIPT = ROOT / "docs" / "model_table.py"
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def comparing_tests() -> set[str]:
    """Every test that hands its figure to the fixture `parity`, without variants."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "parity" in source else ():
            if isinstance(node, ast.FunctionDef) and "parity" in {each.arg for each in node.args.args}:
                found.add(f"{path.relative_to(ROOT).as_posix()}::{node.name}")
    return found


def test_the_page_is_current(tables: ModuleType):
    for name, make in tables.TABLES.items():
        assert tables.made_part(name) == make(), "run: .venv/bin/python docs/model_table.py"


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


def test_every_family_has_a_row_and_a_description(tables: ModuleType):
    for architecture in (*BUILDERS, *VISION_KINDS):
        assert f"| `{architecture}` | " in PAGE.partition("## Parity")[0]
        row = next(line for line in tables.parity().splitlines() if line.startswith(f"| `{architecture}` |"))
        assert "::" in row, "nothing compares this family with another implementation"
    assert "| – |" in tables.parity()
