"""What pages have from the code is what the code says now."""

import dataclasses

import pytest

from docs.tables import made, options
from docs.tables.__main__ import PAGES
from jsg.config import EngineConfig, ServerConfig, option

PARTS = [(page, source, name, make) for page, (source, tables) in PAGES.items() for name, make in tables.items()]


@pytest.mark.parametrize(
    ("page", "source", "name", "make"), PARTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_every_part_is_current(page: str, source: str, name: str, make):
    assert made.read(page, source, name) == make(), "run: .venv/bin/python -m docs.tables"


def test_every_option_and_command_has_its_row():
    page = (made.DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    fields = (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig))
    assert [name for field in fields if f"| `{(name := option(field.name))}` | " not in page] == []
    assert {"serve", "chat", "grammar check"} < set(options.commands())
    assert "| `--queue-timeout` | `FLOAT`, 0.001 to 1 000 000 | " in page
