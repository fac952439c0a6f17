"""Says whether a directory holds the compiled kernels, and compiles them into it."""

import gc
import hashlib
import importlib
import importlib.metadata
import logging
import shutil
import sys
import tempfile
from pathlib import Path

from jsg.constrained import jit

logger = logging.getLogger(__name__)

_KERNELS = "jsg.constrained.run.kernels"


def is_filled(directory: Path) -> bool:
    """Whether numba can load all kernels from the directory, or there is nothing to compile.

    It cannot where a file is damaged, or where the directory is read-only or full: numba then looks elsewhere.
    """
    if not jit.has_numba():
        return True
    try:
        with tempfile.TemporaryFile(dir=jit.kernel_directory(directory)):
            return _is_complete(directory)
    except OSError:
        return False


def take_installed(directory: Path) -> None:
    """Copies the kernels that were compiled when jsg was installed, as in a container's image, if there are any.

    They are not marked as complete, so that `fill` finds out whether numba takes them.

    Raises:
        OSError: The directory is read-only or full.
    """
    installed = jit.default_kernel_cache()
    if installed != directory and jit.has_numba() and _is_complete(installed):
        source, target = jit.kernel_directory(installed), jit.kernel_directory(directory)
        for file in _files(installed):  # without their modes: an image may be read-only
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def fill(directory: Path) -> None:
    """Compiles the kernels in this process, which takes 5 to 15 seconds, and stores them in the directory.

    What lies there is used. If it is damaged, it is dropped first: a process that reads it at the same time compiles
    the kernels for itself.

    Raises:
        OSError: The directory is read-only or full.
    """
    if not jit.use_kernel_cache(directory):
        return
    if _mark(directory).exists():  # else nothing says what the files should be
        _drop(directory)
    is_collecting = gc.isenabled()
    gc.disable()  # it takes an eighth of the time, and finds little
    try:
        importlib.import_module(_KERNELS)
    except OSError:
        raise
    except Exception:  # numba unpickles the files, and a damaged one may raise anything
        logger.warning("the compiled kernels of grammars cannot be read; they are compiled anew", exc_info=True)
        _drop(directory)
        importlib.import_module(_KERNELS)
    finally:
        if is_collecting:
            gc.enable()
    _mark(directory).write_bytes(_digest(directory))


def load() -> None:
    """Loads the kernels into this process. If they can be neither read nor kept, it compiles them for itself alone."""
    if _KERNELS in sys.modules:
        return
    try:
        importlib.import_module(_KERNELS)
    except Exception:  # as above; a full or read-only directory raises here too, and a bug raises again below
        logger.warning("the kernels of grammars are compiled without their cache, which cannot be used", exc_info=True)
        jit.use_kernel_cache(None)
        importlib.import_module(_KERNELS)


def _is_complete(directory: Path) -> bool:
    """Whether the directory has the files that it had when it was filled."""
    try:
        return _mark(directory).read_bytes() == _digest(directory) != b""
    except OSError:
        return False


def _drop(directory: Path) -> None:
    shutil.rmtree(jit.kernel_directory(directory))


def _mark(directory: Path) -> Path:
    """The file whose presence says that the directory has all kernels. It holds their digest."""
    version = importlib.metadata.version("numba")
    return jit.kernel_directory(directory) / f"complete-{sys.implementation.cache_tag}-numba-{version}"


def _files(directory: Path) -> list[Path]:
    return sorted(jit.kernel_directory(directory).glob("*/*.nb[ic]"))


def _digest(directory: Path) -> bytes:
    """A digest of all files of kernels; empty where there are none."""
    digest, files = hashlib.sha256(), _files(directory)
    for file in files:
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest().encode() if files else b""


if __name__ == "__main__":  # for those who install jsg for others
    fill(jit.default_kernel_cache())
