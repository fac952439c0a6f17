"""Rows times the kernel of their group, as one Pallas-Triton launch. Letters: `jsg/models/inputs.py`.

The rows are sorted by group. Each group is cut into tiles of `block_m` rows, and only its last tile may have fewer. So
a step of R rows has at most R // block_m + E tiles:

    rows      0 0 0 0 0 | 1 1 | 3 3 3 3 3 3 3        (block_m = 4; group 2 is empty)
    tiles     '-----' '   '-'   '-----' '---'

A program owns one tile and `block_n` columns. In a step of few tokens the time is that of reading each kernel once.
Kernels in few bits that have scales of groups are restored in registers, and their products are turned: see
`few_bits_block`.
Rows behind the last group are in no tile: nothing reads them, and their part of the result is not written.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int, Num

from jsg.kernels_pallas.activation import Activation
from jsg.kernels_pallas.attention_block import whole_spec
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.few_bits_block import BARRIER_BYTES, Groups, Parts, Reading, parts_of, reading_of
from jsg.kernels_pallas.form import Form
from jsg.kernels_pallas.inputs import GroupKernels, Panels
from jsg.kernels_pallas.reference_rows import opened
from jsg.kernels_pallas.tuning import fitting, sizes_for, stages_in_memory

MEASURED_GROUPS = 8
"""The groups with which the sizes in `tuning` were measured: Mixtral's experts."""
MOST_AT_ONCE = 512
"""The most rows for which gates are in the launch of their products. With more the launches are not what takes time,
and sizes were measured for one kernel at a time."""


class Sizes(NamedTuple):
    """How the work is cut. `tuning` has the sizes by rows.

    Attributes:
        block_m: Rows of a tile.
        block_n: Columns of a program.
        block_k: Summands at a time.
        num_warps: Warps per program.
        num_stages: Blocks in flight.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class Tile(NamedTuple):
    """The rows of a tile.

    Attributes:
        group: Their group; any group if there are no rows.
        start: The first row.
        num_rows: The number of rows; 0 for a tile that is not needed.
    """

    group: Int[Array, ""]
    start: Int[Array, ""]
    num_rows: Int[Array, ""]


def tile_of(sizes: Int[Array, " e"], tile: Int[Array, ""], block_m: int) -> Tile:
    """The tile of this number, for groups of these sizes. It is computed in the kernel, without another launch."""
    counts = (sizes + block_m - 1) // block_m
    ends, row_ends = jnp.cumsum(counts), jnp.cumsum(sizes)
    group = jnp.minimum(jnp.sum((ends <= tile).astype(jnp.int32)), len(sizes) - 1)

    def of_group(values: Int[Array, " e"]) -> Int[Array, ""]:
        return jnp.sum(jnp.where(jnp.arange(len(sizes)) == group, values, 0))

    within = (tile - of_group(ends - counts)) * block_m
    num_rows = jnp.minimum(jnp.maximum(of_group(sizes) - within, 0), block_m)
    return Tile(group, of_group(row_ends - sizes) + within, num_rows)


def grouped_matmul(
    rows: Float[Array, "R D"],
    kernels: Num[Array, "E D F"] | Quantised,
    sizes: Int[Array, " E"],
    *,
    scale: Float[Array, "E 1 F"] | None = None,
    bias: Float[Array, "E F"] | None = None,
    result: jax.typing.DTypeLike,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """See `ops.grouped_matmul`.

    Raises:
        NotImplementedError: Rows and kernels have different types, without a scale. Or see `few_bits_block.reading_of`.
    """
    given = (GroupKernels(kernels, scale, bias),)
    return _multiply(rows, None, given, sizes, None, result=result, interpret=interpret)


def grouped_gated(
    x: Float[Array, "T D"],
    tokens: Int[Array, " R"] | None,
    kernels: Sequence[GroupKernels],
    sizes: Int[Array, " E"],
    activation: Activation,
    *,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """See `ops.grouped_gated`. A program has as many columns of each kernel as fill a block together.

    Raises:
        NotImplementedError: As in `grouped_matmul`, or there are many rows.
    """
    if len(x if tokens is None else tokens) > MOST_AT_ONCE:
        raise NotImplementedError(f"the Triton kernel takes at most {MOST_AT_ONCE} rows at once")
    return _multiply(x, tokens, kernels, sizes, activation, result=x.dtype, interpret=interpret)


def _multiply(
    rows: Float[Array, "T D"],
    tokens: Int[Array, " R"] | None,
    kernels: Sequence[GroupKernels],
    sizes: Int[Array, " E"],
    activation: Activation | None,
    *,
    result: jax.typing.DTypeLike,
    interpret: bool,
) -> Float[Array, "R F"]:
    first = kernels[0].values
    assert not isinstance(first, Panels), "only a CPU has panels"
    is_few = isinstance(first, Quantised)
    stored, depth, width = first.form if is_few else first.dtype, rows.shape[1], first.shape[2]
    num_rows = len(rows if tokens is None else tokens)
    if not is_few and rows.dtype != stored and kernels[0].scale is None:
        raise NotImplementedError(f"the Triton kernel wants rows of the kernels' dtype, {stored}")
    reading = reading_of(first, rows.dtype, is_compiled=not interpret) if is_few else None
    cut = default_sizes(num_rows, len(sizes), rows.dtype, stored)
    if reading is None:
        cut = cut._replace(block_n=cut.block_n // len(kernels))
    else:  # whose columns are shared out among warps
        reading = reading._replace(block_k=cut.block_k)
    values, scales, biases = (tuple(x for x in of_all if x is not None) for of_all in zip(*kernels, strict=True))
    parts = tuple(parts_of(each) if isinstance(each, Quantised) else Parts(each, None, None, None) for each in values)
    parts = (each._replace(factor=scale) for each, scale in zip(parts, scales, strict=True)) if scales else parts
    read = (sizes, rows, () if tokens is None else (tokens,), tuple(parts), biases)
    most_tiles = num_rows // cut.block_m + min(len(sizes), num_rows)
    return pl.pallas_call(
        functools.partial(grouped_matmul_kernel, cut, depth, width, activation, reading),
        grid=(most_tiles, pl.cdiv(width, cut.block_n)),
        in_specs=jax.tree.map(whole_spec, read),
        out_specs=pl.BlockSpec((num_rows, width), lambda *_: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), result),
        compiler_params=plgpu.CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        interpret=interpret,
    )(*read)


def default_sizes(num_rows: int, num_groups: int, dtype: jnp.dtype, stored: jnp.dtype | Form) -> Sizes:
    """The best sizes on this device for so many rows of `dtype`, and kernels that are stored in `stored`.

    The sizes were measured with few groups. What they depend on is how many rows a group has.
    """
    if isinstance(stored, Form):
        name = "grouped_matmul_few_bits"
    else:
        name = "grouped_matmul_8_bits" if stored.itemsize == 1 else "grouped_matmul"
        name = "grouped_matmul_float32" if dtype == jnp.float32 else name
    sizes = Sizes(**sizes_for(name, rows=num_rows * MEASURED_GROUPS // max(num_groups, MEASURED_GROUPS)))
    return fitting(sizes, lambda sizes: shared_bytes(sizes, dtype, stored))


def shared_bytes(sizes: Sizes, dtype: jnp.dtype, stored: jnp.dtype | Form, num_kernels: int = 1) -> int:
    """The bytes of shared memory that a program takes, or more: blocks in flight, and one that is converted."""
    kernel, is_few = sizes.block_k * sizes.block_n, isinstance(stored, Form)
    of_rows = sizes.block_m * sizes.block_k * dtype.itemsize
    in_flight = of_rows + num_kernels * (kernel // stored.per_byte if is_few else kernel * stored.itemsize)
    converted = kernel * dtype.itemsize if stored != dtype else 0
    left_side = sizes.block_n if is_few else sizes.block_m
    return stages_in_memory(sizes.num_stages, left_side) * in_flight + converted + BARRIER_BYTES


def grouped_matmul_kernel(
    cut: Sizes,
    depth: int,
    width: int,
    activation: Activation | None,
    reading: Reading | None,
    sizes: jax.Ref,
    rows: jax.Ref,
    tokens: tuple[jax.Ref, ...],
    kernels: tuple[Parts, ...],
    biases: tuple[jax.Ref, ...],
    out: jax.Ref,
) -> None:
    """One program: a tile of rows and `block_n` columns of the result. Each kernel has factor and bias, or none has.

    With `tokens` these are the rows that it reads. With an activation kernels are those of gates, if there are any, and
    of what gates let through.

    Grid: (tiles, column blocks). Tiles of one group, which read the same part of its kernel, follow one another.
    Blocks: every array stays in device memory. Owns: its rows and columns of the result.

    Masked: groups past E, rows past the tile's, columns past F, and summands past D. A row that is not finite changes
    no other row, because no product sums over rows.
    """
    groups = jnp.arange(pl.next_power_of_2(len(sizes)))
    padded = plgpu.load(sizes.at[groups], mask=groups < len(sizes), other=0)
    tile = tile_of(padded, pl.program_id(0), cut.block_m)
    column = pl.program_id(1) * cut.block_n + jnp.arange(cut.block_n)

    @pl.when(tile.num_rows > 0)
    def _() -> None:
        row = jnp.arange(cut.block_m)
        is_row, is_column = (row < tile.num_rows)[:, None], (column < width)[None, :]
        where = source = (tile.start + row)[:, None]
        for ref in tokens:
            source = plgpu.load(ref.at[where], mask=is_row, other=0)

        at = (tile.group,)

        def ahead(index: Int[Array, ""]) -> tuple[Groups, ...]:
            return () if reading is None else tuple(reading.groups(each, at, column, index) for each in kernels)

        def add(
            index: Int[Array, ""], carry: tuple[tuple[Float[Array, "..."], ...], tuple[Groups, ...]]
        ) -> tuple[tuple[Float[Array, "..."], ...], tuple[Groups, ...]]:
            totals, groups = carry
            following = ahead(index + 1)
            k = index * cut.block_k + jnp.arange(cut.block_k)
            is_k = k < depth
            left = plgpu.load(rows.at[source, k[None, :]], mask=is_row & is_k[None, :], other=0)
            if reading is None:
                where = *at, k[:, None], column[None, :]
                blocks = (_load(each.values, where, is_k[:, None] & is_column, left.dtype) for each in kernels)
                products = [plgpu.dot(left, right, allow_tf32=False) for right in blocks]
            else:
                given = zip(kernels, groups, strict=True)
                turned = (reading.weights(each, at, column, index, own) for each, own in given)
                products = [plgpu.dot(weights, left.T, allow_tf32=False) for weights in turned]
            return tuple(total + each for total, each in zip(totals, products, strict=True)), following

        shape = (cut.block_m, cut.block_n) if reading is None else (cut.block_n, cut.block_m)
        begin = (jnp.zeros(shape, jnp.float32),) * len(kernels), ahead(jnp.int32(0))
        totals = list(lax.fori_loop(0, pl.cdiv(depth, cut.block_k), add, begin)[0])
        totals = totals if reading is None else [each.T for each in totals]
        for part, each in enumerate(kernels):
            if each.factor is not None:
                factor = plgpu.load(each.factor.at[tile.group, 0, column], mask=column < width, other=0)
                totals[part] *= factor[None, :]
        for part, bias in enumerate(biases):
            row_of_group = plgpu.load(bias.at[tile.group, column], mask=column < width, other=0)
            totals[part] += row_of_group.astype(jnp.float32)[None, :]
        made = totals[0]
        if activation is not None:  # of what was rounded, as where it is a launch of its own
            made = opened(tuple(each.astype(rows.dtype) for each in totals), activation, jnp.float32)
        plgpu.store(out.at[where, column[None, :]], made.astype(out.dtype), mask=is_row & is_column)


def _load(
    kernels: jax.Ref, at: tuple[Array, Array, Array], mask: Bool[Array, "k n"], dtype: jnp.dtype
) -> Float[Array, "k n"]:
    """A block of a kernel in `dtype`, zero where masked."""
    if kernels.dtype == dtype:
        return plgpu.load(kernels.at[at], mask=mask, other=0)
    block = plgpu.load(kernels.at[at], mask=mask)  # no `other`: 8-bit floats cannot be lowered with one
    return jnp.where(mask, block.astype(dtype), 0)
