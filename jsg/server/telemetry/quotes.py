"""Messages of errors without what they quote of a request, for the log.

Messages quote what a client has sent as Python or JSON write it: text in quotes, lists and objects in brackets. Names
of fields have no quotes, unless they are no plain names (`jsg.errors.shown_name`).
"""

import re

from jsg.errors import PLAIN_NAME

MAX_CHARS = 400  # of a message
CUT = "…"
_WORD = r"'[\w./:+-]+'"
_PARTS = re.compile(
    rf"""
    (?P<rule>must\ be\ (?:one\ of\ )?{_WORD}(?:(?:,|\ or|,\ or)\ {_WORD})*(?=[,;\ ]))  # the server's own words
    | (?<!\w)b?'(?:[^'\\]|\\.)*(?:'|$)
    | (?<!\w)b?"(?:[^"\\]|\\.)*(?:"|$)
    | (?<![\w.\]'"])[\[{{].*[\]}}]  # a value, and not the index of a name
    | \#/\S*  # a pointer into a schema
    """,
    re.VERBOSE | re.DOTALL,
)


def without_quotes(message: str) -> str:
    """The message with `CUT` for all that it quotes of a request, cut to `MAX_CHARS`."""
    shown = _PARTS.sub(lambda found: found["rule"] or CUT, message)
    return shown if len(shown) <= MAX_CHARS else shown[:MAX_CHARS] + CUT


def name_or_cut(param: str | None) -> str | None:
    """The name of a field; `CUT` for a text that is no plain name, which a client may have made up."""
    return param if param is None or PLAIN_NAME.fullmatch(param) else CUT
