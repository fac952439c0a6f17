"""Compiles the kernels with numba where it is installed; without it they run as the plain Python that they are.

Nothing here imports numba before a kernel is defined, so a server that never masks never pays for it.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

KERNEL_MODULE = "jsg.constrained.kernels"


def compiled[F: Callable[..., Any]](function: F) -> F:
    """The function, compiled without the GIL and cached on disk; unchanged where numba is not installed."""
    return _compiled(function, {})


def inner[F: Callable[..., Any]](function: F) -> F:
    """The same for a function that only compiled ones call: it is compiled faster."""
    return _compiled(function, {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def _compiled(function: Any, options: dict[str, bool]) -> Any:
    try:
        import numba
    except ImportError:
        return function
    return numba.njit(nogil=True, cache=True, **options)(function)


def use_kernel_cache(directory: Path) -> bool:
    """Keeps compiled kernels in this directory, which must be its owner's alone: what lies in it is run.

    Returns:
        Whether it has an effect: not where the kernels are already loaded, or numba is not installed. Without a call
        they lie where Python's own compiled files do.
    """
    try:
        import numba
    except ImportError:
        return False
    if KERNEL_MODULE in sys.modules:
        return numba.config.CACHE_DIR == str(directory)
    numba.config.CACHE_DIR = str(directory)
    return True
