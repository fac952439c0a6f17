"""Rows times a kernel in 4 bits, as one Pallas-Triton launch. Letters: `jsg/models/inputs.py`.

A program owns `block_m` rows and `block_n` columns. It reads each byte of its columns once, restores the two weights in
registers, and multiplies them on tensor cores. Weights are those of `Quantised.restored` to the bit: computed in
float32, and rounded to the type of the rows. Only a factor of a channel differs: it multiplies the channel's sum, in
float32, so that no weight is rounded after it.

A byte has two consecutive inputs. Rows come with their even inputs apart from their odd ones, so each half of a byte
belongs to a product of its own, and no weight moves to another place of a block:

    x[:, 0::2] · (bytes & 15)  +  x[:, 1::2] · (bytes >> 4)

A sum runs over blocks of inputs in order. The inputs are never shared out among programs, so a row has the same result
whatever the other rows of its step are.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Num, UInt8

from jsg.kernels_pallas.attention_block import whole_spec
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import SCALE_BYTES, Form
from jsg.kernels_pallas.grouped_matmul import BARRIER_BYTES, Sizes
from jsg.kernels_pallas.tuning import fitting, sizes_for, stages_in_memory


class Parts(NamedTuple):
    """What is read of a kernel, or references to it: see `Quantised`. Outputs are one axis.

    Attributes:
        values: [D / 2, F]
        scale: [groups, F] Floats of 8 bits are bytes.
        zero: [groups, F], or None.
        factor: [blocks, F], or None.
        step: [blocks, F], or None.
    """

    values: Any
    scale: Any
    zero: Any
    factor: Any
    step: Any


def few_bits_matmul(
    x: Float[Array, "T D"], kernel: Quantised, result: jax.typing.DTypeLike, *, interpret: bool = False
) -> Float[Array, "T *out"]:
    """See `ops.matmul`.

    Raises:
        NotImplementedError: Numbers in 8 bits, rows in float32, or groups with an odd number of inputs.
    """
    (num_rows, depth), form = x.shape, kernel.form
    if form.per_byte != 2 or x.dtype.itemsize != 2:
        raise NotImplementedError(f"the Triton kernel wants 4 bits and rows of 16, not {form.numbers} and {x.dtype}")
    group = depth // len(kernel.scale)
    if group % 2:
        raise NotImplementedError(f"the Triton kernel wants an even number of inputs in a group, not {group}")
    stored = kernel.values, kernel.scale, kernel.zero, kernel.factor, kernel.step
    parts = Parts(*(None if part is None else part.reshape(len(part), -1) for part in stored))
    if form.scale.startswith("float8"):
        parts = parts._replace(scale=lax.bitcast_convert_type(parts.scale, jnp.uint8))
    x = x if kernel.order is None else jnp.take(x, kernel.order, axis=1)
    read = jnp.moveaxis(x.reshape(num_rows, depth // 2, 2), 2, 0), parts
    cut, width = default_sizes(num_rows, x.dtype), parts.values.shape[1]
    out = pl.pallas_call(
        functools.partial(few_bits_matmul_kernel, cut, form, group),
        grid=(pl.cdiv(num_rows, cut.block_m), pl.cdiv(width, cut.block_n)),
        in_specs=jax.tree.map(whole_spec, read),
        out_specs=pl.BlockSpec((num_rows, width), lambda *_: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((num_rows, width), result),
        compiler_params=plgpu.CompilerParams(num_warps=cut.num_warps, num_stages=cut.num_stages),
        interpret=interpret,
    )(*read)
    return out.reshape(num_rows, *kernel.values.shape[1:])


def default_sizes(num_rows: int, dtype: jnp.dtype) -> Sizes:
    """The best sizes on this device for so many rows."""
    return fitting(Sizes(**sizes_for("few_bits_matmul", rows=num_rows)), lambda sizes: shared_bytes(sizes, dtype))


def shared_bytes(sizes: Sizes, dtype: jnp.dtype) -> int:
    """The bytes of shared memory that a program takes, or more: blocks in flight, and restored weights."""
    kernel = sizes.block_k * sizes.block_n
    in_flight = sizes.block_m * sizes.block_k * dtype.itemsize + kernel // 2
    return stages_in_memory(sizes.num_stages, sizes.block_m) * in_flight + kernel * dtype.itemsize + BARRIER_BYTES


def few_bits_matmul_kernel(cut: Sizes, form: Form, group: int, rows: jax.Ref, parts: Parts, out: jax.Ref) -> None:
    """One program: `block_m` rows and `block_n` columns of the result.

    Scales and zeros are read one iteration ahead of their weights. If they were read in the same one, the compiler
    would copy these few bytes as it copies weights, in pieces of less than 16.

    Grid: (row blocks, column blocks). Programs that read the same part of the kernel follow one another.
    Blocks: every array stays in device memory. Owns: its rows and columns of the result.

    Masked: rows past T, columns past F, and summands past D. A row that is not finite changes no other row.
    """
    (_, num_rows, pairs), width = rows.shape, out.shape[1]
    piece = min(group & -group, cut.block_k)  # inputs with one scale, a power of two
    row = (pl.program_id(0) * cut.block_m + jnp.arange(cut.block_m))[:, None]
    column = (pl.program_id(1) * cut.block_n + jnp.arange(cut.block_n))[None, :]
    is_row, is_column = row < num_rows, column < width
    # Two bits times four are as many as a bfloat16 has.
    is_exact = form.is_exact or (form.numbers == "e2m1" and SCALE_BYTES[form.scale] == 1 and form.block is None)
    wide = jnp.bfloat16 if is_exact else jnp.float32

    def of_groups(index: Int[Array, ""]) -> Parts:
        """What each piece has beside its numbers, [pieces, n]."""
        first = (index * cut.block_k + jnp.arange(cut.block_k // piece) * piece)[:, None]
        mask = (first < 2 * pairs) & is_column
        lengths = Parts(None, group, group, form.block, form.block)
        return Parts(
            *(
                None
                if part is None or length is None
                else plgpu.load(part.at[first // length, column], mask=mask, other=0)
                for part, length in zip(parts, lengths, strict=True)
            )
        )

    def add(index: Int[Array, ""], carry: tuple[Float[Array, "m n"], Parts]) -> tuple[Float[Array, "m n"], Parts]:
        total, of = carry
        following = of_groups(index + 1)
        pair = index * (cut.block_k // 2) + jnp.arange(cut.block_k // 2)
        at, is_pair = pair[:, None], pair < pairs
        codes = plgpu.load(parts.values.at[at, column], mask=is_pair[:, None] & is_column, other=0)
        codes = codes.reshape(-1, piece // 2, cut.block_n)
        scale = _scales(of.scale, form).astype(wide)
        scale = scale if of.factor is None else scale * of.factor
        offset = None if of.step is None else of.zero.astype(wide) * of.step
        for half, of_half in enumerate((codes & 15, codes >> 4)):
            left = plgpu.load(rows.at[half, row, pair[None, :]], mask=is_row & is_pair[None, :], other=0)
            numbers = _numbers(of_half, form)
            if of.zero is not None and offset is None:
                numbers -= of.zero.astype(numbers.dtype)[:, None, :]
            weights = numbers.astype(wide) * scale[:, None, :]
            weights = weights if offset is None else weights - offset[:, None, :]
            total += plgpu.dot(left, weights.astype(left.dtype).reshape(-1, cut.block_n), allow_tf32=False)
        return total, following

    begin = jnp.zeros((cut.block_m, cut.block_n), jnp.float32), of_groups(jnp.int32(0))
    total, _ = lax.fori_loop(0, pl.cdiv(2 * pairs, cut.block_k), add, begin)
    if parts.factor is not None and form.block is None:
        total *= plgpu.load(parts.factor.at[0, column], mask=is_column, other=0)
    plgpu.store(out.at[row, column], total.astype(out.dtype), mask=is_row & is_column)


def _numbers(codes: UInt8[Array, "*block"], form: Form) -> Float[Array, "*block"]:
    """What codes mean, see `NUMBERS_OF_4_BITS`. Bits of a bfloat16 are composed: to convert integers is slow."""
    bits = codes.astype(jnp.uint16)
    if form.numbers != "e2m1":
        zero = jnp.bfloat16(136 if form.numbers == "int4" else 128)
        return lax.bitcast_convert_type(bits | 0x4300, jnp.bfloat16) - zero  # 128 + code, less that
    size = bits & 7  # an exponent of two bits and one bit behind the point; below 2 there is no bit before it
    size = jnp.where(size < 2, size * 0x3F00, (size << 6) + 0x3F00)
    return lax.bitcast_convert_type(size | (bits & 8) << 12, jnp.bfloat16)


def _scales(stored: Num[Array, "*block"], form: Form) -> Num[Array, "*block"]:
    """Scales as numbers. Those of 8 bits are bytes, because cards before 8.9 cannot convert them."""
    if stored.dtype != jnp.uint8:
        return stored
    bits = stored.astype(jnp.uint32)
    if form.scale == "float8_e8m0fnu":
        return lax.bitcast_convert_type(jnp.where(bits == 0, 1 << 22, bits << 23), jnp.float32)
    tiny = (bits & 7).astype(jnp.float32) * 2**-9
    normal = lax.bitcast_convert_type(((bits & 127) << 20) + (120 << 23), jnp.float32)
    return jnp.where(bits & 120 == 0, tiny, normal) * jnp.where(bits & 128 == 0, 1.0, -1.0)
