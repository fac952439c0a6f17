"""Signals that wait for what must not be left half done: a chunk that tensorstore's own threads are writing."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Signalled(BaseException):
    """A signal came that would have ended the process."""


@contextlib.contextmanager
def signals_later() -> Iterator[Callable[[], None]]:
    """Inside, signals that would end the process only make what this gives leave the block, and then have their effect.

    Those that are ignored, as `nohup` has it, still are. Outside the main thread, where none arrives, nothing changes.
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
        raise KeyboardInterrupt  # the signal's handler goes on, which the block cannot
