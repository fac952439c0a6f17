"""Block sizes of the kernels. They are data, in a file in `tuning/` for each class of cards.

A kernel whose blocks would not fit into the shared memory of the card gets smaller ones (`fitting`) before it is
compiled, because the compiler only refuses it.
"""

import functools
import importlib.resources
import json
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

import jax.numpy as jnp
from jax._src.pallas.triton import gpu_info  # what lowering asks; JAX has no public name for it

FALLBACK = "sm_86"
"""The class of cards that no file names, and of interpret mode. No class has less shared memory."""
LEAST_BLOCK_K = 16
LEAST_STAGES = 2


class CardClass(NamedTuple):
    """What a file says of its cards.

    Attributes:
        name: The name of the file.
        shared_bytes: The shared memory that one program may use.
        has_warp_groups: Whether several warps multiply a block of 64 rows or more together, from shared memory.
        kernels: Sizes by kernel; each entry is for steps of so many rows or more.
    """

    name: str
    shared_bytes: int
    has_warp_groups: bool
    kernels: dict[str, list[dict[str, int]]]


class Sizes(Protocol):
    """Sizes of a kernel with a loop over blocks: a named tuple."""

    @property
    def block_k(self) -> int:
        """Keys, or summands, of a block."""
        ...

    @property
    def num_stages(self) -> int:
        """Blocks in flight."""
        ...

    def _replace(self, **changes: Any) -> Self: ...


def sizes_for(kernel: str, *, rows: int, capability: tuple[int, int] | None = None) -> dict[str, int]:
    """The block sizes of a kernel.

    Args:
        kernel: Its name in the file.
        rows: The rows or tokens of the step by which the kernel's sizes are chosen: those of the entry with the most
            rows that are not more than these.
        capability: Compute capability of the card; None for the card of this trace.
    """
    tables = class_of(capability or target_capability()).kernels[kernel]
    chosen = max((entry for entry in tables if entry["rows"] <= rows), key=lambda entry: entry["rows"])
    return {name: size for name, size in chosen.items() if name != "rows"}


def attention_sizes(kernel: str, stored: jnp.dtype, *, rows: int, is_latent: bool = False) -> dict[str, int]:
    """The block sizes of a kernel of attention over a pool of this type. Those for latent rows replace some."""
    suffix = {1: "_8_bits", 4: "_float32"}.get(stored.itemsize, "")
    sizes = sizes_for(kernel if stored.itemsize < 4 else f"{kernel}{suffix}", rows=rows)
    return sizes | sizes_for(f"{kernel}_latent{suffix}", rows=rows) if is_latent else sizes


def fitting[S: Sizes](sizes: S, needs: Callable[[S], int]) -> S:
    """The sizes, or with smaller blocks and then fewer stages, so that a program fits into the card's shared memory.

    Args:
        sizes: The best sizes.
        needs: The bytes of shared memory that a program of these sizes takes, or more.

    Raises:
        NotImplementedError: Nothing fits.
    """
    most = class_of(target_capability()).shared_bytes
    while (least := needs(sizes)) > most:
        if sizes.block_k > LEAST_BLOCK_K:
            sizes = sizes._replace(block_k=sizes.block_k // 2)
        elif sizes.num_stages > LEAST_STAGES:
            sizes = sizes._replace(num_stages=sizes.num_stages - 1)
        else:
            raise NotImplementedError(f"a program has {most} bytes of shared memory on this card, but needs {least}")
    return sizes


def stages_in_memory(num_stages: int, rows: int) -> int:
    """Blocks of a loop that are in shared memory at a time. Warp groups read even the one that they multiply there."""
    has_groups = class_of(target_capability()).has_warp_groups and rows >= 64
    return num_stages if has_groups else num_stages - 1


@functools.cache
def class_of(capability: tuple[int, int] | None) -> CardClass:
    """The class of the cards of a compute capability."""
    asked = None if capability is None else "{}.{}".format(*capability)
    named = [name for name, content in _files().items() if asked in content["capabilities"]]
    name = named[0] if named else FALLBACK
    return CardClass(name, *(_files()[name][field] for field in CardClass._fields[1:]))


def target_capability() -> tuple[int, int] | None:
    """Compute capability of the card that this trace is for; None if it is for none from NVIDIA."""
    try:
        return divmod(gpu_info.get_gpu_info().compute_capability, 10)
    except ValueError:  # a CPU, in interpret mode
        return None


@functools.cache
def _files() -> dict[str, dict[str, Any]]:
    folder = importlib.resources.files("jsg.kernels_pallas") / "tuning"
    files = {file.name.removesuffix(".json"): file for file in folder.iterdir() if file.name.endswith(".json")}
    return {name: json.loads(files[name].read_text("utf-8")) for name in sorted(files)}
