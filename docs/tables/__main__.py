"""Writes every part of the pages that is made from code."""

import functools

from docs.tables import endpoints, made, models, observability, options, thinking

PAGES: dict[str, tuple[str, made.Tables]] = {
    "models.md": ("models", models.TABLES),
    "observability.md": ("observability", observability.TABLES),
    "thinking.md": ("thinking", thinking.TABLES),
    "reference/options.md": ("options", options.TABLES),
    **{
        f"reference/{name}.md": ("endpoints", {name: functools.partial(endpoints.table, name)})
        for name in endpoints.NAMES
    },
}
"""Page → the module that makes its parts, and the parts."""

if __name__ == "__main__":
    for page, (source, tables) in PAGES.items():
        made.write(page, source, tables)
