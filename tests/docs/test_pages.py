"""The pages about the code name files that are there."""

import pathlib
import re
import shutil
import subprocess

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


@pytest.mark.slow
def test_the_check_of_pages_fails_at_a_broken_anchor(tmp_path: pathlib.Path):
    for name in ("Makefile", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "jsg").symlink_to(ROOT / "jsg")
    recipe = subprocess.run(["make", "-n", "lint-others"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    check = next(line for line in recipe.splitlines() if "mkdocs" in line).replace(".venv/", f"{ROOT}/.venv/")
    index = tmp_path / "docs" / "index.md"
    index.write_text(index.read_text() + "\n[nowhere](reference/options.md#nowhere)\n")
    done = subprocess.run(["sh", "-c", check], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "'reference/options.md' does not contain an anchor '#nowhere'" in done.stdout
