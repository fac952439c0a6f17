"""What a start says of how far it is."""

import itertools
import time
from collections.abc import Callable, Hashable

from jsg.engine.child.protocol import Progress

Report = Callable[[Progress], None]


def load_progress(report: Report) -> Callable[[int, int, int], None]:
    """Reports how much of a model is loaded, and how fast it is read."""
    started = time.monotonic()

    def tell(done: int, total: int, num_bytes: int) -> None:
        rate = num_bytes / 1e9 / max(time.monotonic() - started, 1e-9)
        text = f"{num_bytes / 2**20:.0f} MiB, {rate:.1f} GB/s" if num_bytes else ""
        report(Progress("load", done, total, text))

    return tell


def counted(report: Report, total: int) -> Callable[[Hashable], None]:
    """Reports each program that is compiled."""
    numbers = itertools.count()
    return lambda name: report(Progress("warm-up", next(numbers), total, str(name)))
