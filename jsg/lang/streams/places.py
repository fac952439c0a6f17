"""The statement of a program that runs."""

import sys
from types import FrameType

from jsg.lang.streams.ops import Place

_OURS = "jsg.lang."


def program_place() -> Place | None:
    """Gives file and line of the innermost caller outside of the language."""
    frame = sys._getframe(1)
    while frame is not None:
        if not _is_ours(frame):
            return Place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def raised_place(error: BaseException) -> Place | None:
    """Gives file and line of the outermost statement outside of the language through which an error came."""
    step = error.__traceback__
    while step is not None:
        if not _is_ours(step.tb_frame):
            return Place(step.tb_frame.f_code.co_filename, step.tb_lineno)
        step = step.tb_next
    return None


def _is_ours(frame: FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.startswith(_OURS) or name == "contextlib"
