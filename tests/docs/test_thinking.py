"""docs/thinking.md says what the code says."""

import importlib.util
import re
from types import ModuleType

import pytest

from jsg.config import REASONING_PARSERS
from jsg.dialects import DIALECTS, PARSER_NAMES
from jsg.processing.tool_calls import MAX_HELD_LEN, parse_tool_calls
from tests.test_layout import ROOT

SCRIPT = ROOT / "docs" / "thinking_tables.py"
PAGE = (ROOT / "docs" / "thinking.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("thinking_tables", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(tables: ModuleType):
    for name, make in tables.TABLES.items():
        assert tables.made_part(name) == make(), "run: .venv/bin/python docs/thinking_tables.py"
    assert re.search(rf"never more than {MAX_HELD_LEN}\s+characters", PAGE)


def test_every_family_names_parsers_that_there_are():
    table = PAGE.partition("| family |")[2].partition("\n\n")[0]
    rows = [re.split(r" ?\| ?", line)[1:-1] for line in table.splitlines()[2:]]
    assert len(rows) >= 12
    for family, thoughts, tools, *_ in rows:
        assert set(re.findall("`(.*?)`", thoughts)) <= set(REASONING_PARSERS), family
        assert set(re.findall("`(.*?)`", tools)) <= set(PARSER_NAMES), family


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_that_the_page_shows_is_one(tables: ModuleType, name: str):
    shown = tables.call(DIALECTS[name]).replace("…", "").replace("functions.NAME", "functions.f").replace("NAME", "f")
    found = parse_tool_calls(shown, DIALECTS[name], {"f"}, str)
    assert [call.name for call in found.calls] == ["f"]
    assert not found.content
