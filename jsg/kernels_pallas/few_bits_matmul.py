"""Rows times a kernel in few bits, as one Pallas-Triton launch. Letters: `jsg/models/inputs.py`.

A program owns `block_m` rows and `block_n` columns. It reads each byte of its columns once, restores weights in
registers (`few_bits_block`), and multiplies them on tensor cores.

In a step of few rows there are few such programs. Then the inputs are cut into parts, each with programs of its own,
and whoever reads the result adds up the parts, in order. There are as many parts for every step of so many rows, so in
deterministic mode, whose steps have one shape, a row has the same result whatever the other rows are.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from jsg.kernels_pallas.attention_block import whole_spec
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.few_bits_block import BARRIER_BYTES, Parts, Reading, parts_of, reading_of
from jsg.kernels_pallas.tuning import fitting, sizes_for, stages_in_memory

LEAST_BLOCKS = 4
"""The fewest blocks of a part, so that reading the first ones takes little of its time."""


class Sizes(NamedTuple):
    """How the work is cut. `tuning` has the sizes by rows.

    Attributes:
        block_m: Rows of a program.
        block_n: Columns of a program.
        block_k: Inputs at a time.
        num_warps: Warps per program.
        num_stages: Blocks in flight.
        most_parts: The most parts of the inputs. Each has a sum of its own in memory.
        programs: With fewer programs than these inputs are cut.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    most_parts: int
    programs: int


def few_bits_matmul(
    x: Float[Array, "T D"], kernel: Quantised, result: jax.typing.DTypeLike, *, interpret: bool = False
) -> Float[Array, "T *out"]:
    """See `ops.matmul`.

    Raises:
        NotImplementedError: See `few_bits_block.reading_of`.
    """
    (num_rows, depth), parts = x.shape, parts_of(kernel)
    reading = reading_of(kernel, x.dtype, is_compiled=not interpret)
    cut, width = default_sizes(num_rows, x.dtype, kernel.form.per_byte), parts.values.shape[1]
    reading = reading._replace(block_k=cut.block_k)
    num_blocks = num_blocks_of_part(cut, num_rows, depth, width)
    num_parts = pl.cdiv(depth, num_blocks * cut.block_k)
    x = x if kernel.order is None else jnp.take(x, kernel.order, axis=1)
    shape = num_parts, num_rows, width
    out = pl.pallas_call(
        functools.partial(few_bits_matmul_kernel, cut, reading, num_blocks),
        grid=(pl.cdiv(num_rows, cut.block_m), pl.cdiv(width, cut.block_n), num_parts),
        in_specs=jax.tree.map(whole_spec, (x, parts)),
        out_specs=pl.BlockSpec(shape, lambda *_: (0, 0, 0)),
        out_shape=jax.ShapeDtypeStruct(shape, result if num_parts == 1 else jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        interpret=interpret,
    )(x, parts)
    whole = functools.reduce(operator.add, (out[part] for part in range(num_parts))).astype(result)
    return whole.reshape(num_rows, *kernel.values.shape[1:])


def default_sizes(num_rows: int, dtype: jnp.dtype, per_byte: int) -> Sizes:
    """The best sizes on this device for so many rows."""
    sizes = Sizes(**sizes_for("few_bits_matmul", rows=num_rows))
    return fitting(sizes, lambda sizes: shared_bytes(sizes, dtype, per_byte))


def num_blocks_of_part(cut: Sizes, num_rows: int, depth: int, width: int) -> int:
    """How many blocks of inputs the programs of a part read."""
    programs = pl.cdiv(num_rows, cut.block_m) * pl.cdiv(width, cut.block_n)
    num_blocks = pl.cdiv(depth, cut.block_k)
    most_parts = min(cut.most_parts, num_blocks // LEAST_BLOCKS, cut.programs // programs)
    return pl.cdiv(num_blocks, max(most_parts, 1))


def shared_bytes(sizes: Sizes, dtype: jnp.dtype, per_byte: int) -> int:
    """The bytes of shared memory that a program takes, or more: blocks in flight, and restored weights."""
    kernel = sizes.block_k * sizes.block_n
    in_flight = sizes.block_m * sizes.block_k * dtype.itemsize + kernel // per_byte
    return stages_in_memory(sizes.num_stages, sizes.block_n) * in_flight + kernel * dtype.itemsize + BARRIER_BYTES


def few_bits_matmul_kernel(
    cut: Sizes, reading: Reading, num_blocks: int, rows: jax.Ref, parts: Parts, out: jax.Ref
) -> None:
    """One program: `block_m` rows and `block_n` columns of the sum over a part of the inputs.

    Grid: (row blocks, column blocks, parts). Programs that read the same weights follow one another.
    Blocks: every array stays in device memory. Owns: its rows and columns of its part's sum.

    Masked: rows past T, columns past F, and summands past D. A row that is not finite changes no other row.
    """
    (num_rows, depth), width, part = rows.shape, out.shape[2], pl.program_id(2)
    row = (pl.program_id(0) * cut.block_m + jnp.arange(cut.block_m))[:, None]
    column = pl.program_id(1) * cut.block_n + jnp.arange(cut.block_n)
    is_row = row < num_rows
    blocks = part * num_blocks, jnp.minimum((part + 1) * num_blocks, pl.cdiv(depth, cut.block_k))
    (total,) = reading.sums(rows, row, is_row, (parts,), (), column, blocks)
    where = part, row, column[None, :]
    plgpu.store(out.at[where], total.astype(out.dtype), mask=is_row & (column < width)[None, :])
