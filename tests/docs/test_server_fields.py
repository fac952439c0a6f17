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
    for part in (
        "| `POST /generate` |",
        "| `max_new_tokens` | `128` |",
        "| `messages` | list of `Message`,",
        "| `spaces_between_special_tokens` |",
        "| refused |",
    ):
        assert part in made
    assert "Checked" not in made, "the name of an alias of ours is no kind of value"


def test_what_is_said_of_pictures_is_shown(server_fields):
    rows = [line for line in server_fields.tables().splitlines() if line.startswith("| `image_data`")]
    assert len(rows) == 2
    for name in ("image_data", "video_data", "num_frames"):
        for row in server_fields.tables().splitlines():
            assert not (row.startswith(f"| `{name}` |") and row.endswith("|  |")), row
