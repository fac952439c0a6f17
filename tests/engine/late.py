"""Programs that are traced and compiled when an engine first needs them, and kept for all engines of this process.

An engine declares about 50 programs, which take half a minute to trace and compile, and most tests run a few of them.
Engines of one model and of one size have the same programs, so what one of them has compiled serves the others.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any
from unittest import mock

import jax
from jax.sharding import PartitionSpec

from jsg.cache.pool import make_pool
from jsg.engine import startup
from jsg.engine.core import EngineCore
from jsg.engine.device.executables import Executables
from jsg.kernels_pallas import ops

MAX_KEPT = 200
"""Programs that are kept at a time. Each takes about 65 memory mappings of the 65530 that Linux allows to a process,
and after each file `tests/conftest.py` frees what JAX has compiled where there are more than 20000."""
POOL_TOKENS = 1024
"""Tokens that a pool on the device holds at least: an engine that may use fewer has the programs of one with these."""


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A compiled program, and the shapes of what it returns."""

    compiled: jax.stages.Compiled
    out_info: Any


_kept: OrderedDict[Hashable, Kept] = OrderedDict()  # the last is the latest used


class WhenNeeded(dict[Hashable, jax.stages.Compiled]):
    """Makes each value when it is first looked up."""

    def __init__(self, make: Callable[[Hashable], jax.stages.Compiled]):
        super().__init__()
        self._make = make

    def __missing__(self, name: Hashable) -> jax.stages.Compiled:
        return self.setdefault(name, self._make(name))


class LateExecutables(Executables):
    """Behaves as if every program that is declared were compiled."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._keys: dict[Hashable, Hashable] = {}
        self._compiled = WhenNeeded(self._make)

    def declare(
        self,
        name: Hashable,
        fn: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
        out_specs: Any = PartitionSpec(),  # noqa: B008 # never changes
    ) -> None:
        if name in self._declared:
            return
        super().declare(name, fn, *args, donate=donate, out_specs=out_specs)
        leaves, structure = jax.tree.flatten(self.argument_shapes(name))
        shapes = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        how = donate, out_specs, self.mesh, ops.best_implementation(), str(self.compiler_options(name))
        self._keys[name] = _identity(fn), structure, shapes, how

    def lower_all(self) -> None:
        pass

    def compile(self, names: Iterable[Hashable], report: Callable[[Hashable], None] = lambda name: None) -> None:
        pass

    def compile_rest_in_background(self) -> None:
        pass

    def is_ready(self, name: Hashable) -> bool:
        return name in self._declared

    def output_shape(self, name: Hashable) -> Any:
        kept = _kept.get(self._keys[name])
        return super().output_shape(name) if kept is None else kept.out_info

    def _check_allowed(self, name: Hashable) -> None:
        if name not in self._declared:
            super()._check_allowed(name)

    def _make(self, name: Hashable) -> jax.stages.Compiled:
        kept = _kept.pop(self._keys[name], None)
        if kept is None:
            lowered = self._lower_one(name)
            assert lowered is not None, "only programs that are compiled are not kept lowered"
            kept = Kept(lowered.compile(self.compiler_options(name)), lowered.out_info)
            while len(_kept) >= MAX_KEPT:
                _kept.popitem(last=False)
        _kept[self._keys[name]] = kept
        return kept.compiled


def _identity(fn: Callable[..., Any]) -> Hashable:
    """What its trace depends on beside its arguments: the values that it is bound to, and the model if it runs one."""
    bound: tuple[Hashable, ...] = ()
    if isinstance(fn, functools.partial):
        for value in fn.args:
            merged = inspect.getclosurevars(inspect.unwrap(value)).nonlocals if inspect.isfunction(value) else {}
            bound += (merged["graph"], merged["structure"]) if merged else (value,)
        fn, bound = fn.func, (*bound, *sorted(fn.keywords.items()))
    return fn.__module__, fn.__qualname__, bound


@contextlib.contextmanager
def late_programs() -> Iterator[None]:
    """Engines that are made inside have late programs, and trace none to learn how much memory a step takes.

    They use the compile cache that the environment names, which does not take what is compiled in no time.
    """
    with (
        mock.patch.object(startup, "Executables", LateExecutables),
        mock.patch.object(startup, "_measured", return_value=(0, 0)),
        mock.patch.object(startup, "make_pool", _pool_of_one_size),
        mock.patch.object(startup, "use_compilation_cache"),
    ):
        yield


class LateCore(EngineCore):
    """What an engine process can be told to run: a real engine with late programs."""

    def __init__(self, *args: Any, **options: Any):
        with late_programs():
            super().__init__(*args, **options)


def _pool_of_one_size(kv_shapes: Any, num_pages: list[int], page_size: int, *args: Any, **options: Any) -> Any:
    least = -(-POOL_TOKENS // page_size) + 1
    return make_pool(kv_shapes, [max(count, least) for count in num_pages], page_size, *args, **options)
