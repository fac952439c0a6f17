"""The pages of docs/reference say what the code says."""

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


@pytest.fixture(scope="module")
def pages(server_fields: ModuleType) -> dict[str, str]:
    return server_fields.pages()


def test_the_pages_are_current(server_fields, pages):
    for name, made in pages.items():
        assert server_fields.made_part(name) == made, "run: .venv/bin/python docs/server_fields.py"


def test_they_show_what_there_is(pages):
    for name, part in (
        ("endpoints", "| [`POST /generate`](native.md) |"),
        ("sampling", "| `max_new_tokens` | `128` |"),
        ("chat", "| `messages` | list of [`Message`](#message),"),
        ("native", "| `messages` | list of [`Message`](chat.md#message),"),
        ("sampling", "| `spaces_between_special_tokens` |"),
        ("responses", "| refused |"),
    ):
        assert part in pages[name]
    assert "Checked" not in "".join(pages.values()), "the name of an alias of ours is no kind of value"


def test_what_is_said_of_pictures_is_shown(pages):
    made = "\n".join(pages.values())
    rows = [line for line in made.splitlines() if line.startswith("| `image_data`")]
    assert len(rows) == 2
    for name in ("image_data", "video_data", "num_frames"):
        for row in made.splitlines():
            assert not (row.startswith(f"| `{name}` |") and row.endswith("|  |")), row
