"""Says whether a directory holds the compiled kernels, and compiles them into it."""

import importlib
import importlib.metadata
import sys
from pathlib import Path

from jsg.constrained import jit


def is_filled(directory: Path) -> bool:
    """Whether the directory has the compiled kernels, or there is nothing to compile."""
    return not jit.has_numba() or _mark(directory).exists()


def fill(directory: Path) -> None:
    """Compiles the kernels in this process, which takes about twenty seconds, and stores them in the directory."""
    if jit.use_kernel_cache(directory):
        importlib.import_module("jsg.constrained.run.kernels")
        _mark(directory).touch()


def _mark(directory: Path) -> Path:
    """The file whose presence says that the directory has all kernels."""
    version = importlib.metadata.version("numba")
    return jit.kernel_directory(directory) / f"complete-{sys.implementation.cache_tag}-numba-{version}"
