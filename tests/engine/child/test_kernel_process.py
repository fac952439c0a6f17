"""Kernels that a process of its own compiles: it ends with its parent, is not waited for for ever, and may fail."""

import errno
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jsg.constrained import jit
from jsg.constrained.run import kernel_cache
from jsg.engine.child.kernel_process import FILL_CPU_S, fill_elsewhere, fill_once

PARENT = """
import subprocess, sys, threading
from pathlib import Path
from jsg.engine.child import kernel_process

real = subprocess.Popen
subprocess.Popen = lambda command, **options: real([sys.executable, "-c", sys.argv[2], *command[-2:]], **options)
kernel_process.fill_elsewhere(Path(sys.argv[1]), threading.Event())
"""
"""Has another program in place of the process, with its arguments."""
CHILD = """
import os, resource, runpy, signal, time
from jsg.constrained.run import kernel_cache

def fill(path):
    os.kill(os.getpid(), signal.SIGTERM)  # as service managers send it to all processes of a server
    path.joinpath("facts").write_text(f"{os.getpid()} {resource.getrlimit(resource.RLIMIT_CPU)[0]} .")
    time.sleep(600)


kernel_cache.fill = fill
runpy.run_module("jsg.engine.child.kernel_process", run_name="__main__")
"""
"""The process, with kernels that take for ever."""


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts a script in Python's place, which gets the arguments of the process."""

    def put(code: str) -> None:
        script = tmp_path / "python"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -c \'{code}\' "$3" "$4" "$5"\n')
        script.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(script))

    return put


@pytest.mark.slow
def test_it_fills_the_cache_for_this_process(tmp_path: Path):
    fill_elsewhere(tmp_path, threading.Event())
    assert kernel_cache.is_filled(tmp_path)
    assert list(jit.kernel_directory(tmp_path).rglob("*.nbc"))


def test_a_process_that_does_not_end_is_ended(python, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    python('import os, sys, time; open(sys.argv[2] + "/pid", "w").write(str(os.getpid())); time.sleep(600)')
    with caplog.at_level(logging.WARNING):
        fill_elsewhere(tmp_path, threading.Event(), limit_s=1.0)
    assert "was not ready after 1 s and was ended; they are compiled in the engine process" in caplog.text
    pid = tmp_path / "pid"
    if pid.exists():  # a busy machine may not even have begun
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_a_process_is_not_waited_for_by_an_engine_that_closes(python, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    python("import time; time.sleep(600)")
    is_closing = threading.Event()
    is_closing.set()
    fill_elsewhere(tmp_path, is_closing)
    assert not caplog.records


def test_what_another_process_has_compiled_meanwhile_is_not_compiled_again(tmp_path: Path, monkeypatch):
    """Two engines start at once: the second waits for the lock, and finds that there is nothing to do."""
    calls: list[Path] = []
    monkeypatch.setattr(kernel_cache, "is_filled", lambda directory: bool(calls))
    monkeypatch.setattr(kernel_cache, "fill", calls.append)
    with open(tmp_path / "kernels.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        first, second = (threading.Thread(target=fill_once, args=(tmp_path,)) for _ in range(2))
        first.start()
        second.start()
        assert not calls
    first.join()
    second.join()
    assert calls == [tmp_path]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit(3)", "ended with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", "took more than 150 s of processor time"),
        (None, "not be started"),
    ],
)
def test_a_process_that_fails_is_told_of(
    python, code: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
):
    if code is None:
        monkeypatch.setattr(sys, "executable", "/does/not/exist")
    else:
        python(code)
    with caplog.at_level(logging.WARNING):
        fill_elsewhere(tmp_path, threading.Event())
    assert words in caplog.text


def test_it_ends_with_its_parent_and_after_so_much_processor_time(tmp_path: Path):
    """A parent that is killed while the process compiles leaves none behind. Time on a busy machine does not count."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), CHILD])
    facts: list[str] = []
    try:
        mark, deadline = tmp_path / "facts", time.monotonic() + 60
        while facts[-1:] != ["."]:
            assert parent.poll() is None and time.monotonic() < deadline, "the process did not begin"
            time.sleep(0.02)
            facts = mark.read_text().split() if mark.exists() else []
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert facts[1] == str(FILL_CPU_S)
    while _is_running(int(facts[0])):
        assert time.monotonic() < deadline, "the process outlives its parent"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class TestFill:
    """What is in a directory is used, unless it is damaged."""

    @pytest.fixture
    def compile_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """How many kernels each compilation had to compile. A kernel is a file that holds "code"."""
        counts: list[int] = []

        def import_module(_: str) -> None:
            there = {file.stem: file.read_text() for file in self.files(tmp_path)}
            if set(there.values()) - {"code"}:
                raise ValueError("pickle data was truncated")
            counts.append(2 - len(there))
            for name in ("walk", "step"):
                self.kernel(tmp_path, name).parent.mkdir(parents=True, exist_ok=True)
                self.kernel(tmp_path, name).write_text("code")

        metadata = SimpleNamespace(version=lambda _: "1")
        monkeypatch.setattr(kernel_cache, "importlib", SimpleNamespace(import_module=import_module, metadata=metadata))
        monkeypatch.setattr("jsg.constrained.jit.use_kernel_cache", lambda directory: True)
        return counts

    def kernel(self, directory: Path, name: str) -> Path:
        return jit.kernel_directory(directory) / "run_1" / f"{name}.nbi"

    def files(self, directory: Path) -> list[Path]:
        return list(jit.kernel_directory(directory).rglob("*.nbi"))

    def test_what_is_compiled_is_marked(self, tmp_path: Path, compile_counts: list[int]):
        assert not kernel_cache.is_filled(tmp_path)
        kernel_cache.fill(tmp_path)
        assert kernel_cache.is_filled(tmp_path) and compile_counts == [2]

    @pytest.mark.parametrize("damage", ["", "co", "edoc", None])
    def test_a_damaged_directory_is_filled_anew(self, damage: str | None, tmp_path: Path, compile_counts: list[int]):
        kernel_cache.fill(tmp_path)
        if damage is None:
            self.kernel(tmp_path, "walk").unlink()
        else:
            self.kernel(tmp_path, "walk").write_text(damage)
        assert not kernel_cache.is_filled(tmp_path)
        kernel_cache.fill(tmp_path)
        assert kernel_cache.is_filled(tmp_path) and compile_counts == [2, 2]

    def test_what_was_begun_is_finished_unless_it_cannot_be_read(self, tmp_path: Path, compile_counts: list[int]):
        self.kernel(tmp_path, "walk").parent.mkdir(parents=True)
        self.kernel(tmp_path, "walk").write_text("code")
        kernel_cache.fill(tmp_path)
        assert compile_counts == [1]
        kernel_cache._mark(tmp_path).unlink()
        self.kernel(tmp_path, "walk").write_text("")
        kernel_cache.fill(tmp_path)
        assert compile_counts == [1, 2] and kernel_cache.is_filled(tmp_path)

    def test_kernels_of_an_image_are_copied_and_tried(self, tmp_path: Path, compile_counts: list[int], monkeypatch):
        installed, cache = tmp_path / "installed", tmp_path / "cache"
        for directory in (installed, cache):
            directory.mkdir()
        monkeypatch.setattr(jit, "default_kernel_cache", lambda: installed)
        self.write(installed)
        kernel_cache._mark(installed).write_bytes(kernel_cache._digest(installed))
        self.kernel(installed, "walk").parent.chmod(0o500)
        kernel_cache.take_installed(cache)
        assert self.kernel(cache, "walk").parent.stat().st_mode & 0o700 == 0o700
        assert not kernel_cache.is_filled(cache), "numba may not take them, as for another processor"
        assert [file.name for file in self.files(cache)] == [file.name for file in self.files(installed)]
        self.kernel(installed, "walk").write_text("damaged")
        shutil.rmtree(jit.kernel_directory(cache))
        kernel_cache.take_installed(cache)
        assert not self.files(cache)

    def write(self, directory: Path) -> None:
        self.kernel(directory, "walk").parent.mkdir(parents=True)
        self.kernel(directory, "walk").write_text("code")

    def test_a_directory_that_cannot_be_written_is_of_no_use(
        self, tmp_path: Path, compile_counts: list[int], monkeypatch
    ):
        kernel_cache.fill(tmp_path)
        monkeypatch.setattr("tempfile.TemporaryFile", _read_only)
        assert not kernel_cache.is_filled(tmp_path)


def _read_only(**_: object) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def test_kernels_that_can_be_neither_read_nor_kept_are_compiled_for_the_process(monkeypatch: pytest.MonkeyPatch):
    directories: list[Path | None] = []

    def import_module(_: str) -> None:
        if not directories:
            raise RuntimeError("no locator available for file")

    monkeypatch.delitem(sys.modules, kernel_cache._KERNELS, raising=False)
    monkeypatch.setattr(kernel_cache, "importlib", SimpleNamespace(import_module=import_module))
    monkeypatch.setattr("jsg.constrained.jit.use_kernel_cache", directories.append)
    kernel_cache.load()
    assert directories == [None]
