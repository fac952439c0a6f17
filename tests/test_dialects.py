"""The dialects of tool calls: their names, and the chat templates that show them."""

import dataclasses

import pytest

from jsg.config import ServerConfig
from jsg.dialects import DIALECTS, PARSER_NAMES, choose_dialect, detect_dialect
from tests.dialects import TEMPLATES


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_a_template_shows_its_dialect(dialect: str) -> None:
    found = detect_dialect(TEMPLATES[dialect])
    assert found is not None
    assert found.name == dialect


def test_templates_that_show_no_dialect() -> None:
    assert detect_dialect(None) is None
    assert detect_dialect("{{ messages }}") is None


def test_names_of_parsers() -> None:
    (option,) = (field for field in dataclasses.fields(ServerConfig) if field.name == "tool_call_parser")
    assert option.metadata["choices"] == PARSER_NAMES
    for name in PARSER_NAMES[1:]:
        dialect = choose_dialect(name, None)
        assert dialect is not None
        assert name in (dialect.name, *dialect.aliases)
    both = [choose_dialect("mistral", text) for text in (None, "[TOOL_CALLS]", "[TOOL_CALLS]f[ARGS]")]
    assert [each.name for each in both if each] == ["mistral", "mistral", "mistral_args"]
    assert choose_dialect("hermes", TEMPLATES["mistral"]) is DIALECTS["hermes"]
    assert choose_dialect("auto", TEMPLATES["mistral"]) is DIALECTS["mistral"]
