"""How the engine process gives free memory of the C library back."""

import gc
import subprocess
import sys
from collections.abc import Callable
from typing import cast

import pytest

from jsg.engine.child.free_memory import EVERY_S, IdleTrim, collect_and_trim, collect_seldom
from jsg.engine.child.heartbeat import LoopClock
from jsg.engine.child.process import Core, FrontLink, serve
from jsg.engine.child.protocol import ToEngine
from jsg.engine.child.wire import Arrived
from tests.engine.fake_core import FakeGrammars

HOLES = """
import ctypes, re
from jsg.engine.child.free_memory import trim

def anonymous_kib():
    return int(re.search(r"Anonymous:\\s+(\\d+)", open("/proc/self/smaps_rollup").read())[1])

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
blocks = [libc.malloc(60_000) for _ in range(2000)]
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
    assert int(done.stdout) > 90_000, "of 115 000 KiB that are free, in pieces"


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
drop_file_pages()
print(before.count(4096) - present_kib().count(4096), read[:] == b"f" * SIZE, written[:] == b"w" * SIZE)
"""


def test_pages_of_files_are_dropped_unless_they_were_written():
    if not sys.platform.startswith("linux"):
        pytest.skip("no smaps")
    done = subprocess.run([sys.executable, "-c", FILES], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "True", "True"]


def test_when_nothing_is_left_to_compile_it_is_done_at_once():
    done: list[str] = []
    idle = IdleTrim(lambda: done.append("trim"), lambda: 100.0, lambda: done.append("drop"))
    idle()
    assert done == []
    idle.note_settled()
    idle()
    idle()
    assert done == ["drop", "trim"]


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
        collect_and_trim()
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
