"""docs/thinking.md says what the code says."""

import re

import pytest

from docs.tables import thinking
from jsg.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from jsg.speech.answers.tool_calls import MAX_HELD_LEN
from jsg.speech.dialects import DIALECTS
from tests.speech.parsed import parse_tool_calls
from tests.test_layout import ROOT

PAGE = (ROOT / "docs" / "thinking.md").read_text(encoding="utf-8")


def test_the_page_says_how_much_is_held_back():
    assert re.search(rf"never more than {MAX_HELD_LEN}\s+characters", PAGE)


def test_every_family_names_parsers_that_there_are():
    table = PAGE.partition("| family |")[2].partition("\n\n")[0]
    rows = [re.split(r" ?\| ?", line)[1:-1] for line in table.splitlines()[2:]]
    assert len(rows) >= 12
    for family, thoughts, tools, *_ in rows:
        assert set(re.findall("`(.*?)`", thoughts)) <= set(REASONING_PARSERS), family
        assert set(re.findall("`(.*?)`", tools)) <= set(TOOL_CALL_PARSERS), family


@pytest.mark.parametrize("name", DIALECTS)
def test_a_call_that_the_page_shows_is_one(name: str):
    shown = thinking.call(DIALECTS[name]).replace("…", "").replace("functions.NAME", "functions.f").replace("NAME", "f")
    found = parse_tool_calls(shown, DIALECTS[name], {"f"}, str)
    assert [call.name for call in found.calls] == ["f"]
    assert not found.content
