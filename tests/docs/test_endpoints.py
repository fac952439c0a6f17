"""The tables of docs/reference show what there is."""

import pytest

from docs.tables import endpoints


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return endpoints.pages()


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
