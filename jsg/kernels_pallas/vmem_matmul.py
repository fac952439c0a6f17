"""Rows times kernels in few bits, one or several, as a Pallas kernel for TPUs. Letters: `jsg/models/inputs.py`.

HBM is read in 4 or 8 bits. In vector memory (VMEM) some inputs at a time become weights in bfloat16, those of
`Quantised.restored` to the bit, and are multiplied. Two numbers of 4 bits in a byte are consecutive inputs, and so are
the two halves of a word of bfloat16, so that nothing moves. It ran in interpret mode and was compiled. No TPU has run
it.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import make_group_metadata
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.tile import LANES

FEW_ROWS, MANY_ROWS = 128, 512
"""The most rows of a tile: where kernels have fewer rows than `MANY_ROWS` on average or more inputs than `MANY_INPUTS`,
and elsewhere."""
MANY_INPUTS = 2**14
MOST_COLUMNS, MOST_INPUTS = 512, 512
"""The most columns of a program, and the most inputs that become weights at a time."""
TWICE_E2M1 = 0xC8643210 - 2**32
"""Twice what the codes 0 to 7 mean, in 4 bits each, the first in the lowest."""
VMEM_BYTES = 48 * 2**20


def matmul(
    x: Float[Array, "R D"], kernel: Quantised, result: jax.typing.DTypeLike, *, interpret: bool = False
) -> Float[Array, "R *out"]:
    """See `ops.matmul`. The axis of inputs is the last but one.

    Raises:
        NotImplementedError: See `grouped_matmul`, or another axis of inputs.
    """
    out = kernel.shape[: kernel.axis] + kernel.shape[kernel.axis + 1 :]
    if kernel.axis != len(out) - 1:
        raise NotImplementedError(f"the TPU kernel wants inputs on the last axis but one, but got {kernel.shape}")
    x = x if kernel.order is None else jnp.take(x, kernel.order, axis=1)
    flat = jax.tree.map(lambda part: part.reshape(-1, *part.shape[-2:]), kernel._replace(order=None))
    return _products(x, flat, None, result, interpret=interpret).swapaxes(0, 1).reshape(len(x), *out)


def grouped_matmul(
    rows: Float[Array, "R D"],
    kernels: Quantised,
    sizes: Int[Array, " E"],
    result: jax.typing.DTypeLike,
    *,
    interpret: bool = False,
) -> Float[Array, "R F"]:
    """See `ops.grouped_matmul`.

    Raises:
        NotImplementedError: Another type of rows, or a number of rows, inputs or columns that has no blocks.
    """
    return _products(rows, kernels, sizes, result, interpret=interpret)[0]


def _products(
    rows: Float[Array, "R D"],
    kernels: Quantised,
    sizes: Int[Array, " E"] | None,
    result: jax.typing.DTypeLike,
    *,
    interpret: bool,
) -> Float[Array, "results R F"]:
    """The rows times the kernels of their groups, one result, or without sizes times each kernel."""
    (num_rows, depth), (count, _, width) = rows.shape, kernels.shape
    group = depth // kernels.scale.shape[1]
    has_many = (sizes is None or num_rows >= MANY_ROWS * count) and depth <= MANY_INPUTS
    block_m = math.gcd(num_rows, MANY_ROWS if has_many else FEW_ROWS)
    if kernels.scale.dtype == jnp.float16:  # which a TPU does not read
        kernels = kernels._replace(scale=kernels.scale.astype(jnp.float32))
    block_n, block_k = math.gcd(width, MOST_COLUMNS), math.gcd(depth, MOST_INPUTS)
    fits = block_k % LANES == 0 and block_n % LANES == 0 and (block_k % group == 0 or group == depth)
    if rows.dtype != jnp.bfloat16 or kernels.order is not None or not fits or (block_m % 8 and not interpret):
        raise NotImplementedError(
            f"the TPU kernel wants a multiple of 8 rows in bfloat16, and inputs and columns in blocks of {LANES}, but "
            f"got {rows.dtype}, {num_rows} x {depth} x {width} with groups of {group} in their own order"
        )
    num_tiles, num_blocks = num_rows // block_m, width // block_n
    if sizes is None:
        ids = jnp.arange(num_tiles, dtype=jnp.int32)
        metadata, num_results = (jnp.array([0, num_rows], jnp.int32), jnp.zeros_like(ids), ids), count
    else:
        metadata, num_tiles = make_group_metadata(
            group_sizes=sizes,
            m=num_rows,
            tm=block_m,
            start_group=jnp.int32(0),
            num_nonzero_groups=count,
            visit_empty_groups=False,
        )
        num_results = 1

    def of_kernel(part: Array) -> pl.BlockSpec:
        def index(n: Array, tile: Array, _: jax.Ref, groups: jax.Ref, __: jax.Ref) -> tuple[Array, int, Array]:
            return (n // num_blocks, 0, n % num_blocks) if sizes is None else (groups[tile], 0, n)

        return pl.BlockSpec((None, part.shape[1], block_n), index)

    num_parts = depth // block_k
    scales = pltpu.VMEM((num_parts, max(block_k // group, 1), block_n), jnp.float32)
    return pl.pallas_call(
        functools.partial(grouped_matmul_kernel, block_k, not interpret),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(num_results * num_blocks, num_tiles),
            in_specs=[
                pl.BlockSpec((block_m, depth), lambda n, tile, starts, groups, tiles: (tiles[tile], 0)),
                jax.tree.map(of_kernel, kernels),
            ],
            out_specs=pl.BlockSpec(
                (None, block_m, block_n),
                lambda n, tile, starts, groups, tiles: (n // num_blocks, tiles[tile], n % num_blocks),
            ),
            scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32), scales, scales],
        ),
        out_shape=jax.ShapeDtypeStruct((num_results, num_rows, width), result),
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * depth * num_results * width,
            bytes_accessed=rows.nbytes + sum(part.nbytes for part in jax.tree.leaves(kernels)),
            transcendentals=0,
        ),
        interpret=interpret,
        name="few_bits_matmul" if sizes is None else "grouped_matmul",
    )(*metadata, rows, kernels)


def grouped_matmul_kernel(
    block_k: int,
    is_compiled: bool,
    starts: jax.Ref,
    groups: jax.Ref,
    tiles: jax.Ref,
    rows: jax.Ref,
    kernel: Quantised,
    out: jax.Ref,
    sums: jax.Ref,
    scales: jax.Ref,
    zeros: jax.Ref,
) -> None:
    """One program: a tile of rows times some columns of the kernel of one group.

    Grid: (column blocks, tiles of rows, each once for each group that has rows in it). Scalar memory: where groups
    begin, and which group and which rows a tile is of. Blocks: rows [block_m, D], and a kernel's numbers, scales and
    zeros with all inputs of `block_n` columns, in VMEM. Scratch: the sums, and scales and zeros in float32.
    Masked: rows of other groups keep what they have.
    """
    tile, form = pl.program_id(1), kernel.form
    of_groups = {name: getattr(kernel, name) for name in ("scale", "zero", "factor", "step")}
    whole = kernel._replace(**{name: None if part is None else part[...] for name, part in of_groups.items()})
    _cut(whole.wide_scale, scales)
    if form.has_zero:
        _cut(whole.wide_zero, zeros)
    plain = dataclasses.replace(form, numbers="int8", is_exact=False)
    sums[...] = jnp.zeros(sums.shape)

    def add(part: Int[Array, ""], _: None) -> None:
        def weights(numbers: Array) -> Float[Array, "k n"]:
            zero = zeros[part] if form.has_zero else None
            step = jnp.ones(zeros.shape[1:]) if form.has_step else None
            return Quantised(numbers.astype(jnp.float32), scales[part], plain, zero, step=step).restored(jnp.float32)

        length = block_k // form.per_byte
        codes = kernel.values[pl.ds(pl.multiple_of(part * length, length), length), :]
        if form.per_byte == 2:
            codes = codes.astype(jnp.int32)
            low, high = (weights(_numbers_of(form.numbers, half)) for half in (codes & 15, codes >> 4))
            words = pltpu.pack_elementwise((low, high), packed_dtype=jnp.bfloat16) if is_compiled else _words(low, high)
            block = pltpu.bitcast(words, jnp.bfloat16)
        else:
            block = (codes.astype(jnp.float32) if form.scales_columns else weights(codes)).astype(jnp.bfloat16)
        inputs = rows[:, pl.ds(pl.multiple_of(part * block_k, block_k), block_k)]
        sums[...] += jnp.dot(inputs, block, preferred_element_type=jnp.float32)

    lax.fori_loop(0, len(scales), add, None)
    scaled = sums[...] * scales[0] if form.scales_columns else sums[...]
    row = tiles[tile] * len(sums) + lax.broadcasted_iota(jnp.int32, sums.shape, 0)
    is_own = (row >= starts[groups[tile]]) & (row < starts[groups[tile] + 1])
    out[...] = jnp.where(is_own, scaled, out[...].astype(jnp.float32)).astype(out.dtype)


def _cut(values: Float[Array, "groups n"], parts: jax.Ref) -> None:
    """Gives each part of the inputs what its groups have, or what all inputs have."""
    count = parts.shape[1]
    for part in range(len(parts)):
        first = part * count if len(values) > 1 else 0
        parts[part] = values[first : first + count]


def _words(low: Float[Array, "k n"], high: Float[Array, "k n"]) -> Int[Array, "k n"]:
    """Both, rounded to bfloat16, as halves of words. Interpret mode has no `pack_elementwise`, which does it faster."""
    wide = (half.astype(jnp.bfloat16).astype(jnp.float32) for half in (low, high))
    low, high = (lax.bitcast_convert_type(half, jnp.int32) for half in wide)
    return lax.shift_right_logical(low, 16) | high


def _numbers_of(kind: str, codes: Int[Array, "k n"]) -> Array:
    """What codes of 4 bits mean: see `form.NUMBERS_OF_4_BITS`."""
    if kind == "e2m1":
        twice = lax.shift_right_logical(jnp.full_like(codes, TWICE_E2M1), (codes & 7) << 2) & 15
        return jnp.where(codes > 7, -twice, twice).astype(jnp.float32) * 0.5
    return codes - 8 if kind == "int4" else codes
