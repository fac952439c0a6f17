"""Writes every part of the pages that is made from code."""

from docs.tables import made, models, observability, options, thinking

PAGES: dict[str, tuple[str, made.Tables]] = {
    "models.md": ("models", models.TABLES),
    "observability.md": ("observability", observability.TABLES),
    "options.md": ("options", options.TABLES),
    "thinking.md": ("thinking", thinking.TABLES),
}
"""Page → the module that makes its parts, and the parts."""

if __name__ == "__main__":
    for page, (source, tables) in PAGES.items():
        made.write(page, source, tables)
