"""Compiles the kernels with numba where it is installed. Without numba they run as plain Python.

A kernel is compiled once, for the types in its annotations: `int` has 64 bits, an array is one of those below, and a
NamedTuple is a record of its annotated fields. This module imports numba only when a kernel is defined, so a server
that never masks does not pay for it.
"""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import os
import struct
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, final

import numpy as np

_KERNELS = ("tables", "run.memory", "run.states", "run.levels", "run.steps", "run.kernels")
_PUBLIC = frozenset({"nogil", "cache", "pipeline_class"})
_IS_ENTRY = "is_entry"
READ_ONLY = "read-only"
NOWHERE = os.devnull
"""The cache directory that stands for none, since numba takes an empty name for its own choice."""
WORDS = 3
"""Words of 8 bytes for a field of a record: an int; or the address of an array and the lengths of its axes."""
MAX_ARRAYS = 8
"""The most arrays that a kernel takes besides its records. It takes at most one int."""

Bytes1 = Annotated[np.ndarray, np.dtype("uint8"), 1]
Bytes2 = Annotated[np.ndarray, np.dtype("uint8"), 2]
Ints1 = Annotated[np.ndarray, np.dtype("int32"), 1]
Ints2 = Annotated[np.ndarray, np.dtype("int32"), 2]
Longs1 = Annotated[np.ndarray, np.dtype("int64"), 1]
Longs2 = Annotated[np.ndarray, np.dtype("int64"), 2]
Shorts1 = Annotated[np.ndarray, np.dtype("int16"), 1]
Words1 = Annotated[np.ndarray, np.dtype("uint32"), 1]
GivenBytes1 = Annotated[np.ndarray, np.dtype("uint8"), 1, READ_ONLY]
GivenInts1 = Annotated[np.ndarray, np.dtype("int32"), 1, READ_ONLY]
GivenShorts2 = Annotated[np.ndarray, np.dtype("int16"), 2, READ_ONLY]
GivenWords1 = Annotated[np.ndarray, np.dtype("uint16"), 1, READ_ONLY]


def compiled[F: Callable[..., Any]](function: F) -> F:
    """A kernel that `Kernels` runs. It returns an int or None; its tables are named `t`, its memory `m`."""
    vars(function)[_IS_ENTRY] = True
    return inner(function)


def inner[F: Callable[..., Any]](function: F) -> F:
    """A function that compiled ones call. It stays what it is where numba is not installed."""
    if (numba := _numba()) is None:
        return function
    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "no_rewrites": True}
    return _njit(numba, function, pipeline_class=_link().LinkedCompiler, **options)


def _njit(numba: Any, function: Any, **options: Any) -> Any:
    # Without numba's own memory management, since kernels allocate nothing.
    options |= {"nogil": True, "_nrt": False}
    try:
        return numba.njit(**options)(function)
    except KeyError:  # these options are no promise of numba's; a version without them is slower, and as right
        public = {name: value for name, value in options.items() if name in _PUBLIC}
        return numba.njit(**public)(function)


@final
class Kernels:
    """Runs kernels. Where numba is installed they are compiled when this is made, or read from their cache."""

    def __init__(self, static: type, memory: type):
        """Takes the types of the records `t` and `m`."""
        self._numbers: dict[Callable[..., Any], tuple[int, int | None, tuple[np.ndarray, ...]]] = {}
        self._entry: Callable[..., int] | None = None
        if (numba := _numba()) is None:
            return
        # Numba's cache does not see that a function of another file has changed, so each version has its own directory.
        directory = numba.config.CACHE_DIR
        is_kept = directory != NOWHERE
        if is_kept:
            numba.config.CACHE_DIR = str(kernel_directory(Path(directory or default_kernel_cache())))
        try:
            signature = _link().signature(static, memory)
            dispatcher = _njit(numba, _link().run, cache=is_kept, no_cfunc_wrapper=True)
            _link().read_or_compile(dispatcher, signature)
        finally:
            numba.config.CACHE_DIR = directory
        self._entry = dispatcher.get_overload(signature)
        nothing = np.empty(0, np.uint8)
        for number, kernel in enumerate(entries()):
            kinds = [hint for name, hint in _hints(kernel.py_func).items() if name not in ("t", "m", "return")]
            place = kinds.index(int) if int in kinds else None
            missing = MAX_ARRAYS + (place is not None) - len(kinds)
            self._numbers[kernel] = number, place, (nothing,) * missing
        _forget_sources([dispatcher, *functions()])

    def record(self, values: tuple[Any, ...]) -> Any:
        """What calls receive as `t` or `m`. Whoever keeps it keeps the arrays too."""
        if self._entry is None:
            return values
        hints = _hints(type(values)).values()
        words = [_words(value, hint) for value, hint in zip(values, hints, strict=True)]
        return struct.pack(f"<{WORDS * len(words)}q", *itertools.chain.from_iterable(words))

    def __call__(self, kernel: Callable[..., Any], t: Any, m: Any, *operands: Any) -> int:
        """The result of a kernel for an int and arrays, after the records that it takes; 0 if it has none.

        The caller sees to it that the arrays have the types of the annotations and are C-contiguous.
        """
        if self._entry is None:
            records = [record for name, record in (("t", t), ("m", m)) if name in _hints(kernel)]
            return kernel(*records, *operands) or 0
        number, place, rest = self._numbers[kernel]
        if place is None:
            return self._entry(number, t, m, 0, *operands, *rest)
        return self._entry(number, t, m, operands[place], *operands[:place], *operands[place + 1 :], *rest)


_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


def _words(value: Any, hint: Any) -> tuple[int, ...]:
    """An int, or an array, as compiled kernels read it in a record."""
    if hint is int:
        return (value, 0, 0)
    dtype, ndim = hint.__metadata__[:2]
    is_right = value.dtype == dtype and value.ndim == ndim and value.flags.c_contiguous
    assert is_right, f"an array of {dtype} with {ndim} axes is due, not {value.dtype} {value.shape}"
    return (value.ctypes.data, *value.shape, 0)[:WORDS]


def functions() -> Iterator[Any]:
    """All functions to compile, in an order in which none calls a later one. All kernels must be loaded."""
    for name in _KERNELS:
        module = f"jsg.constrained.{name}"
        for value in vars(sys.modules[module]).values():
            if hasattr(value, "py_func") and value.py_func.__module__ == module:
                yield value


def entries() -> list[Any]:
    """The kernels among them."""
    return [function for function in functions() if _IS_ENTRY in vars(function.py_func)]


def signature_of(function: Callable[..., Any]) -> Any:
    """Numba's signature for the annotations of a function."""
    hints = _hints(function)
    return type_of(hints["return"])(*[type_of(hints[name]) for name in inspect.signature(function).parameters])


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


def cache_directory() -> str:
    """Where numba keeps what it compiles now; `NOWHERE` if it keeps nothing."""
    return _numba().config.CACHE_DIR


def default_kernel_cache() -> Path:
    """The directory of compiled kernels unless `use_kernel_cache` names another: beside Python's compiled files."""
    return Path(__file__).parent / "__pycache__"


def kernel_directory(directory: Path) -> Path:
    """The directory inside a cache directory in which the kernels of this version lie."""
    return directory / f"kernels-{_version()}"


def has_numba() -> bool:
    """Whether kernels can be compiled. Imports nothing."""
    return importlib.util.find_spec("numba") is not None


def _forget_sources(functions: Iterable[Any]) -> None:
    """Frees what numba keeps of each function to compile it into others."""
    for function in functions:
        for overload in function.overloads.values():
            # The attribute is numba's own. Where a version has another one, nothing is freed.
            if getattr(overload.library, "_shared_module", None) is not None:
                overload.library._shared_module = None


@functools.cache
def _version() -> str:
    """A digest of all that compiled kernels depend on: their files and where these lie, and the kind of processor.

    Numba's own names have the place and the processor too. So machines with different ones may share a directory.
    """
    digest = hashlib.sha256(bytes(Path(__file__).parent) + _processor().encode())
    for name in ("jit", "link", *_KERNELS):
        digest.update(Path(__file__).parent.joinpath(*name.split(".")).with_suffix(".py").read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> str:
    """The name and the features of this machine's processor, as numba compiles for them."""
    if not has_numba():
        return ""
    llvm = importlib.import_module("llvmlite.binding")
    return f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"


def _numba() -> Any:
    """The module, or None where it is not installed."""
    try:
        return importlib.import_module("numba")
    except ImportError:
        return None


def _link() -> Any:
    return importlib.import_module("jsg.constrained.link")


def type_of(hint: Any) -> Any:
    """Numba's type for an annotation."""
    types: Any = importlib.import_module("numba.types")
    if hint in (int, bool, type(None)):
        return {int: types.int64, bool: types.boolean, type(None): types.none}[hint]
    if isinstance(hint, type) and issubclass(hint, tuple):
        fields = typing.get_type_hints(hint, include_extras=True)
        return _link().Record(hint.__name__, {name: type_of(field) for name, field in fields.items()})
    dtype, ndim, *rest = hint.__metadata__
    return _link().Array(getattr(types, dtype.name), ndim, READ_ONLY in rest)
