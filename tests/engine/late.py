"""Programs that are traced and compiled when an engine first needs them, and kept for all engines of this process.

An engine declares about 50 programs, which take half a minute to trace and compile, and most tests run a few of them.
Engines of one model and of one size have the same programs, so what one of them has compiled serves the others.
"""

import contextlib
import dataclasses
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jsg.cache.pool import make_pool
from jsg.engine import startup
from jsg.engine.core import EngineCore
from jsg.engine.device.executables import Executables
from jsg.engine.device.programs import Programs
from jsg.errors import ForbiddenCompileError
from jsg.kernels_pallas import ops

MAX_KEPT = 200
"""Programs that are kept at a time. Each takes about 65 memory mappings of the 65530 that Linux allows to a process,
and after each file `tests/conftest.py` frees what JAX has compiled where there are more than 20000."""
POOL_TOKENS = 1024
"""Tokens that a pool on the device holds at least: an engine that may use fewer has the programs of one with these."""


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """A compiled program, and the shapes of what it returns."""

    compiled: jax.stages.Compiled
    out_info: Any


_kept: OrderedDict[Hashable, Made] = OrderedDict()  # the last is the latest used


@dataclasses.dataclass(frozen=True, slots=True)
class OutputOf:
    """Stands for the shape of an output of a program, which is known when that program is traced."""

    name: Hashable
    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """Stands in `Executables` where a lowered program stands; makes the program when that is needed."""

    name: Hashable
    make: Callable[[Hashable], Made]

    def compile(self, compiler_options: object) -> jax.stages.Compiled:
        return self.make(self.name).compiled

    @property
    def out_info(self) -> "Declared":
        return self

    def __getitem__(self, index: int) -> OutputOf:
        return OutputOf(self.name, index)


class WhenNeeded(dict[Hashable, Any]):
    """Makes each value when it is first looked up."""

    def __init__(self, make: Callable[[Hashable], object]):
        super().__init__()
        self._make = make

    def __missing__(self, name: Hashable) -> Any:
        value = self._make(name)
        return self.setdefault(name, value)


class LateExecutables(Executables):
    """Behaves as if every program that is lowered were traced, and every one that is to be compiled were compiled."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._calls: dict[Hashable, tuple[Callable[..., Any], Any, tuple[int, ...], Any]] = {}
        self._arguments = WhenNeeded(self._shapes_of_arguments)
        self._compiled = WhenNeeded(lambda name: self._lowered[name].compile(None))

    def lower(
        self,
        name: Hashable,
        fn: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
        out_specs: Any = PartitionSpec(),  # noqa: B008 # never changes
    ) -> None:
        if name in self._lowered:
            return
        if self._is_sealed and self._forbid_compile:
            raise ForbiddenCompileError(f"{name} would be compiled after warm-up")
        self._calls[name] = fn, jax.tree.map(_shape_of, args), donate, out_specs
        self._lowered[name] = Declared(name, self._make)  # pyright: ignore[reportArgumentType]
        self.num_lowered += 1

    def compile(self, names: Iterable[Hashable], report: Callable[[Hashable], None] = lambda name: None) -> None:
        pass

    def compile_rest_in_background(self) -> None:
        pass

    def is_ready(self, name: Hashable) -> bool:
        return name in self._lowered

    def clear(self) -> None:
        super().clear()
        self._calls.clear()

    def _shapes_of_arguments(self, name: Hashable) -> Any:
        def known(x: Any) -> Any:
            return self._make(x.name).out_info[x.index] if isinstance(x, OutputOf) else x

        return jax.tree.map(known, self._calls[name][1], is_leaf=lambda x: isinstance(x, OutputOf))

    def _make(self, name: Hashable) -> Made:
        fn, _, donate, out_specs = self._calls[name]
        args, options = self._arguments[name], self.compiler_options(name)
        leaves, structure = jax.tree.flatten(args)
        shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        how = donate, out_specs, self.mesh, ops.best_implementation(), tuple(sorted((options or {}).items()))
        key = _identity(fn), structure, shapes, how
        made = _kept.pop(key, None)
        if made is None:
            over_devices, shaped = self._over_devices(fn, args, out_specs)
            lowered = jax.jit(over_devices, donate_argnums=donate).lower(*shaped)
            made = Made(lowered.compile(options), lowered.out_info)
            while len(_kept) >= MAX_KEPT:
                _kept.popitem(last=False)
        _kept[key] = made
        return made


def _shape_of(x: Any) -> Any:
    """As `Executables` sees an argument; it keeps no array."""
    if isinstance(x, jax.ShapeDtypeStruct | OutputOf):
        return x
    sharding = x.sharding if isinstance(x.sharding, NamedSharding) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _identity(fn: Callable[..., Any]) -> Hashable:
    """What its trace depends on besides arguments: what it closes over, and the model if it runs that."""
    fn = inspect.unwrap(fn)
    cells = {name: cell.cell_contents for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)}
    programs, model = cells.pop("self", None), ()
    if isinstance(programs, Programs):
        model = (programs._config.num_top,)
        if "_merge" in fn.__code__.co_names:
            merged = inspect.getclosurevars(inspect.unwrap(programs._merge)).nonlocals
            model += merged["graph"], merged["structure"]
    return fn.__module__, fn.__qualname__, tuple(sorted(cells.items())), model


@contextlib.contextmanager
def late_programs() -> Iterator[None]:
    """Engines that are made inside have late programs, and trace none to learn how much memory a step takes.

    They use the compile cache that the environment names, which does not take what is compiled in no time.
    """
    with (
        mock.patch.object(startup, "Executables", LateExecutables),
        mock.patch.object(startup, "_temporary_bytes", return_value=0),
        mock.patch.object(startup, "make_pool", _pool_of_one_size),
        mock.patch.object(startup, "use_compilation_cache"),
    ):
        yield


class LateCore(EngineCore):
    """What an engine process can be told to run: a real engine with late programs."""

    def __init__(self, *args: Any, **options: Any):
        with late_programs():
            super().__init__(*args, **options)


def _pool_of_one_size(num_layers: int, num_pages: int, page_size: int, *args: Any, **options: Any) -> Any:
    least = -(-POOL_TOKENS // page_size) + 1
    return make_pool(num_layers, max(num_pages, least), page_size, *args, **options)
