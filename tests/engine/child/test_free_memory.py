"""How the engine process gives free memory of the C library back."""

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import cast
from unittest import mock

import pytest

from jsg.engine.child import free_memory
from jsg.engine.child.free_memory import EVERY_S, IdleTrim, collect_seldom, drop_file_pages
from jsg.engine.child.heartbeat import LoopClock
from jsg.engine.child.process import Core, FrontLink, serve
from jsg.engine.child.protocol import ToEngine
from jsg.engine.child.wire import Arrived
from tests.engine.fake_core import FakeGrammars

HOLES = """
import ctypes, re
from jsg.malloc import trim

def anonymous_kib():
    return int(re.search(r"Anonymous:\\s+(\\d+)", open("/proc/self/smaps_rollup").read())[1])

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(60_000) for _ in range(600)]
for block in blocks:
    ctypes.memset(block, 1, 60_000)
for index, block in enumerate(blocks):
    if index % 50:
        libc.free(block)
before = anonymous_kib()
trim()
print(before - anonymous_kib())
"""


def test_holes_are_given_back():
    if not sys.platform.startswith("linux"):
        pytest.skip("no glibc")
    done = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 27_000, "of 34 000 KiB that are free, in pieces"


FILES = """
import ctypes, mmap, re, sys, tempfile
from jsg.engine.child.free_memory import drop_file_pages

SIZE = 4 * 2**20

def mapping(prot):
    file = tempfile.TemporaryFile()
    file.write(b"f" * SIZE)
    file.flush()
    return mmap.mmap(file.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=prot)

def present_kib():
    text = open("/proc/self/smaps").read()
    return [int(kib) for kib in re.findall(r"4096 kB\\n(?:\\w+:.*\\n)*?Rss: +(\\d+) kB", text)]

read, written = mapping(mmap.PROT_READ), mapping(mmap.PROT_READ | mmap.PROT_WRITE)
assert read[:] == b"f" * SIZE
written[:] = b"w" * SIZE
address = ctypes.addressof(ctypes.c_char.from_buffer(written))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), mmap.PROT_READ) == 0
before = present_kib()
for _ in drop_file_pages():
    pass
print(before.count(4096) - present_kib().count(4096), read[:] == b"f" * SIZE, written[:] == b"w" * SIZE)
"""


def test_pages_of_files_are_dropped_unless_they_were_written():
    if not sys.platform.startswith("linux"):
        pytest.skip("no smaps")
    done = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True", "True"]


MAPPING = b"""7f0000000000-7f0000200000 r--p 00000000 00:00 1 /lib/large
Rss:                2048 kB
Anonymous:             0 kB
VmFlags: rd mr
"""


def test_pages_of_files_are_dropped_in_parts(monkeypatch: pytest.MonkeyPatch):
    """An engine has 8 000 mappings, and to look at all of them took 90 ms."""
    reads, dropped = [MAPPING * 5] * 250, []
    read: Callable[[int], bytes] = lambda size: reads.pop() if reads else b""  # noqa: E731
    file = mock.MagicMock(**{"read.side_effect": read, "__enter__": lambda it: it})
    monkeypatch.setattr(free_memory, "Path", lambda path: mock.Mock(**{"open.return_value": file}))
    library = mock.Mock(**{"madvise.side_effect": lambda start, size, advice: dropped.append((start, size))})
    monkeypatch.setattr(free_memory.ctypes, "CDLL", lambda name: library)
    left = [(len(reads), len(dropped)) for _ in drop_file_pages()]
    assert left == [(150, 500), (50, 1000)], "each part reads a hundred times, and drops what it has read"
    assert dropped == [(0x7F0000000000, 2**21)] * 1250


def test_when_nothing_is_left_to_compile_it_is_done_at_once():
    done: list[str] = []

    def drop() -> Iterator[None]:
        for part in ("first", "second"):
            done.append(part)
            yield

    idle = IdleTrim(lambda: done.append("trim"), lambda: 100.0, drop)
    idle()
    assert done == []
    idle.note_settled()
    seen = [[idle(), *done] for _ in range(5)]
    assert [len(each) - 1 for each in seen] == [1, 2, 3, 3, 3], "an idle moment does one part"
    assert done == ["trim", "first", "second"]


def test_what_is_under_way_is_not_begun_again():
    now, done = [100.0], []
    idle = IdleTrim(lambda: done.append("trim"), lambda: now[0], lambda: (done.append(number) for number in range(3)))
    idle.note_settled()
    for _ in range(9):
        idle()
        now[0] += EVERY_S
    assert done == ["trim", 0, 1, 2, "trim", "trim", "trim", "trim"]


def test_a_busy_loop_is_not_stopped_for_a_look_at_all_objects():
    """Of ten thousand waiting requests there are 70 000."""
    full, before = [], gc.get_threshold()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and info["generation"] == 2:
            full.append(phase)

    gc.callbacks.append(note)
    try:
        collect_seldom()
        kept = [[number] for number in range(70_000)]
        assert not full
        now = [0.0]
        idle = IdleTrim(lambda: None, lambda: now[0])
        now[0] = EVERY_S
        idle()
        assert full and len(kept) == 70_000
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
        gc.unfreeze()


def test_it_is_done_once_in_a_while():
    now, trims = [100.0], []
    idle = IdleTrim(lambda: trims.append(now[0]), lambda: now[0])
    for step_s in (0.0, EVERY_S - 1, 1.0, 1.0, EVERY_S - 2, 1.0, 3 * EVERY_S):
        now[0] += step_s
        idle()
    assert trims == [100 + EVERY_S, 100 + 2 * EVERY_S, 100 + 5 * EVERY_S]


class _Core:
    """A core with work at every other turn."""

    grammars = FakeGrammars(are_loaded=False)
    is_settled = False

    def __init__(self) -> None:
        self.num_asked = 0

    @property
    def has_work(self) -> bool:
        return bool(self.num_asked % 2)

    def refuse_overdue(self) -> list:
        return []

    def step(self) -> list:
        return []


class _Link:
    """A front that says stop after some turns."""

    def __init__(self, core: _Core) -> None:
        self.core = core
        self.waits: list[bool] = []

    def receive_all(self, *, wait: bool) -> list[Arrived]:
        self.waits.append(wait)
        self.core.num_asked += 1
        return [Arrived(ToEngine(stop=len(self.waits) == 6))]


def test_the_loop_says_when_it_is_idle(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.getppid", lambda: 1)
    core, calls = _Core(), []
    link = _Link(core)
    on_idle: Callable[[], None] = lambda: calls.append(len(link.waits))  # noqa: E731
    serve(cast("Core", core), cast("FrontLink", link), 1, LoopClock(), on_idle=on_idle)
    assert link.waits == [True, False] * 3
    assert calls == [0, 2, 4]
