"""Rows in e4m3 times kernels in e4m3, as one Pallas-Triton launch behind the one that rounds the rows.

Letters: `jsg/models/inputs.py`.

A program owns `block_m` rows and `block_n` columns of one kernel, or of the kernels of one expert: tiles are those of
`grouped_matmul.py`, with one group if there are no experts. Rows and kernels have what is summed side by side, so
blocks go from memory to the tensor cores as they are.

Tensor cores add up at most `BLOCK` inputs, and each such sum is added to the others in float32 outside of them. Where
a group of inputs has scales of its own, they multiply this sum; else those of row and column multiply the whole one.
The inputs are never shared out among programs, so a row has the same result whatever the other rows of its step are.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.activation import Activation
from jsg.kernels_pallas.attention_block import whole_spec
from jsg.kernels_pallas.e4m3_dot import e4m3_dot
from jsg.kernels_pallas.fp8_rounding import rounded
from jsg.kernels_pallas.grouped_matmul import BARRIER_BYTES, Sizes, tile_of
from jsg.kernels_pallas.inputs import Fp8Kernel, Fp8Rows
from jsg.kernels_pallas.reference_rows import opened
from jsg.kernels_pallas.tuning import fitting, sizes_for

BLOCK = 128
"""The most inputs that tensor cores add up before float32. Published blocks with a scale are as long."""
LEAST_BLOCK = 32
"""Tensor cores take so many inputs in e4m3 at once."""


class Read(NamedTuple):
    """What a program reads, or references to it. All kernels are those of experts, [E, F, D]; E is 1 without experts.

    Attributes:
        rows: The rows.
        tokens: Which of them row r is; empty for row r.
        sizes: Rows of each expert; empty if there is one kernel.
        kernels: The kernels.
        biases: What is added to each column of each, [E, F]; empty for nothing.
    """

    rows: Fp8Rows
    tokens: tuple[Any, ...]
    sizes: tuple[Any, ...]
    kernels: tuple[Fp8Kernel, ...]
    biases: tuple[Any, ...]


def fp8_matmul(
    x: Float[Array, "T D"] | Fp8Rows,
    kernels: Sequence[Fp8Kernel],
    *,
    tokens: Int[Array, " R"] | None = None,
    sizes: Int[Array, " E"] | None = None,
    biases: Sequence[Float[Array, "E F"] | None] = (),
    activation: Activation | None = None,
    result: jax.typing.DTypeLike,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """The product of rows and a kernel, or what gates let through of several: see `ops.grouped_gated`.

    Args:
        x: The rows. They are rounded in as many groups as the kernels have, or were.
        kernels: One kernel [F, D]; or of experts [E, F, D] one, or that of gates and that of what they let through.
        tokens: Which of the rows row r is; None for row r.
        sizes: Rows of each expert; None for one kernel.
        biases: What is added to each column of each kernel.
        activation: Which function of the gates, which are rounded to the result's type; None for the product itself.
        result: Type of the result.
        interpret: Whether it runs in interpret mode.

    Raises:
        NotImplementedError: The number of inputs, or of a group's, is no multiple of `LEAST_BLOCK`.
    """
    groups = kernels[0].scale.shape[-2]
    depth = kernels[0].values.shape[-1]
    if (length := depth // groups) % LEAST_BLOCK:
        raise NotImplementedError(
            f"the Triton kernel wants a multiple of {LEAST_BLOCK} inputs in a group, not {length}"
        )
    if sizes is None:
        kernels = [Fp8Kernel(each.values[None], each.scale[None]) for each in kernels]
    experts, width, _ = kernels[0].values.shape
    rows = x if isinstance(x, Fp8Rows) else rounded(x, groups, interpret=interpret)
    num_rows = len(rows.values if tokens is None else tokens)
    read = Read(
        rows,
        () if tokens is None else (tokens,),
        () if sizes is None else (sizes,),
        tuple(kernels),
        tuple(bias for bias in biases if bias is not None),
    )
    cut = default_sizes(num_rows, experts, len(kernels))
    tiles = pl.cdiv(num_rows, cut.block_m) if sizes is None else num_rows // cut.block_m + min(experts, num_rows)
    return pl.pallas_call(
        functools.partial(fp8_matmul_kernel, cut, activation),
        grid=(tiles, pl.cdiv(width, cut.block_n)),
        in_specs=jax.tree.map(whole_spec, (read,)),
        out_specs=pl.BlockSpec((num_rows, width), lambda *_: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), result),
        compiler_params=plgpu.CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        interpret=interpret,
    )(read)


def default_sizes(num_rows: int, num_experts: int, num_kernels: int = 1) -> Sizes:
    """The best sizes on this device for so many rows: those of the rows that an expert has, if all have equally many.

    A program has as many columns of each kernel as fill a block together.
    """
    sizes = Sizes(**sizes_for("fp8_matmul", rows=-(-num_rows // num_experts)))
    sizes = sizes._replace(block_n=sizes.block_n // num_kernels)
    return fitting(sizes, lambda sizes: shared_bytes(sizes, num_kernels))


def shared_bytes(sizes: Sizes, num_kernels: int = 1) -> int:
    """The bytes of shared memory that a program takes, or more."""
    block = (sizes.block_m + num_kernels * sizes.block_n) * BLOCK
    return sizes.num_stages * block + BARRIER_BYTES


def fp8_matmul_kernel(cut: Sizes, activation: Activation | None, read: Read, out: jax.Ref) -> None:
    """One program: a tile of rows and `block_n` columns of the result.

    Grid: (tiles, column blocks). Tiles of one kernel, which read the same part of it, follow one another.
    Blocks: every array stays in device memory. Owns: its rows and columns of the result.

    Masked: experts past E, rows past the tile's and columns past F. A row that is not finite changes no other row.
    """
    num_rows, width = out.shape
    if read.sizes:
        (sizes,) = read.sizes
        index = jnp.arange(pl.next_power_of_2(len(sizes)))
        padded = plgpu.load(sizes.at[index], mask=index < len(sizes), other=0)
        expert, start, count = tile_of(padded, pl.program_id(0), cut.block_m)
    else:
        expert, start = jnp.int32(0), pl.program_id(0) * cut.block_m
        count = num_rows - start
    row, column = jnp.arange(cut.block_m), pl.program_id(1) * cut.block_n + jnp.arange(cut.block_n)

    @pl.when(count > 0)
    def _() -> None:
        where, is_row, is_column = (start + row)[:, None], (row < count)[:, None], (column < width)[None, :]
        source = where
        for ref in read.tokens:
            source = plgpu.load(ref.at[where], mask=is_row, other=0)
        made = _products(cut, read, expert, source, column, is_row)
        for part, bias in enumerate(read.biases):
            added = plgpu.load(bias.at[expert, column], mask=column < width, other=0)
            made[part] += added.astype(jnp.float32)[None, :]
        result = made[0]
        if activation is not None:  # of what was rounded, as where it is a launch of its own
            result = opened(tuple(each.astype(out.dtype) for each in made), activation, jnp.float32)
        plgpu.store(out.at[where, column[None, :]], result.astype(out.dtype), mask=is_row & is_column)


def _products(
    cut: Sizes,
    read: Read,
    expert: Int[Array, ""],
    source: Int[Array, "m 1"],
    column: Int[Array, " n"],
    is_row: Array,
) -> list[Float[Array, "m n"]]:
    """The product of these rows with these columns of each kernel, scaled."""
    (values, row_scale), is_column = read.rows, column < read.kernels[0].values.shape[1]
    depth, groups = values.shape[1], row_scale.shape[1]
    length = min(BLOCK, depth // groups & -(depth // groups))  # of a block, a power of two
    blocks = depth // length

    def factor(kernel: Fp8Kernel, group: Int[Array, ""] | int) -> Float[Array, "m n"]:
        of_rows = plgpu.load(row_scale.at[source, group], mask=is_row, other=0)
        of_columns = plgpu.load(kernel.scale.at[expert, group, column], mask=is_column, other=0)
        return of_rows * of_columns[None, :]

    def add(block: Int[Array, ""], totals: tuple[Float[Array, "m n"], ...]) -> tuple[Float[Array, "m n"], ...]:
        k = (block * length + jnp.arange(length))[None, :]
        left = plgpu.load(values.at[source, k], mask=is_row)  # no `other`: 8-bit floats cannot be lowered with one
        sums = [
            e4m3_dot(left, plgpu.load(kernel.values.at[expert, column[:, None], k], mask=is_column[:, None]))
            for kernel in read.kernels
        ]
        if groups > 1:
            sums = [
                each * factor(kernel, block * groups // blocks) for each, kernel in zip(sums, read.kernels, strict=True)
            ]
        return tuple(total + each for total, each in zip(totals, sums, strict=True))

    zeros = (jnp.zeros((cut.block_m, cut.block_n), jnp.float32),) * len(read.kernels)
    totals = lax.fori_loop(0, blocks, add, zeros)
    if groups > 1:
        return list(totals)
    return [total * factor(kernel, 0) for total, kernel in zip(totals, read.kernels, strict=True)]
