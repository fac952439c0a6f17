"""The recorded security advisories are those of what constraints.txt pins, and each has a reason why it is pinned."""

import json

import pytest

from tests.advisories import RECORDED, affects, pinned, pins

REASONS: dict[str, str] = {}
"""The id of an advisory about a version that is pinned → why it is pinned nevertheless."""


def test_the_record_is_of_what_is_pinned():
    recorded = json.loads(RECORDED.read_text())["pins"]
    assert {name: each["version"] for name, each in recorded.items()} == pinned(), (
        "`python -m tests.advisories CHECKOUT` records them anew"
    )


def test_no_pin_has_an_advisory_without_a_reason():
    recorded = json.loads(RECORDED.read_text())["pins"]
    known = {each for pin in recorded.values() for each in pin["advisories"]}
    assert known == set(REASONS)


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.9", False), ("1.0", True), ("1.9.9", True), ("2.0", False), ("2.5", False), ("3.1", True), ("9rc1", True)],
)
def test_which_versions_an_advisory_is_about(version: str, expected: bool):
    ranges = [{"introduced": "1.0"}, {"fixed": "2.0"}, {"introduced": "3"}, {"last_affected": "3.1"}]
    part = {
        "package": {"ecosystem": "PyPI", "name": "Thing"},
        "ranges": [{"type": "GIT", "events": []}, {"type": "ECOSYSTEM", "events": ranges}],
        "versions": ["9rc1"],
    }
    assert affects({"affected": [part]}, "thing", version) == expected
    assert not affects({"affected": [part]}, "other", version)


def test_names_are_normalised():
    assert pins("Jinja2==3.1.6\nhuggingface_hub==1.0\n") == {"jinja2": "3.1.6", "huggingface-hub": "1.0"}
