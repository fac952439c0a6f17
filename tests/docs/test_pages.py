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


def test_the_changes_of_a_version_take_at_most_1500_words():
    versions = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    assert {each.split()[0]: len(each.split()) for each in versions if len(each.split()) > 1500} == {}


def test_each_message_that_the_troubleshooting_page_quotes_is_one_of_the_code():
    """Of the first column: what is quoted and has a space. `…` is what differs from case to case."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "jsg").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a text on several lines
    source = re.sub(r"\{[^{}\n]*\}", "…", source)
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    symptoms = [row.split(" | ")[0] for row in page.splitlines() if row.startswith("| ")]
    quoted = [text for symptom in symptoms for text in symptom.split("`")[1::2] if " " in text]
    assert len(quoted) > 25
    pieces = {piece.strip() for text in quoted for piece in text.split("…")} - {""}
    assert sorted(piece for piece in pieces if piece not in source) == []


TABLE_PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("*.md"), ROOT / "examples" / "README.md"]
NAMES_A_TEST = re.compile(r"(?:`(?:tests/\S+|test_\w+)`(?:, )?)+")


def tables(page: pathlib.Path) -> list[list[list[str]]]:
    """The rows of each table of a page, as cells; the first row is the head."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^\|.*\n\|---.*\n(?:\|.*\n?)+", text, re.MULTILINE)
    rows = [[line for line in table.splitlines() if not line.startswith("|---")] for table in found]
    return [[[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table] for table in rows]


def test_tables_have_neither_empty_cells_nor_columns_of_names_of_tests():
    for page in TABLE_PAGES:
        for head, *rows in tables(page):
            assert [row for row in rows if "" in row] == [], page.name
            columns = list(zip(head, *rows, strict=True))
            names = [name for name, *cells in columns if all(NAMES_A_TEST.fullmatch(cell) for cell in cells)]
            assert names == [], page.name


def test_each_result_that_a_page_names_is_there_and_none_was_measured_from_a_changed_commit():
    results = ROOT / "bench" / "results"
    records = [path for path in results.rglob("*") if path.suffix in {".json", ".md"}]
    assert [path.name for path in records if "(changed)" in path.read_text(encoding="utf-8")] == []
    named = re.compile(r"`(?:bench/results/)?([\w{},-]+-\d{4}-\d\d-\d\d(?:\.json)?)`")
    for page in TABLE_PAGES:
        for name in named.findall(page.read_text(encoding="utf-8")):
            first, _, rest = name.partition("{")
            forms, _, last = rest.partition("}")
            missing = [form for form in forms.split(",") if not (results / f"{first}{form}{last}").exists()]
            assert missing == [], f"{page.name}: {name}"
