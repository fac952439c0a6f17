"""Counts what a function does instead of the seconds that it takes: the count is the same on every machine and load."""

import sys
import threading
from collections.abc import Callable

_TOOL = 4
_EVENTS = (sys.monitoring.events.PY_START, sys.monitoring.events.PY_RESUME, sys.monitoring.events.JUMP)
_NOWHERE = -1


def work(function: Callable[[], object]) -> int:
    """Calls the function; how many Python functions were entered and turns of loops begun in this thread for it.

    What one call of a C function does is not seen: a sort of a long list counts as nothing. Counting makes the function
    a few times slower.
    """
    count, own = 0, threading.get_ident()

    def add(_: object, offset: int, destination: int = _NOWHERE) -> None:
        nonlocal count
        # A jump forward is no turn of a loop, and each version of Python compiles the same code to others.
        count += destination <= offset and threading.get_ident() == own

    monitoring = sys.monitoring
    monitoring.use_tool_id(_TOOL, "tests.constrained.work")
    try:
        for event in _EVENTS:
            monitoring.register_callback(_TOOL, event, add)
        monitoring.set_events(_TOOL, sum(_EVENTS))
        function()
    finally:
        monitoring.set_events(_TOOL, 0)
        for event in _EVENTS:
            monitoring.register_callback(_TOOL, event, None)
        monitoring.free_tool_id(_TOOL)
    return count
