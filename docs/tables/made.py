"""The parts of pages that are made from code: `python -m docs.tables` writes them, and a test compares them.

A page has two marker lines for each part; what is between them is made. Everything else is written by hand.
"""

import pathlib
import re
from collections.abc import Callable, Mapping

DOCS = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- {}: made by docs/tables/{}.py -->", "<!-- end of {} -->"
type Tables = Mapping[str, Callable[[], str]]
"""The name of a part → what makes its text."""


def write(page: str, source: str, tables: Tables) -> None:
    """Writes the parts of one page anew.

    Args:
        page: the page, such as `models.md`.
        source: the module of `docs/tables` that makes the parts.
        tables: the parts.
    """
    path = DOCS / page
    text = path.read_text(encoding="utf-8")
    for name, make in tables.items():
        begin, end = BEGIN.format(name, source), END.format(name)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{make()}\n\n{end}{rest.split(end)[1]}"
    path.write_text(text, encoding="utf-8")


def without_empty_cells(text: str) -> str:
    """The text with `–` in each empty cell of its tables, below their heads."""
    lines = text.split("\n")
    rules = [line.startswith("|---") for line in (*lines[1:], "")]
    return "\n".join(
        line if is_head or not line.startswith("|") else re.sub(r"(?<!\\)\| *(?=\|)", "| – ", line)
        for line, is_head in zip(lines, rules, strict=True)
    )


def read(page: str, source: str, name: str) -> str:
    """What the page has now between the markers of that part."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return text.split(BEGIN.format(name, source))[1].split(END.format(name))[0].strip()


def cell(text: str) -> str:
    """A text in a cell of a table, which no bar and no line break ends."""
    return text.replace("|", "\\|").replace("\n", " ")
