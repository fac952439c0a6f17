"""Compares the length of programs with the same programs written with only the client of the OpenAI API."""

import ast
from pathlib import Path

from bench.report import ROOT, Report

EXAMPLES = ROOT / "examples"
RAW = Path(__file__).parent / "raw"
NOT_THE_PROGRAM = {"main", "words", "retrieve", "look_up"}
"""Functions that do not count, because both forms share them or they only print."""
TARGET = "the paper: 2.1"


def count_lines(path: Path) -> int:
    """The number of lines of code in a file's functions: no blank lines, comments, docstrings, imports or data."""
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    code: set[int] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in NOT_THE_PROGRAM:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            assert node.end_lineno is not None
            code |= set(range(first, node.end_lineno + 1)) - _docstring_lines(node)
    return sum(bool(lines[number - 1].partition("#")[0].strip()) for number in code)


def _docstring_lines(function: ast.AST) -> set[int]:
    found: set[int] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            text = node.body[0]
            assert text.end_lineno is not None
            found |= set(range(text.lineno, text.end_lineno + 1))
    return found


def pairs() -> dict[str, tuple[int, int]]:
    """For each example its number of lines, and that of the raw form."""
    raw = sorted(path for path in RAW.glob("*.py") if path.name != "__init__.py")
    return {path.stem: (count_lines(EXAMPLES / path.name), count_lines(path)) for path in raw}


def measure_lines(report: Report) -> None:
    """Counts the lines. Nothing is run."""
    found = pairs()
    for name, (ours, raw) in found.items():
        report.add(f"lines: {name}, raw / jsg", "x", [raw / ours], jsg=ours, raw=raw)
    ours, raw = (sum(counts) for counts in zip(*found.values(), strict=True))
    report.add(f"lines: all {len(found)}, raw / jsg", "x", [raw / ours], jsg=ours, raw=raw, target=TARGET)
