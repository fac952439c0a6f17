"""Compiles the kernels into a directory beforehand: `python -m jsg.constrained.kernel_cache DIRECTORY`.

It takes some twenty seconds of Python, which in a thread of an engine that starts would hold up everything else. So the
engine has it done by a process of its own, once for each version of the kernels.
"""

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from jsg.constrained import jit

STDERR = 2


def is_filled(directory: Path) -> bool:
    """Whether the kernels lie in the directory, or there is nothing to compile."""
    return not jit.has_numba() or _mark(directory).exists()


def fill(directory: Path) -> None:
    """Compiles the kernels in this process and keeps them in the directory."""
    if jit.use_kernel_cache(directory):
        importlib.import_module("jsg.constrained.kernels")
        _mark(directory).touch()


def fill_elsewhere(directory: Path) -> None:
    """The same in a process of its own; waits for it. Where that fails they are compiled when they are first used."""
    subprocess.run(
        [sys.executable, "-P", "-m", "jsg.constrained.kernel_cache", str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=STDERR,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=False,
    )


def _mark(directory: Path) -> Path:
    """A file that says that all kernels are there."""
    version = importlib.metadata.version("numba")
    return jit.kernel_directory(directory) / f"complete-{sys.implementation.cache_tag}-numba-{version}"


if __name__ == "__main__":
    fill(Path(sys.argv[1]))
