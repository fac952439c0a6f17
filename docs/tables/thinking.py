"""The tables of docs/thinking.md: the markers of thoughts, and the forms of tool calls."""

from collections.abc import Callable

from jsg.speech.answers.thoughts import ALIASES, MARKERS
from jsg.speech.dialects import DIALECTS, Dialect, Slot

SHOWN = {Slot.NAME: "NAME", Slot.NUMBER: "0", Slot.ARGUMENTS: "{…}", Slot.MARKED_ID: ""}


def parsers() -> str:
    """One row for each reasoning parser."""
    rows = [
        "| `--reasoning-parser` | other names | thoughts stand between | without a first marker |",
        "|---|---|---|---|",
    ]
    for name, markers in MARKERS.items():
        aliases = ", ".join(f"`{alias}`" for alias, of in ALIASES.items() if of == name)
        inside = "the answer begins inside them" if markers.starts_inside else "there are none"
        rows.append(f"| `{name}` | {aliases} | {_code(markers.begin)} and {_code(markers.end)} | {inside} |")
    return "\n".join(rows)


def dialects() -> str:
    """One row for each dialect."""
    rows = ["| `--tool-call-parser` | other names | a call |", "|---|---|---|"]
    for name, dialect in DIALECTS.items():
        aliases = ", ".join(f"`{alias}`" for alias in dialect.aliases)
        rows.append(f"| `{name}` | {aliases} | {_code(call(dialect))} |")
    return "\n".join(rows)


def call(dialect: Dialect) -> str:
    """A call as the model writes it."""
    body = f'{{"name": "NAME", "{dialect.arguments_key}": {{…}}}}'
    shown = SHOWN | {Slot.BODY: body if dialect.call_style is None else BODIES[dialect.call_style]}
    pieces = (*dialect.section[0], *dialect.call, *dialect.section[1])
    return "".join(piece if isinstance(piece, str) else shown[piece] for piece in pieces)


BODIES = {
    "qwen_xml": "<function=NAME>\n<parameter=KEY>\nTEXT\n</parameter>\n</function>",
    "glm_xml": "NAME\n<arg_key>KEY</arg_key>\n<arg_value>TEXT</arg_value>\n</tool_call>",
    "minimax_xml": '<invoke name="NAME">\n<parameter name="KEY">TEXT</parameter>\n</invoke>',
    "python": 'NAME(KEY="TEXT", OTHER=1)',
    "gemma": 'call:NAME{KEY:<|"|>TEXT<|"|>,OTHER:1}',
    "function_gemma": "call:NAME{KEY:<escape>TEXT<escape>,OTHER:1}",
}
"""The bodies of calls in the styles that are not JSON."""


def _code(text: str) -> str:
    """A text as code in a cell: line breaks are shown, and no pipe ends the cell."""
    return "`" + text.replace("\n", "⏎").replace("|", "\\|") + "`"


TABLES: dict[str, Callable[[], str]] = {"parsers": parsers, "dialects": dialects}
