"""Gives memory back that nobody needs any more: of the C library, and pages of files. Standard library only."""

import ctypes
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import final

EVERY_S = 60.0
"""Seconds between two times. In a soak 14 of 19 took about half a millisecond, and 5 about a tenth of a second."""
LEAST_BYTES = 2**20
"""Mappings with fewer present bytes are left alone, because there are hundreds and they hold little together."""
MADV_DONTNEED = 4  # of mman.h

GROWTHS = 10_000
"""After so many growths Python looks at all objects though the loop was never idle. Ten steps or so are a growth."""

_FIELDS = r"(?:\w+:[^\n]*\n)*?"
_ONLY_READ = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p [^\n]*/[^\n]*\n" + _FIELDS + r"Rss: +(\d+) kB\n" + _FIELDS + "Anonymous: +0 kB$",
    re.MULTILINE,
)
"""Of `/proc/PID/smaps`: a private mapping of a file that has no page of its own. It gives the addresses of its begin
and end, and the KiB that are present."""


def trim() -> None:
    """Has glibc give back the free pages of all its heaps. Without glibc nothing happens."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def collect_seldom() -> None:
    """Switches Python's collector on. What is alive stays for good, and all later objects are looked at when idle.

    Python's own rule is a full collection after each growth by a quarter. With ten thousand waiting requests that took
    30 ms, in the middle of a plan.
    """
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], GROWTHS)
    gc.enable()


def collect_and_trim() -> None:
    """Collects what Python has no use for, and has glibc give back what that leaves free."""
    gc.collect()
    trim()


def drop_file_pages() -> None:
    """Takes pages of files out of this process that it has only read. Without Linux nothing happens.

    The kernel has them in its page cache and maps them again, some at a time, when they are next read. Much of XLA and
    LLVM is read only to compile. A mapping with a page that was written, as by the relocation of addresses, is kept.
    """
    smaps, library = Path("/proc/self/smaps"), ctypes.CDLL(None)
    if not smaps.exists():
        return
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end, present_kib in _ONLY_READ.findall(smaps.read_text(encoding="utf-8", errors="replace")):
        if int(present_kib) * 1024 >= LEAST_BYTES:
            start = int(begin, 16)
            library.madvise(start, int(end, 16) - start, MADV_DONTNEED)  # where the kernel refuses, the pages stay


@final
class IdleTrim:
    """Collects and trims at most once in `EVERY_S`, when the step loop says that it is idle.

    XLA's threads have heaps of their own, and each grows by the holes that steps of different shapes leave in it. In a
    soak of 22 minutes the blocks in use stayed at 145 MB, while the free ones beside them grew from 134 to 136 MB.

    When nothing is left to compile, the next idle moment also drops pages of files, and does not wait for its time.
    """

    def __init__(
        self,
        trim: Callable[[], None] = collect_and_trim,
        clock: Callable[[], float] = time.monotonic,
        drop_file_pages: Callable[[], None] = drop_file_pages,
    ) -> None:
        self._trim = trim
        self._clock = clock
        self._drop_file_pages = drop_file_pages
        self._trimmed_at = clock()
        self._has_settled = False

    def note_settled(self) -> None:
        """Takes note that nothing is left to compile."""
        self._has_settled = True

    def __call__(self) -> None:
        """Takes note of a moment without work."""
        if not self._has_settled and self._clock() - self._trimmed_at < EVERY_S:
            return
        if self._has_settled:
            self._drop_file_pages()
        self._trim()
        self._has_settled, self._trimmed_at = False, self._clock()
