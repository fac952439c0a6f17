"""The tutorial of docs/lang.md runs, and prints what it says."""

import contextlib
import io
import pathlib
import re
from typing import Any

import pytest

import jsg

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "lang.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[int, str, str | None]]:
    """Line, code, and what the text block right behind says it prints."""
    text = PAGE.read_text(encoding="utf-8")
    return [(text.count("\n", 0, found.start()) + 2, found[1], found[2]) for found in BLOCK.finditer(text)]


def test_the_tutorial_runs(monkeypatch: pytest.MonkeyPatch):
    small = {"max_running_requests": 16, "max_total_tokens": 8192, "context_length": 1024}
    engine_class = jsg.Engine
    monkeypatch.setattr(jsg, "Engine", lambda: engine_class(**small), raising=False)
    names: dict[str, Any] = {"__name__": "tutorial"}
    found = blocks()
    assert len(found) >= 12
    try:
        for line, code, expected in found:
            printed = io.StringIO()
            # So many empty lines that an error names the line of the page.
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (line - 1) + code, str(PAGE), "exec"), names)
            if expected is not None:
                assert printed.getvalue() == expected, f"the block at line {line} prints something else"
    finally:
        names["engine"].close()
        jsg.set_default_backend(None)


def test_every_known_fault_names_tests_that_exist():
    rows = re.findall(r"^\| F(\d+) \|.*\| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 25))
    written = "\n".join(path.read_text(encoding="utf-8") for path in PAGE.parents[1].glob("tests/**/test_*.py"))
    for number, names in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert name.startswith(f"test_f{number}_")
            assert f"def {name}(" in written


def test_every_public_name_is_in_the_reference():
    reference = PAGE.read_text(encoding="utf-8").partition("## Reference")[2]
    known_elsewhere = {"SamplingParams", "__version__"}
    missing = [name for name in jsg.__all__ if name not in known_elsewhere and not re.search(rf"\b{name}\b", reference)]
    assert missing == []
