"""Says whether a directory holds the compiled kernels, and compiles them into it."""

import importlib
import importlib.metadata
import sys
from pathlib import Path

from jsg.constrained import jit


def is_filled(directory: Path) -> bool:
    """Whether the kernels lie in the directory, or there is nothing to compile."""
    return not jit.has_numba() or _mark(directory).exists()


def fill(directory: Path) -> None:
    """Compiles the kernels in this process, which takes some twenty seconds, and keeps them in the directory."""
    if jit.use_kernel_cache(directory):
        importlib.import_module("jsg.constrained.run.kernels")
        _mark(directory).touch()


def _mark(directory: Path) -> Path:
    """A file that says that all kernels are there."""
    version = importlib.metadata.version("numba")
    return jit.kernel_directory(directory) / f"complete-{sys.implementation.cache_tag}-numba-{version}"
