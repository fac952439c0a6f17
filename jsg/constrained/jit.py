"""Compiles the kernels with numba where it is installed. Without numba they run as plain Python.

A kernel is compiled once, for the types in its annotations: `int` has 64 bits, an array is one of those below, and a
NamedTuple is made of its annotated fields. This module imports numba only when a kernel is defined, so a server that
never masks does not pay for it.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np

_KERNELS = ("tables", "run.memory", "run.states", "run.levels", "run.steps", "run.kernels")
READ_ONLY = "read-only"
NOWHERE = os.devnull
"""The cache directory that stands for none, since numba takes an empty name for its own choice."""
_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}

Bytes1 = Annotated[np.ndarray, "uint8", 1]
Bytes2 = Annotated[np.ndarray, "uint8", 2]
Ints1 = Annotated[np.ndarray, "int32", 1]
Ints2 = Annotated[np.ndarray, "int32", 2]
Longs1 = Annotated[np.ndarray, "int64", 1]
Longs2 = Annotated[np.ndarray, "int64", 2]
Shorts1 = Annotated[np.ndarray, "int16", 1]
Words1 = Annotated[np.ndarray, "uint32", 1]
GivenBytes1 = Annotated[np.ndarray, "uint8", 1, READ_ONLY]
GivenInts1 = Annotated[np.ndarray, "int32", 1, READ_ONLY]
GivenShorts2 = Annotated[np.ndarray, "int16", 2, READ_ONLY]
GivenWords1 = Annotated[np.ndarray, "uint16", 1, READ_ONLY]


def compiled[F: Callable[..., Any]](function: F) -> F:
    """The function, compiled without the GIL and cached on disk; unchanged where numba is not installed."""
    return _compiled(function, {})


def inner[F: Callable[..., Any]](function: F) -> F:
    """Compiles a function that only compiled ones call, which takes less time."""
    return _compiled(function, _INNER)


def inlined[F: Callable[..., Any]](function: F) -> F:
    """Compiles a function into its callers, because a call would pass a kilobyte of array descriptions."""
    return _compiled(function, _INNER | {"forceinline": True})


def use_kernel_cache(directory: Path | None) -> bool:
    """Keeps compiled kernels in this directory, which must be its owner's alone: what lies in it is run.

    With None they are kept nowhere. Without a call they are kept beside Python's own compiled files.

    Returns:
        Whether the call has an effect. It has none where numba is not installed, or kernels are already loaded.
    """
    numba = _numba()
    if numba is None:
        return False
    if f"jsg.constrained.{_KERNELS[-1]}" in sys.modules:
        return str(directory or NOWHERE) == numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(directory or NOWHERE)
    return True


def default_kernel_cache() -> Path:
    """The directory of compiled kernels unless `use_kernel_cache` names another: beside Python's compiled files."""
    return Path(__file__).parent / "__pycache__"


def kernel_directory(directory: Path) -> Path:
    """The directory inside a cache directory in which the kernels of this version lie."""
    return directory / f"kernels-{_version()}"


def has_numba() -> bool:
    """Whether kernels can be compiled. Imports nothing."""
    return importlib.util.find_spec("numba") is not None


def _compiled(function: Any, options: dict[str, bool]) -> Any:
    numba = _numba()
    if numba is None:
        return function
    hints = typing.get_type_hints(function, include_extras=True)
    arguments = [_type_of(hints[name]) for name in inspect.signature(function).parameters]
    signature = _type_of(hints["return"])(*arguments)
    # Numba's cache does not see that a function of another file has changed, so each version has its own directory.
    directory = numba.config.CACHE_DIR
    is_kept = directory != NOWHERE
    numba.config.CACHE_DIR = str(kernel_directory(Path(directory or default_kernel_cache())))
    try:
        # Without numba's own memory management, since kernels allocate nothing: it would count, atomically, each use of
        # an array that comes out of a tuple, which makes a step ten times as slow.
        try:
            return numba.njit(signature, nogil=True, cache=is_kept, _nrt=False, **options)(function)
        except KeyError:  # these options are no promise of numba's; a version without them is slower, and as right
            return numba.njit(signature, nogil=True, cache=is_kept)(function)
    finally:
        numba.config.CACHE_DIR = directory


def forget_sources() -> None:
    """Frees what numba keeps of each kernel, half a megabyte, to compile it into others. All kernels must be loaded."""
    for name in _KERNELS:
        for value in vars(importlib.import_module(f"jsg.constrained.{name}")).values():
            for overload in getattr(value, "overloads", {}).values():
                # The attribute is numba's own. Where a version has another one, nothing is freed.
                if getattr(overload.library, "_shared_module", None) is not None:
                    overload.library._shared_module = None


@functools.cache
def _version() -> str:
    """A digest of the files that the kernels are compiled from, and of where they lie, which numba's names have too."""
    digest = hashlib.sha256(bytes(Path(__file__).parent))
    for name in ("jit", *_KERNELS):
        digest.update(Path(__file__).parent.joinpath(*name.split(".")).with_suffix(".py").read_bytes())
    return digest.hexdigest()[:16]


def _numba() -> Any:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module("numba")
    except ImportError:
        return None


def _type_of(hint: Any) -> Any:
    """Numba's type for an annotation."""
    types: Any = importlib.import_module("numba.types")
    if hint in (int, bool, type(None)):
        return {int: types.int64, bool: types.boolean, type(None): types.none}[hint]
    if isinstance(hint, type) and issubclass(hint, tuple):
        fields = typing.get_type_hints(hint, include_extras=True)
        return types.NamedTuple([_type_of(field) for field in fields.values()], hint)
    dtype, ndim, *rest = hint.__metadata__
    return types.Array(getattr(types, dtype), ndim, "C", readonly=READ_ONLY in rest)
