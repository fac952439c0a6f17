"""Writes every part of the pages that is made from code."""

import functools
from collections.abc import Callable

from docs.tables import endpoints, made, models, observability, options, thinking

SOURCES: dict[str, tuple[str, made.Tables]] = {
    "models.md": ("models", models.TABLES),
    "observability.md": ("observability", observability.TABLES),
    "thinking.md": ("thinking", thinking.TABLES),
    "reference/options.md": ("options", options.TABLES),
    **{
        f"reference/{name}.md": ("endpoints", {name: functools.partial(endpoints.table, name)})
        for name in endpoints.NAMES
    },
}
"""Page → the module that makes its parts, and what makes them."""


def _filled(make: Callable[[], str]) -> str:
    return made.without_empty_cells(make())


PAGES = {
    page: (source, {name: functools.partial(_filled, make) for name, make in tables.items()})
    for page, (source, tables) in SOURCES.items()
}
"""The same, whose tables have no empty cells."""

if __name__ == "__main__":
    for page, (source, tables) in PAGES.items():
        made.write(page, source, tables)
