"""The pages about the code name files that are there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs" / "packages").glob("*.md")),
    *(
        ROOT / name
        for name in ("docs/architecture.md", "docs/style-guide.md", "CONTRIBUTING.md", "README.md", "SECURITY.md")
    ),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_each_file_that_a_page_names_exists(page: pathlib.Path):
    own = ROOT / "jsg" / page.stem if page.parent.name == "packages" else ROOT / "jsg" / "kernels_pallas"
    for name in re.findall(r"`([a-z_0-9][\w/]*\.(?:py|json|toml))`", page.read_text()):
        assert any((folder / name).exists() for folder in (ROOT, ROOT / "jsg", own)), name


def test_the_index_reaches_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        assert page.name == "index.md" or f"({page.relative_to(ROOT / 'docs')})" in index, page.name
