"""docs/server.md says what the code says."""

import importlib.util
import pathlib
from types import ModuleType

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / "docs" / "server_fields.py"


@pytest.fixture(scope="module")
def server_fields() -> ModuleType:
    spec = importlib.util.spec_from_file_location("server_fields", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(server_fields):
    assert server_fields.made_part() == server_fields.tables(), "run: .venv/bin/python docs/server_fields.py"


def test_it_shows_what_there_is(server_fields):
    made = server_fields.tables()
    for row in (
        "| `POST /generate` |",
        "| `max_new_tokens` | `128` |",
        "| `messages` | list of `Message` ≥ 1 items | **required**",
        "| refused |",
    ):
        assert row in made
    # Neither a name that pydantic made nor an alias of ours is a kind of value.
    assert "Checked" not in made and "anything" not in made
