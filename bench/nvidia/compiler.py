"""Compiles functions for NVIDIA cards on a machine that has none, and reads what came out.

The cards are those of `jsg.engine.device.cards`. The tests read the memory analysis, the optimised program, the machine
code, and the list of launches, which XLA writes to a folder. None of these says how fast the program is, or that its
results are right.
"""

import dataclasses
import functools
import pathlib
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from bench import hlo
from bench.hlo import VIEWS, Matrices
from bench.nvidia import machine_code
from jsg.engine.device.cards import Card, card, mesh_of
from jsg.engine.device.targets import traced_for

CONTAINERS = ("kCommandBuffer", "kConditional", "kSequential", "kWhile")
ADDRESSES = "kDynamicSliceFusion"
"""Launches nothing: it hands a part of an array to the call below it, where it lies."""
IN_PLACE = VIEWS | {"custom-call"}
"""Operations whose result may be as large as the pool: arguments, views of them, and jsg's own kernels, which write the
pool in place. Any other operation, such as a copy or a conversion, reads and writes all of it."""
OPTIONS = {"xla_gpu_autotune_level": 0}
"""XLA does not tune, because there is no device on which it could time alternatives."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel, a copy, or a call of a library.

    Attributes:
        name: The name of the kernel, or the kind of a launch that has no name.
        containers: The command buffers, loops and branches around it, outermost first. Each has its line in the list,
            so that two of the same kind differ.
        shared_bytes: Shared memory of one thread block.
    """

    name: str
    containers: tuple[str, ...]
    shared_bytes: int

    @property
    def kernel(self) -> str:
        """The name without the number that tells kernels of one name apart."""
        return re.sub(r"__\d+$", "", self.name)


def memory_of(compiled: jax.stages.Compiled) -> Any:
    """XLA's memory analysis of a program, which exists for every GPU."""
    stats = compiled.memory_analysis()
    assert stats is not None, "XLA says it of every program for a GPU"
    return stats


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A program compiled for a card, or for several of its kind.

    Attributes:
        hlo: The optimised program as text.
        launches: The launches in order. Those inside a loop are listed once.
    """

    card: Card
    compiled: jax.stages.Compiled
    hlo: str
    launches: tuple[Launch, ...]

    @property
    def fits(self) -> bool:
        """Whether every launch finds as much shared memory as it asks for."""
        return max(launch.shared_bytes for launch in self.launches) <= self.card.shared_bytes

    @property
    def temporary_bytes(self) -> int:
        """The bytes of memory beside arguments and results."""
        return memory_of(self.compiled).temp_size_in_bytes

    @property
    def aliased_bytes(self) -> int:
        """The bytes of results that reuse the memory of donated arguments."""
        return memory_of(self.compiled).alias_size_in_bytes

    @property
    def is_one_command_buffer(self) -> bool:
        """Whether all launches are in one command buffer: none is before or behind it, and no loop is around it."""
        places = {launch.containers for launch in self.launches}
        return len(places) == 1 and all(len(place) == 1 and "kCommandBuffer" in place[0] for place in places)

    def makers_of(self, elements: int) -> set[str]:
        """The operations, also inside fusions, whose result is an array of `elements` numbers or more."""
        return hlo.makers_of(self.hlo, elements)

    def writers_of(self, matrices: Matrices) -> list[str]:
        """The operations that write one of these matrices, or its transpose, to memory: see `hlo.writers_of`."""
        return hlo.writers_of(self.hlo, matrices)

    def kernel(self, name: str) -> Launch:
        """The only kernel whose name begins with this."""
        (found,) = {launch for launch in self.launches if launch.name.startswith(name)}
        return found

    def instructions(self, kernel: str, nvdisasm: pathlib.Path) -> Counter[str]:
        """How often each instruction occurs in the machine code of a kernel."""
        executable = self.compiled.runtime_executable()
        assert executable is not None
        return machine_code.instructions(executable.serialize(), kernel, nvdisasm)


@functools.cache
def array(*dims: int, dtype: jax.typing.DTypeLike = "bfloat16") -> jax.ShapeDtypeStruct:
    """The shape of an array."""
    return jax.ShapeDtypeStruct(dims, dtype)


def compile_for(
    name: str,
    fn: Callable[..., Any],
    *args: Any,
    donate: tuple[int, ...] = (),
    num_devices: int = 1,
    num_groups: int = 1,
    options: Mapping[str, bool | int | str] | None = None,
    keeps_kernels: bool = False,
) -> Program:
    """Traces, lowers and compiles `fn` for a card.

    Args:
        name: The card's: see `jsg.engine.device.cards`.
        fn: A pure function of arrays.
        args: Shapes. Every device has a whole copy of those that are not sharded. Nothing is allocated.
        donate: Arguments whose memory results may reuse.
        num_devices: The number of cards. The trace sees their mesh, so that ops choose kernels for a GPU.
        num_groups: See `cards.mesh_of`.
        options: Compiler options.
        keeps_kernels: Whether kernels are taken from other programs of this process, and kept for them.
    """
    devices = mesh_of(name, num_devices, num_groups)
    args = jax.tree.map(lambda x: _placed(x, NamedSharding(devices, PartitionSpec())), args)
    with traced_for(devices):
        lowered = jax.jit(fn, donate_argnums=donate).lower(*args)
    chosen = OPTIONS | dict(options or {})
    kept = {"xla_gpu_kernel_cache_file": _kernels_of(name, tuple(sorted(chosen.items())))} if keeps_kernels else {}
    folder = tempfile.mkdtemp()
    try:
        compiled = lowered.compile(compiler_options=chosen | kept | {"xla_dump_to": folder})
        listings = sorted(
            pathlib.Path(folder).glob("*.thunk_sequence*.txt")
        )  # the first list, and the changed one if there is one
        launches = _launches(listings[-1].read_text(encoding="utf-8"))
    finally:
        shutil.rmtree(folder)
    text = compiled.as_text()
    assert text is not None, "XLA shows every program for a GPU"
    return Program(card(name), compiled, text, launches)


@functools.cache
def _kernels_of(card: str, options: tuple[tuple[str, bool | int | str], ...]) -> str:
    """XLA's file of kernels. In it a kernel is known by what it computes, so each card and options have their own."""
    return str(pathlib.Path(_folder().name, str(_kernels_of.cache_info().misses)))


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """It lives as long as this process."""
    return tempfile.TemporaryDirectory()


def _placed(x: Any, whole: NamedSharding) -> Any:
    """The shape of an array on every device; anything else as it is."""
    is_placed = not isinstance(x, jax.ShapeDtypeStruct) or x.sharding is not None
    return x if is_placed else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)


def _launches(listing: str) -> tuple[Launch, ...]:
    """Reads XLA's list, in which the contents of a container are indented below it."""
    launches, open_containers = [], []
    for index, line in enumerate(listing.splitlines()):
        match = re.match(r"( *)\d+: (\w+)\s+\[.*?\]\s*(\S*)(?:.*shared_memory: (\d+))?", line)
        if match is None:
            continue
        indent, kind, name, shared = match.groups()
        while open_containers and open_containers[-1][0] >= len(indent):
            open_containers.pop()
        if kind in CONTAINERS:
            open_containers.append((len(indent), f"{kind} {index}"))
            continue
        if kind == ADDRESSES:
            continue
        containers = tuple(container for _, container in open_containers)
        launches.append(Launch(name if kind == "kCustomKernel" else kind, containers, int(shared or 0)))
    return tuple(launches)
