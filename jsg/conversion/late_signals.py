"""Delays signals until work is complete that must not be interrupted: a chunk that tensorstore's threads write."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signalled(BaseException):
    """Raised when a signal has come that would have ended the process."""


@contextlib.contextmanager
def signals_later() -> Iterator[Callable[[], None]]:
    """Gives a function that leaves the block if a signal came that would end the process. Then the signal takes effect.

    Signals that are ignored, as with `nohup`, stay ignored. Outside the main thread no signal arrives, and nothing
    changes.
    """
    came: list[int] = []
    is_left = False

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    def leave_if_signalled() -> None:
        if came:
            raise _Signalled

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in ENDING if is_main}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, note)
        yield leave_if_signalled
    except _Signalled:
        is_left = True
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        signal.raise_signal(came[0])
    if is_left:
        raise KeyboardInterrupt  # the signal's handler returned, but the block was left
