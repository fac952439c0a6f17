"""The README of the tests lists every helper module and every fixture that several files share, and nothing else."""

import ast
import re
from pathlib import Path

from tests.conftest import ROOT

TESTS = ROOT / "tests"


def folder_of(path: Path) -> str:
    """The first folder below `tests`, whose section lists the file; empty for the section of all tests."""
    parts = path.relative_to(TESTS).parts
    return parts[0] if len(parts) > 1 else ""


def is_of_suite(path: Path) -> bool:
    """Whether it is a suite of a client, or one of its files."""
    return any(part.startswith("with_") for part in path.relative_to(TESTS).parts)


def fixtures_of(path: Path) -> list[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, kinds)]
    shared = [f for f in functions if not f.name.startswith("_")]
    return [f.name for f in shared if any("pytest.fixture" in ast.unparse(each) for each in f.decorator_list)]


def test_readme_lists_every_helper_and_every_shared_fixture():
    listed, folder = set(), ""
    for line in (TESTS / "README.md").read_text().partition("## What each helper")[2].splitlines():
        if heading := re.match(r"### (?:`tests/(\w+)`)?", line):
            folder = heading[1] or ""
        elif row := re.match(r"\| `([\w/.]+)` \|", line):
            listed.add((folder, row[1]))
    files = [path for path in TESTS.rglob("*.py") if path.name != "__init__.py" and not is_of_suite(path)]
    helpers = {
        (folder_of(path), path.relative_to(TESTS / folder_of(path)).as_posix())
        for path in files
        if not path.name.startswith("test_")
    }
    shared = {(folder_of(path), name) for path in files if path.name == "conftest.py" for name in fixtures_of(path)}
    assert listed == helpers | shared
