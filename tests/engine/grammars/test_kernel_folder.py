"""The folder of compiled kernels: it is filled beside the long work of a start, and the engine is ready after it."""

import pathlib
import threading

import pytest

from jsg.engine import startup
from jsg.engine.core import EngineCore
from jsg.engine.grammars import kernel_folder
from jsg.engine.grammars.kernel_folder import KernelFolder
from jsg.engine.grammars.lexicon import LexiconLoader
from tests.engine import small


@pytest.fixture
def used(monkeypatch) -> list[pathlib.Path | None]:
    """The folders from which kernels are loaded, as far as they are there."""
    used: list[pathlib.Path | None] = []
    monkeypatch.setattr(
        kernel_folder, "use_kernel_cache", lambda path: used.append(path if path and path.is_dir() else None)
    )
    return used


@pytest.fixture
def owned(tmp_path: pathlib.Path) -> pathlib.Path:
    tmp_path.chmod(0o700)
    return tmp_path


@pytest.mark.parametrize("reason", ["no directory", "full"])
def test_without_a_folder_the_process_loads_kernels_all_the_same(owned, reason, used, monkeypatch, caplog):
    if reason == "no directory":
        (owned / "numba").touch()
    monkeypatch.setattr(kernel_folder.kernel_cache, "is_filled", lambda path: False)
    monkeypatch.setattr(kernel_folder, "fill_elsewhere", lambda path, is_closing: None)
    with KernelFolder(owned).used():
        assert used == [None] and ("numba gave: File exists" in caplog.text) == (reason == "no directory")


def test_kernels_that_cannot_be_kept_are_compiled_into_a_directory_that_goes(owned, used, monkeypatch):
    filled: list[pathlib.Path] = []
    monkeypatch.setattr(kernel_folder, "why_unwritable", lambda path: "Read-only file system")
    monkeypatch.setattr(kernel_folder.kernel_cache, "is_filled", lambda path: path in filled)
    monkeypatch.setattr(kernel_folder, "fill_elsewhere", lambda path, is_closing: filled.append(path))
    with KernelFolder(owned).used():
        assert used == filled and owned / "numba" not in filled
    assert not filled[0].exists()


def test_whatever_goes_wrong_is_in_the_log_and_stops_no_start(owned, monkeypatch, caplog):
    monkeypatch.setattr(kernel_folder.kernel_cache, "is_filled", lambda path: 1 / 0)
    assert KernelFolder(owned).wait() is None and "ZeroDivisionError" in caplog.text


@pytest.mark.slow
def test_an_engine_is_ready_when_its_kernels_are(small_model, compile_cache_dir, monkeypatch):
    """On a busy machine the kernels take a minute, for which a client with a schema would not wait.

    The lexicon is loaded last: it is Python, and would hold up what else starts.
    """
    order: list[str] = []

    def noting(owner, name):
        real = getattr(owner, name)

        def noted(*given):
            if threading.current_thread() is threading.main_thread():
                order.append(f"{owner.__name__}.{name}")
            return real(*given)

        monkeypatch.setattr(owner, name, noted)

    noting(KernelFolder, "begin")
    noting(LexiconLoader, "begin")
    noting(startup, "_make_runner")
    noting(KernelFolder, "wait")
    EngineCore(small.make_config(small_model, compile_cache_dir)).close()
    work = ["KernelFolder.begin", "jsg.engine.startup._make_runner", "KernelFolder.wait"]
    assert order[:4] == [*work, "LexiconLoader.begin"]


def test_a_folder_is_filled_beside_other_work(owned, monkeypatch):
    has_begun, may_end = threading.Event(), threading.Event()

    def fill(path, is_closing):
        has_begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(kernel_folder.kernel_cache, "is_filled", lambda path: may_end.is_set())
    monkeypatch.setattr(kernel_folder, "fill_elsewhere", fill)
    folder = KernelFolder(owned)
    folder.begin()
    assert has_begun.wait(60), "it begins without being waited for"
    ready = threading.Thread(target=folder.wait)
    ready.start()
    assert ready.is_alive()
    may_end.set()
    ready.join()
    assert folder.wait() == owned / "numba"
