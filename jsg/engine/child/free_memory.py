"""Gives memory back that nobody needs any more: of the C library, and pages of files."""

import ctypes
import gc
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import final

from jsg.malloc import trim

EVERY_S = 60.0
"""Seconds between two times. In a soak 14 of 19 trims took half a millisecond, and 5 about a tenth of a second."""
READS = 100
"""Reads of `/proc/self/smaps` at a time, each of a few mappings. An engine that had compiled its programs had 8 000
mappings, whose reading and parsing took 90 ms; so many reads take 6."""
READ_BYTES = 2**16
"""More than the kernel gives in one read, which is a page, or one mapping."""
LEAST_BYTES = 2**20
"""Mappings with fewer present bytes are left alone, because there are hundreds and they hold little together."""
MADV_DONTNEED = 4  # of mman.h

GROWTHS = 10_000
"""After so many growths Python looks at all objects though the loop was never idle. Ten steps or so are a growth."""

_FIELDS = rb"(?:\w+:[^\n]*\n)*?"
_ONLY_READ = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p [^\n]*/[^\n]*\n"
    + (_FIELDS + rb"Rss: +(\d+) kB\n" + _FIELDS + b"Anonymous: +0 kB$"),
    re.MULTILINE,
)
"""Of `/proc/PID/smaps`: a private mapping of a file that has no page of its own. It gives the addresses of its begin
and end, and the KiB that are present."""


def collect_seldom() -> None:
    """Switches Python's collector on. What is alive stays for good, and all later objects are looked at when idle.

    Python's own rule is a full collection after each growth by a quarter. With ten thousand waiting requests that took
    30 ms, in the middle of a plan.
    """
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], GROWTHS)
    gc.enable()


def trim_beside() -> None:
    """Has glibc give back what is free, in a thread, because it may take a tenth of a second and needs no Python."""
    threading.Thread(target=trim, name="trim", daemon=True).start()


def drop_file_pages() -> Iterator[None]:
    """Takes pages of files out of this process that it has only read, some with each step. Not without Linux.

    The kernel has them in its page cache and maps them again, some at a time, when they are next read. Much of XLA and
    LLVM is read only to compile. A mapping with a page that was written, as by the relocation of addresses, is kept.
    """
    smaps, library = Path("/proc/self/smaps"), ctypes.CDLL(None)
    if not smaps.exists():
        return
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with smaps.open("rb", buffering=0) as file:
        for number in itertools.count(1):
            # Whole mappings, which are dropped before the next step: later something else may be at their addresses.
            read = file.read(READ_BYTES)
            if not read:
                return
            for begin, end, present_kib in _ONLY_READ.findall(read):
                if int(present_kib) * 1024 >= LEAST_BYTES:
                    start = int(begin, 16)
                    library.madvise(start, int(end, 16) - start, MADV_DONTNEED)  # if the kernel refuses, they stay
            if number % READS == 0:
                yield


@final
class IdleTrim:
    """Collects and trims at most once in `EVERY_S`, when the step loop says that it is idle.

    XLA's threads have heaps of their own, and each grows by the holes that steps of different shapes leave in it. In a
    soak of 22 minutes the blocks in use stayed at 145 MB, while the free ones beside them grew from 134 to 136 MB.

    When nothing is left to compile, it is done at the next idle moment, and then pages of files are dropped. One idle
    moment does a part of all this, because a request that comes meanwhile waits.
    """

    def __init__(
        self,
        trim: Callable[[], None] = trim_beside,
        clock: Callable[[], float] = time.monotonic,
        drop_file_pages: Callable[[], Iterator[None]] = drop_file_pages,
    ) -> None:
        self._trim = trim
        self._clock = clock
        self._drop_file_pages = drop_file_pages
        self._trimmed_at = clock()
        self._has_settled = False
        self._parts: Iterator[None] | None = None  # what is under way

    def note_settled(self) -> None:
        """Takes note that nothing is left to compile."""
        self._has_settled = True

    def __call__(self) -> None:
        """Takes note of a moment without work, and does the next part of what is due."""
        is_due = self._has_settled or self._clock() - self._trimmed_at >= EVERY_S
        if self._parts is None and is_due:
            self._parts = self._work(drops=self._has_settled)
            self._has_settled, self._trimmed_at = False, self._clock()
        if self._parts is not None and next(self._parts, True):
            self._parts = None

    def _work(self, *, drops: bool) -> Iterator[None]:
        gc.collect()
        self._trim()
        if drops:
            yield
            yield from self._drop_file_pages()
