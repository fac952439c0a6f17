"""The statement of a program that runs."""

import sys

from jsg.lang.streams.ops import Place

_OURS = "jsg.lang."


def program_place() -> Place | None:
    """Gives file and line of the innermost caller outside of the language."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if not name.startswith(_OURS) and name != "contextlib":
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
