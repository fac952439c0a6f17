"""Rows times the kernel of their group, as one Pallas-Triton launch. Letters: `jsg/models/inputs.py`.

The rows are sorted by group. Each group is cut into tiles of `block_m` rows, and only its last tile may have fewer. So
a step of R rows has at most R // block_m + E tiles:

    rows      0 0 0 0 0 | 1 1 | 3 3 3 3 3 3 3        (block_m = 4; group 2 is empty)
    tiles     '-----' '   '-'   '-----' '---'

A program owns one tile and `block_n` columns. In a step of few tokens the time is that of reading each kernel once.
Kernels in few bits that have scales of groups are restored in registers: see `few_bits_block`.
Rows behind the last group are in no tile: nothing reads them, and their part of the result is not written.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int, Num

from jsg.kernels_pallas.activation import Activation
from jsg.kernels_pallas.attention_block import whole_spec
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.few_bits_block import BARRIER_BYTES, Reading, parts_of, reading_of
from jsg.kernels_pallas.form import Form
from jsg.kernels_pallas.inputs import Fp8Kernel, GroupKernels, Panels, SharedKernels
from jsg.kernels_pallas.reference_rows import opened
from jsg.kernels_pallas.tuning import fitting, sizes_for, stages_in_memory

MEASURED_GROUPS = 8
"""The groups with which the sizes in `tuning` were measured: Mixtral's experts."""
MOST_AT_ONCE = 512
"""The most rows for which gates are in the launch of their products. With more the launches are not what takes time,
and sizes were measured for one kernel at a time."""


type _Load = Callable[[int, Int[Array, "k 1"], Bool[Array, "k n"]], Float[Array, "k n"]]
"""Loads a block of the kernel of this number: its rows, and which of its numbers there are."""


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
    (out,) = _multiply(rows, None, given, sizes, None, None, result=result, interpret=interpret)
    return out


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
    (out,) = _multiply(x, tokens, kernels, sizes, activation, None, result=x.dtype, interpret=interpret)
    return out


def takes_beside(
    x: Float[Array, "T D"],
    tokens: Int[Array, " R"],
    kernels: Sequence[GroupKernels],
    down: GroupKernels,
    shared: SharedKernels,
) -> bool:
    """Whether `experts_beside` can do this: of few rows, kernels of their type, and a block as large as an expert."""
    first, last = kernels[0].values, down.values
    if not (isinstance(first, jax.Array) and isinstance(last, jax.Array)):
        return False
    of_experts = *kernels, down
    given = [*shared, *(each.values for each in of_experts)]
    is_plain = all(isinstance(each, jax.Array) and each.dtype == x.dtype for each in given)
    has_more = any(each.scale is not None or each.bias is not None for each in of_experts)
    if has_more or not is_plain or len(tokens) > MOST_AT_ONCE:
        return False
    _, depth, width = first.shape
    return shared.opened.shape == (depth, len(kernels), width) and shared.down.shape == last.shape[1:]


def experts_beside(
    x: Float[Array, "T D"],
    tokens: Int[Array, " R"],
    kernels: Sequence[GroupKernels],
    down: GroupKernels,
    sizes: Int[Array, " E"],
    shared: SharedKernels,
    activation: Activation,
    *,
    result: jax.typing.DTypeLike,
    interpret: bool = False,
) -> tuple[Float[Array, "R D"], Float[Array, "T D"]]:
    """See `ops.experts_beside`."""
    how = {"interpret": interpret}
    beside = x, shared.opened
    inner, shared_inner = _multiply(x, tokens, kernels, sizes, activation, beside, result=x.dtype, **how)
    beside = shared_inner, shared.down[:, None]
    made, shared_made = _multiply(inner, None, (down,), sizes, None, beside, result=result, **how)
    return made, shared_made


def _multiply(
    rows: Float[Array, "T D"],
    tokens: Int[Array, " R"] | None,
    kernels: Sequence[GroupKernels],
    sizes: Int[Array, " E"],
    activation: Activation | None,
    beside: tuple[Float[Array, "B D"], Num[Array, "D parts F"]] | None,
    *,
    result: jax.typing.DTypeLike,
    interpret: bool,
) -> tuple[Float[Array, "_ F"], ...]:
    """The results of the rows, and of others with kernels of their own if these are given beside them."""
    first = kernels[0].values
    assert not isinstance(first, Panels | Fp8Kernel), "only a CPU has panels, and e4m3 has products of its own"
    num_rows, depth, width = len(rows if tokens is None else tokens), rows.shape[1], first.shape[2]
    if isinstance(first, Quantised):
        reading = reading_of(first, rows.dtype, is_compiled=not interpret)
        cut = default_sizes(num_rows, len(sizes), rows.dtype, first.form)
        reading = reading._replace(block_k=cut.block_k)
    elif rows.dtype != first.dtype and kernels[0].scale is None:
        raise NotImplementedError(f"the Triton kernel wants rows of the kernels' dtype, {first.dtype}")
    else:
        reading, cut = None, default_sizes(num_rows, len(sizes), rows.dtype, first.dtype)
        cut = cut._replace(block_n=cut.block_n // len(kernels))
    values, scales, biases = (tuple(x for x in of_all if x is not None) for of_all in zip(*kernels, strict=True))
    values = tuple(parts_of(each) if isinstance(each, Quantised) else each for each in values)
    read = (sizes, rows, () if tokens is None else (tokens,), values, scales, biases, beside or ())
    most_tiles = num_rows // cut.block_m + min(len(sizes), num_rows)
    made = [jax.ShapeDtypeStruct((count, width), result) for count in (num_rows, *(len(x) for x in read[-1][:1]))]
    num_tiles = most_tiles + sum(pl.cdiv(each.shape[0], cut.block_m) for each in made[1:])
    results = pl.pallas_call(
        functools.partial(grouped_matmul_kernel, cut, depth, width, most_tiles, activation, reading),
        grid=(num_tiles, pl.cdiv(width, cut.block_n)),
        in_specs=jax.tree.map(whole_spec, read),
        out_specs=[whole_spec(each) for each in made],
        out_shape=made,
        compiler_params=plgpu.CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        interpret=interpret,
    )(*read)
    return tuple(results)


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
    kernel, of_rows = sizes.block_k * sizes.block_n, sizes.block_m * sizes.block_k * dtype.itemsize
    of_kernel = kernel // stored.per_byte if isinstance(stored, Form) else kernel * stored.itemsize
    converted = kernel * dtype.itemsize if stored != dtype else 0
    left_side = sizes.block_n if isinstance(stored, Form) else sizes.block_m
    in_flight = of_rows + num_kernels * of_kernel
    return stages_in_memory(sizes.num_stages, left_side) * in_flight + converted + BARRIER_BYTES


def grouped_matmul_kernel(
    cut: Sizes,
    depth: int,
    width: int,
    most_tiles: int,
    activation: Activation | None,
    reading: Reading | None,
    sizes: jax.Ref,
    rows: jax.Ref,
    tokens: tuple[jax.Ref, ...],
    kernels: tuple[Any, ...],
    scales: tuple[jax.Ref, ...],
    biases: tuple[jax.Ref, ...],
    beside: tuple[jax.Ref, ...],
    *outs: jax.Ref,
) -> None:
    """One program: a tile of rows and `block_n` columns of the result. Each kernel has a scale and a bias, or none has.

    With `tokens` these are the rows that it reads. With an activation kernels are those of gates, if there are any, and
    of what gates let through. Tiles past `most_tiles` are of the rows `beside`, whose kernels stand side by side.
    With `reading` kernels are the parts of those in few bits.

    Grid: (tiles, column blocks). Tiles of one group, which read the same part of its kernel, follow one another.
    Blocks: every array stays in device memory. Owns: its rows and columns of the result.

    Masked: groups past E, rows past the tile's, columns past F, and summands past D. A row that is not finite changes
    no other row, because no product sums over rows.
    """
    groups = jnp.arange(pl.next_power_of_2(len(sizes)))
    padded = plgpu.load(sizes.at[groups], mask=groups < len(sizes), other=0)
    number = pl.program_id(0)
    tile = tile_of(padded, number, cut.block_m)
    column = pl.program_id(1) * cut.block_n + jnp.arange(cut.block_n)
    row, is_column = jnp.arange(cut.block_m), (column < width)[None, :]

    def sums(rows: jax.Ref, source: Int[Array, "m 1"], is_row: Bool[Array, "m 1"], load: _Load) -> list[Array]:
        """The products of these rows with each kernel."""

        def add(index: Int[Array, ""], totals: tuple[Float[Array, "m n"], ...]) -> tuple[Float[Array, "m n"], ...]:
            k = index * cut.block_k + jnp.arange(cut.block_k)
            is_k = k < depth
            left = plgpu.load(rows.at[source, k[None, :]], mask=is_row & is_k[None, :], other=0)
            blocks = (load(part, k[:, None], is_k[:, None] & is_column) for part in range(len(kernels)))
            products = (plgpu.dot(left, right, allow_tf32=False) for right in blocks)
            return tuple(total + product for total, product in zip(totals, products, strict=True))

        zeros = (jnp.zeros((cut.block_m, cut.block_n), jnp.float32),) * len(kernels)
        return list(lax.fori_loop(0, pl.cdiv(depth, cut.block_k), add, zeros))

    def store(totals: list[Array], out: jax.Ref, where: Int[Array, "m 1"], is_row: Bool[Array, "m 1"]) -> None:
        made = totals[0]
        if activation is not None:  # of what was rounded, as where it is a launch of its own
            made = opened(tuple(each.astype(rows.dtype) for each in totals), activation, jnp.float32)
        plgpu.store(out.at[where, column[None, :]], made.astype(out.dtype), mask=is_row & is_column)

    @pl.when(tile.num_rows > 0)
    def _() -> None:
        is_row = (row < tile.num_rows)[:, None]
        where = source = (tile.start + row)[:, None]
        for ref in tokens:
            source = plgpu.load(ref.at[where], mask=is_row, other=0)

        def load(part: int, k: Int[Array, "k 1"], mask: Bool[Array, "k n"]) -> Float[Array, "k n"]:
            return _load(kernels[part].at[tile.group, k, column[None, :]], mask, rows.dtype)

        if reading is None:
            totals = sums(rows, source, is_row, load)
        else:
            blocks = 0, pl.cdiv(depth, cut.block_k)
            totals = reading.sums(rows, source, is_row, kernels, (tile.group,), column, blocks)
        for part, scale in enumerate(scales):
            totals[part] *= plgpu.load(scale.at[tile.group, 0, column], mask=column < width, other=0)[None, :]
        for part, bias in enumerate(biases):
            row_of_group = plgpu.load(bias.at[tile.group, column], mask=column < width, other=0)
            totals[part] += row_of_group.astype(jnp.float32)[None, :]
        store(totals, outs[0], where, is_row)

    if not beside:
        return
    others, joint = beside

    @pl.when(number >= most_tiles)
    def _() -> None:
        where = ((number - most_tiles) * cut.block_m + row)[:, None]
        is_row = where < others.shape[0]

        def load(part: int, k: Int[Array, "k 1"], mask: Bool[Array, "k n"]) -> Float[Array, "k n"]:
            return _load(joint.at[k, part, column[None, :]], mask, rows.dtype)

        store(sums(others, where, is_row, load), outs[1], where, is_row)


def _load(block_of: Any, mask: Bool[Array, "k n"], dtype: jnp.dtype) -> Float[Array, "k n"]:
    """A block of a kernel in `dtype`, zero where masked."""
    if block_of.dtype == dtype:
        return plgpu.load(block_of, mask=mask, other=0)
    block = plgpu.load(block_of, mask=mask)  # no `other`: 8-bit floats cannot be lowered with one
    return jnp.where(mask, block.astype(dtype), 0)
