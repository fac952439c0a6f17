"""Every compiled program of the engine, and the only place that calls `jax.jit`.

An engine declares all its programs before it is ready, so their names and arguments are known from then on. A program
is lowered (traced, and written down for XLA) and compiled before the engine is ready, or in a thread afterwards if a
larger program can stand in for it. Lowering holds Python's interpreter lock, which the step loop needs too. So the
thread lowers one program at a time, and rests between two of them while requests run. Compiling does not hold the lock.
A call goes to the compiled program itself, so it can never trace or compile, and both counters stand still when the
thread is done. Where the first runs of a program are slower than later ones, the program is ready only after the runner
has made these runs on padding.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jsg.engine.device.compile_errors import REFUSALS, compile_error
from jsg.engine.device.pace import Pace
from jsg.engine.device.program_store import ProgramStore
from jsg.engine.private_directory import PROGRAMS_WHY, compilation_cache_path, private_directory
from jsg.errors import CompileError, ForbiddenCompileError
from jsg.models.tensor_parallel import spec_of

logger = logging.getLogger(__name__)

CACHE_BYTES = 4 * 2**30
"""Size of the persistent cache. JAX locks only a bounded cache, and two engines may share it."""
COMPILE_THREADS = max(2, min(8, (os.cpu_count() or 1) // 2))
"""How many programs are compiled at a time. XLA compiles without the GIL, so two use both cores of a small machine. A
compilation uses several threads at times, so a large machine has half as many compilations as cores."""

COMPILER_OPTIONS: Mapping[str, Mapping[str, bool | int]] = {
    "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}
}
"""XLA's options for every program, by platform. With the matmuls of cuBLASLt a dense layer is 9 launches, because they
add the residual stream themselves. XLA's own Triton matmuls split their sums and leave 10 to 12 launches. Autotuning
would stop the steps that run while the other programs are compiled, and copy matmul operands into memory that the KV
pool needs. On an H200 decode steps are as fast without it, and as fast as with XLA's own matmuls (docs/performance.md).
"""
QUANTISED_OPTIONS: Mapping[str, Mapping[str, bool | int]] = {"gpu": {"xla_gpu_enable_triton_gemm": True}}
"""XLA's options for programs with kernels in 8 bits. cuBLASLt cannot multiply these with wider rows, so XLA would write
each kernel in bfloat16 at every step. XLA's own matmuls convert each block as they read it, and autotuning finds the
sizes of their blocks. Programs that encode images have no kernels in 8 bits and keep the options above, because XLA's
own matmuls cannot do some of theirs. Programs with kernels in 4 bits keep them too: jsg's own kernel multiplies
these, and cuBLASLt the others. In programs of few rows jsg's kernel multiplies int8 as well, whatever the options."""


ANY_KIND = ""
"""Stands for every kind of program. A kind is the first word of a program's name."""


class HostArray(jax.ShapeDtypeStruct):
    """The shape of an argument that comes from the host at every call."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Declared:
    """A program as it was declared.

    Attributes:
        arguments: Shapes of its arguments.
        trace: Lowers the program; None once that is done, so that it keeps nothing alive.
        results: Shapes and types of its results, once it is lowered.
    """

    arguments: tuple[Any, ...]
    trace: Callable[[], jax.stages.Lowered] | None
    results: Any = None


class Executables:
    """Programs by name: declared, lowered, compiled, called.

    Attributes:
        mesh: Devices that run every program together; None for one.
    """

    def __init__(
        self,
        *,
        forbid_compile: bool,
        runs_before_ready: int = 0,
        compiler_options: Mapping[str, str | bool | int] | None = None,
        options_by_kind: Mapping[str, Mapping[str, str | bool | int]] | None = None,
        mesh: Mesh | None = None,
        store: ProgramStore | None = None,
    ):
        """Declares no program yet.

        Args:
            forbid_compile: Whether no program may be lowered after `seal`.
            runs_before_ready: How often a program must run before it is ready.
            compiler_options: XLA's options for every program.
            options_by_kind: XLA's options for programs of these kinds, in place of the others.
            mesh: Devices that run every program together; None for JAX's default device.
            store: Has every program compiled, so that none is traced or compiled here; None to compile them.
        """
        self.mesh = mesh
        self._store = store
        self._runs_before_ready = runs_before_ready
        self._options = {ANY_KIND: compiler_options or {}, **(options_by_kind or {})}
        self._cold: dict[Hashable, int] = {}  # compiled programs that are not ready: runs that are left
        self._forbid_compile = forbid_compile
        self._is_sealed = False
        self._declared: dict[Hashable, _Declared] = {}
        self._lowering = threading.Lock()
        self._lowered: dict[Hashable, jax.stages.Lowered] = {}
        self._compiled: dict[Hashable, jax.stages.Compiled] = {}
        self._order: dict[Hashable, int] = {}  # of compiling, which is the same on every host
        self._num_elsewhere: Callable[[], int] = lambda: sys.maxsize
        self._thread: threading.Thread | None = None
        self._pace = Pace()

    def declare(
        self,
        name: Hashable,
        fn: Callable[..., Any],
        *args: Any,
        donate: tuple[int, ...] = (),
        out_specs: Any = PartitionSpec(),  # noqa: B008 # never changes
    ) -> None:
        """Declares that a program runs `fn` on arguments like `args` (arrays or their shapes). Nothing is traced yet.

        Results reuse the memory of donated arguments. A name that was declared before is left as it is. On a mesh `fn`
        sees the part of the arguments that one device has. The sharding of each argument says how it is split, and
        `out_specs` says how the results are.

        Raises:
            ForbiddenCompileError: After `seal` under `--forbid-compile`.
        """
        if name in self._declared:
            return
        self._check_allowed(name)
        fn, shared = self._over_devices(fn, args, out_specs)
        trace = functools.partial(self._traced, fn, shared, donate)
        self._declared[name] = _Declared(jax.tree.map(_shape_of, args), trace)

    def lower(self, name: Hashable, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> None:
        """Declares a program as `declare` does, and traces it now."""
        self.declare(name, fn, *args, donate=donate)
        self._lower_one(name)

    def lower_all(self) -> None:
        """Traces every declared program now, if it has to be compiled."""
        if self._store is None:
            for name in self.names():
                self._lower_one(name)

    def compile(self, names: Iterable[Hashable], report: Callable[[Hashable], None] = lambda name: None) -> None:
        """Lowers and compiles declared programs now, `COMPILE_THREADS` at a time.

        It calls `report` with each program that is done.
        """
        missing = [name for name in names if name not in self._compiled]
        self._put_in_order(missing)
        with ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="compile") as pool:
            for name in pool.map(self._compile_one, missing):
                report(name)

    def clear(self, kinds: Container[str] | None = None) -> None:
        """Drops the programs of some kinds, or every one, so that programs can be declared for other shapes."""
        for programs in (self._order, self._declared, self._lowered, self._compiled, self._cold):
            for name in list(programs):
                if kinds is None or (isinstance(name, tuple) and name[0] in kinds):
                    del programs[name]
        self._order = {name: index for index, name in enumerate(self._order)}

    def compile_rest_in_background(self) -> None:
        """Starts a thread that lowers and compiles the other declared programs, in the order of their declaration."""
        rest = [name for name in self._declared if name not in self._compiled]
        self._put_in_order(rest)
        if rest:
            self._thread = threading.Thread(target=self._compile_rest, args=(rest,), name="compile", daemon=True)
            self._thread.start()

    def seal(self) -> None:
        """Says that warm-up is over."""
        self._is_sealed = True

    def names(self) -> list[Hashable]:
        """All declared programs, in the order of their declaration."""
        return list(self._declared)

    def share(self, num_elsewhere: Callable[[], int]) -> None:
        """Makes programs ready only if they are compiled on the other hosts as well.

        Args:
            num_elsewhere: Gives the least `num_in_order` of the other hosts, which may lag behind.
        """
        self._num_elsewhere = num_elsewhere

    @property
    def num_in_order(self) -> int:
        """How many programs are compiled before the first one that is not. Every host compiles in the same order."""
        names = list(self._order)
        return next((index for index, name in enumerate(names) if name not in self._compiled), len(names))

    def is_ready(self, name: Hashable) -> bool:
        """Whether the program can be called and has made its first runs."""
        return name in self._compiled and name not in self._cold and self._is_elsewhere(name)

    def cold(self) -> list[Hashable]:
        """Compiled programs that have to run before they are ready, in the order of compiling."""
        return sorted(filter(self._is_elsewhere, list(self._cold)), key=self._order.__getitem__)

    @property
    def num_lowered(self) -> int:
        """Declared programs that were traced."""
        return 0 if self._store is not None else sum(program.trace is None for program in list(self._declared.values()))

    @property
    def num_compiled(self) -> int:
        """Compilations so far, including those that were found in the persistent cache."""
        return len(self._compiled) if self._store is None else 0

    @property
    def num_loaded(self) -> int:
        """Programs that were read from the store so far."""
        return 0 if self._store is None else len(self._compiled)

    @property
    def num_pending(self) -> int:
        """Programs that are declared but neither compiled nor loaded. It falls to 0, unless a compilation fails."""
        return len(self._declared) - len(self._compiled)

    @property
    def is_compiling(self) -> bool:
        """Whether the background thread is at work."""
        return self._thread is not None and self._thread.is_alive()

    def output_shape(self, name: Hashable) -> Any:
        """Shapes and types of the results of a declared program, which is lowered or loaded for it."""
        self._prepare(name)
        return self._declared[name].results

    def argument_shapes(self, name: Hashable) -> tuple[Any, ...]:
        """Shapes, types and shardings of the arguments of a declared program."""
        return self._declared[name].arguments

    def host_shapes(self, name: Hashable) -> tuple[HostArray, ...]:
        """The arguments of a declared program that come from the host, in order."""
        return tuple(leaf for leaf in jax.tree.leaves(self.argument_shapes(name)) if isinstance(leaf, HostArray))

    def compiled(self, name: Hashable) -> jax.stages.Compiled:
        """The compiled program, for its memory analysis."""
        return self._compiled[name]

    def compiler_options(self, name: Hashable) -> dict[str, str | bool | int] | None:
        """XLA's options for this program; None where it has none."""
        kind = str(name[0]) if isinstance(name, tuple) else ""
        return dict(self._options.get(kind, self._options[ANY_KIND])) or None

    def __call__(self, name: Hashable, *args: Any) -> Any:
        """Runs a compiled program."""
        self._pace.note_call()
        if self._cold:
            self._count_run(name)
        return self._compiled[name](*args)

    def close(self, *, waits: bool = True) -> None:
        """Ends the background thread. If `waits` is set, waits for the program under way, and drops all of them."""
        self._pace.close()
        if waits and self._thread is not None:
            self._thread.join()
        if waits:
            self.clear()

    def _put_in_order(self, names: Iterable[Hashable]) -> None:
        for name in names:
            self._order.setdefault(name, len(self._order))

    def _is_elsewhere(self, name: Hashable) -> bool:
        return self._order[name] < self._num_elsewhere()

    def _over_devices(
        self, fn: Callable[..., Any], args: tuple[Any, ...], out_specs: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """On a mesh, a function that runs `fn` on every device, and its argument shapes with their shardings."""
        mesh = self.mesh
        if mesh is None:
            return fn, args
        specs = jax.tree.map(spec_of, args, is_leaf=lambda x: x is None)
        fn = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec_of(x))), args
        )
        return fn, shapes

    def _traced(self, fn: Callable[..., Any], args: tuple[Any, ...], donate: tuple[int, ...]) -> jax.stages.Lowered:
        return jax.jit(fn, donate_argnums=donate).lower(*args)

    def _check_allowed(self, name: Hashable) -> None:
        if self._is_sealed and self._forbid_compile:
            raise ForbiddenCompileError(f"{name} would be compiled after warm-up, which --forbid-compile forbids")

    def _lower_one(self, name: Hashable) -> jax.stages.Lowered | None:
        """The lowered program; None once it is compiled, because then nobody needs what was written down for XLA."""
        with self._lowering:  # threads that trace take turns anyway, and no program is lowered twice
            program = self._declared[name]
            if program.trace is not None:
                self._check_allowed(name)
                try:
                    lowered = self._lowered[name] = program.trace()
                except REFUSALS as error:
                    raise compile_error(name, error, self._device_name) from error
                self._declared[name] = _Declared(program.arguments, None, lowered.out_info)
            return self._lowered.get(name)

    def _prepare(self, name: Hashable) -> None:
        """Does what needs Python's interpreter lock: it lowers a program, or loads it."""
        if self._store is None:
            self._lower_one(name)
        else:
            self._compile_one(name)

    def _compile_one(self, name: Hashable) -> Hashable:
        self._put_in_order([name])
        if self._store is not None:
            if name not in self._compiled:
                compiled = self._store.load(name, self._devices)
                self._declared[name] = _Declared(self._declared[name].arguments, None, compiled.out_info)
                self._add(name, compiled)
            return name
        lowered = self._lower_one(name)
        if lowered is None:  # another thread has compiled it meanwhile
            return name
        try:
            self._add(name, lowered.compile(self.compiler_options(name)))
        except REFUSALS as error:
            raise compile_error(name, error, self._device_name, lowered) from error
        self._lowered.pop(name, None)  # after the line above, so that a program is always lowered or compiled
        return name

    @property
    def _devices(self) -> list[Any]:
        """The devices that run the programs."""
        return jax.local_devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def _device_name(self) -> str:
        """The name of the device that programs are compiled for."""
        return self._devices[0].device_kind

    def _add(self, name: Hashable, compiled: jax.stages.Compiled) -> None:
        if self._runs_before_ready:
            self._cold[name] = (
                self._runs_before_ready
            )  # before the next line, because another thread may ask whether it is ready
        self._compiled[name] = compiled

    def _count_run(self, name: Hashable) -> None:
        if (left := self._cold.get(name)) is not None:
            if left > 1:
                self._cold[name] = left - 1
            else:
                del self._cold[name]

    def _compile_rest(self, names: list[Hashable]) -> None:
        self._pace.begin()
        for name in names:
            try:
                if name not in self._lowered:
                    self._pace.do(functools.partial(self._prepare, name))
                if self._pace.is_closed:
                    return
                self._compile_one(name)
            except CompileError as error:
                logger.error("compiling %s in the background failed, and a larger program stands in: %s", name, error)
            except Exception:  # a larger program stands in for it, so this costs speed but no answer
                logger.exception("compiling %s in the background failed", name)


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return x if isinstance(x, jax.ShapeDtypeStruct) else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def use_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs in an owner-only directory, because whoever can write there can run code as us.

    Args:
        directory: See `compilation_cache_path`.

    Raises:
        ConfigError: The directory cannot be made, belongs to somebody else, or others may enter it.
    """
    path = private_directory(compilation_cache_path(directory), "--compilation-cache-dir", PROGRAMS_WHY)
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@contextlib.contextmanager
def no_compilation_cache() -> Iterator[None]:
    """Programs that are compiled inside are not taken from a cache.

    XLA writes an executable for a CPU without its code if the executable was itself read from a cache.
    """
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # JAX asks only once whether there is one
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
