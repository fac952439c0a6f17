"""Blocks of a kernel in few bits, restored in the registers of an NVIDIA card. Letters: `jsg/models/inputs.py`.

Weights are those of `Quantised.restored` to the bit: a number, less its zero, times its scale, rounded once to the type
of the rows. Only what belongs to a whole channel differs: it multiplies the channel's sum, in float32, so that no
weight is rounded after it.

A card reads few bits faster than it computes numbers of them, so what counts is instructions. A byte has two
consecutive inputs. They become one word, with a number of 16 bits in each half, and the card computes both at a time:

    byte  ....hhhhllll   · 0x1001   hhhh....hhhhllll   & 0x000f000f | 0x43004300   a bfloat16 of 128 + h, one of 128 + l

Tensor cores want two consecutive inputs of an output side by side in a register. So blocks are turned, [outputs,
inputs], and the product is turned too: weights are its left side, which may stay in registers, and rows the other.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num, UInt, UInt8

from jsg.kernels_pallas.few_bits import TYPES, Quantised
from jsg.kernels_pallas.form import Form

EXACT_SCALES = {
    "bfloat16": ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu"),
    "float16": ("float16", "float8_e4m3fn"),
}
"""Type of rows → types of scales of which it holds each number, so that their products are rounded once in it."""


BARRIER_BYTES = 128
"""What warp groups need to wait for one another."""


class Parts(NamedTuple):
    """What is read of a kernel, or references to it: see `Quantised`. Outputs are one axis; experts may stand first.

    Attributes:
        values: [D / per_byte, F]
        scale: [groups, F] Those of 8 bits are bytes. None if each channel has one, which is in `factor`.
        zero: [groups, F], or None.
        factor: [blocks, F], or None. If there is one for a channel, it multiplies the channel's sums.
        step: [blocks, F], or None.
    """

    values: Any
    scale: Any
    zero: Any
    factor: Any
    step: Any


class Reading(NamedTuple):
    """How the programs of a product read a kernel. There are no arrays in it.

    Attributes:
        form: How the kernel is kept.
        depth: Its inputs.
        num_groups: The groups of a channel.
        block_k: Inputs of a block.
        dtype: The type of the rows, which weights are restored in: one of `EXACT_SCALES`.
        is_compiled: Whether a card runs it, and not interpret mode.
    """

    form: Form
    depth: int
    num_groups: int
    block_k: int
    dtype: jnp.dtype
    is_compiled: bool

    @property
    def piece(self) -> int:
        """Inputs of a block with one scale, a power of two. With one for a whole block weights would be moved first."""
        group = self.depth // self.num_groups
        return min(group & -group, self.block_k // 2)

    def sums(
        self,
        rows: jax.Ref,
        source: Int[Array, "m 1"],
        is_row: Bool[Array, "m 1"],
        kernels: tuple[Parts, ...],
        at: tuple[Array, ...],
        column: Int[Array, " n"],
        blocks: tuple[ArrayLike, ArrayLike],
    ) -> list[Float[Array, "m n"]]:
        """The products of some rows with these columns of each kernel.

        What groups have is read one iteration ahead of their weights. If it were read in the same one, the compiler
        would copy these few bytes as it copies weights, in pieces of less than 16.

        Args:
            rows: All rows.
            source: Which of them, and whether each is one.
            is_row: See there.
            kernels: The kernels.
            at: Which expert, if there are several.
            column: The outputs.
            blocks: The first block of inputs, and the one behind the last.
        """

        def ahead(index: Int[Array, ""]) -> tuple[Parts, ...]:
            return tuple(self._beside(parts, at, column, index) for parts in kernels)

        def add(
            index: Int[Array, ""], carry: tuple[tuple[Float[Array, "n m"], ...], tuple[Parts, ...]]
        ) -> tuple[tuple[Float[Array, "n m"], ...], tuple[Parts, ...]]:
            totals, beside = carry
            following = ahead(index + 1)
            k = index * self.block_k + jnp.arange(self.block_k)
            right = plgpu.load(rows.at[source, k[None, :]], mask=is_row & (k < self.depth)[None, :], other=0).T
            weights = (self._weights(*each, at, column, index) for each in zip(kernels, beside, strict=True))
            products = [plgpu.dot(left, right, allow_tf32=False) for left in weights]
            return tuple(total + each for total, each in zip(totals, products, strict=True)), following

        first, last = blocks
        begin = (jnp.zeros((len(column), len(source)), jnp.float32),) * len(kernels), ahead(jnp.int32(first))
        totals = [total.T for total in lax.fori_loop(first, last, add, begin)[0]]
        for index, parts in enumerate(kernels):
            if parts.factor is not None and self.form.block is None:
                factor = plgpu.load(parts.factor.at[(*at, 0, column)], mask=column < parts.values.shape[-1], other=0)
                totals[index] *= factor[None, :]
        return totals

    def _beside(self, parts: Parts, at: tuple[Array, ...], column: Int[Array, " n"], index: Int[Array, ""]) -> Parts:
        """What each piece of a block has beside its numbers, [pieces, n]."""
        first = (index * self.block_k + jnp.arange(self.block_k // self.piece) * self.piece)[:, None]
        mask = (first < self.depth) & (column < parts.values.shape[-1])[None, :]
        group = self.depth // self.num_groups

        def load(part: Any, length: int | None) -> Num[Array, "pieces n"] | None:
            if part is None or length is None:
                return None
            return plgpu.load(part.at[(*at, first // length, column[None, :])], mask=mask, other=0)

        lengths = Parts(None, group, group, self.form.block, self.form.block)
        return Parts(*map(load, parts, lengths))

    def _weights(
        self, parts: Parts, beside: Parts, at: tuple[Array, ...], column: Int[Array, " n"], index: Int[Array, ""]
    ) -> Float[Array, "n k"]:
        """The weights of a block, zero where masked: past F, and past D."""
        per_byte, num_columns = self.form.per_byte, len(column)
        num_places = self.block_k // per_byte
        place = index * num_places + jnp.arange(num_places)
        mask = (place < self.depth // per_byte)[:, None] & (column < parts.values.shape[-1])[None, :]
        codes = plgpu.load(parts.values.at[(*at, place[:, None], column[None, :])], mask=mask, other=0)
        zero = None if beside.step is not None else beside.zero
        numbers = self._of_4_bits(codes, zero) if per_byte == 2 else self._of_8_bits(codes, zero)
        if beside.scale is not None:
            numbers = self._scaled(numbers, beside, codes.shape)
        if per_byte == 1:
            return numbers.reshape(num_places, num_columns).astype(self.dtype).T
        pairs = numbers.reshape(num_places, num_columns, 2).astype(self.dtype)
        return pairs.transpose(1, 0, 2).reshape(num_columns, self.block_k)

    def _scaled(
        self, numbers: Float[Array, "p n *both"], beside: Parts, shape: tuple[int, int]
    ) -> Float[Array, "p n *both"]:
        """Numbers of this many places and columns times their scales, less their offsets."""
        wide = jnp.float32 if numbers.dtype == jnp.float32 else self._product_type

        def spread(of_pieces: Num[Array, "pieces n"]) -> Float[Array, "p n *both"]:
            whole = self._spread(of_pieces.astype(wide), shape)
            return whole[..., None] if numbers.ndim == 3 else whole

        scale = _scales(beside.scale, self.form)
        scale = scale if beside.factor is None else scale.astype(wide) * beside.factor
        numbers = numbers.astype(wide) * spread(scale)
        offset = None if beside.step is None else beside.zero.astype(wide) * beside.step
        return numbers if offset is None else numbers - spread(offset)

    @property
    def _product_type(self) -> jax.typing.DTypeLike:
        """The type in which a number times its scale is rounded once."""
        is_one = self.form.block is None and self.form.scale in EXACT_SCALES[self.dtype.name]
        return self.dtype if is_one else jnp.float32

    @staticmethod
    def _spread(of_groups: Num[Array, "pieces n"], shape: tuple[int, int]) -> Num[Array, "p n"]:
        """What each group has, for each of its places."""
        pieces, (num_places, num_columns) = len(of_groups), shape
        spread = jnp.broadcast_to(of_groups[:, None, :], (pieces, num_places // pieces, num_columns))
        return spread.reshape(shape)

    def _of_8_bits(self, codes: Num[Array, "k n"], zero: Num[Array, "pieces n"] | None) -> Float[Array, "k n"]:
        """Numbers less their zeros, in float32 if there are any: the difference of two bytes has nine bits."""
        codes = lax.bitcast_convert_type(codes, TYPES[self.form.numbers])
        if zero is None:
            return codes.astype(self.dtype)
        pieces = codes.astype(jnp.float32).reshape(-1, self.piece, codes.shape[1])
        return (pieces - zero.astype(jnp.float32)[:, None, :]).reshape(codes.shape)

    def _of_4_bits(self, codes: UInt8[Array, "p n"], zero: Num[Array, "pieces n"] | None) -> Float[Array, "p n 2"]:
        """The numbers of both codes of each byte, less their zeros. All these are exact."""
        less = None if zero is None else self._spread(zero.astype(self.dtype), codes.shape)
        if not self.is_compiled:
            halves = [numbers_of(half, self.form).astype(self.dtype) for half in (codes & 15, codes >> 4)]
            halves = halves if less is None else [half - less for half in halves]
        else:
            offset = offset_of(self.form, self.dtype)
            if less is None:  # a constant for the compiler too
                words = jnp.full(codes.shape, _both(int(np.asarray(-offset, self.dtype).view(np.uint16))), jnp.uint32)
            else:
                words = lax.bitcast_convert_type(-(less + offset), jnp.uint16).astype(jnp.uint32) * _both(1)
            words = codes_in_words(codes, self.form, self.dtype), words
            (both,) = plgpu.elementwise_inline_asm(
                instructions(self.form, self.dtype),
                args=[lax.bitcast_convert_type(each, jnp.int32) for each in words],
                constraints="=r,r,r",
                pack=1,
                result_shape_dtypes=[jax.ShapeDtypeStruct(codes.shape, jnp.int32)],
            )
            halves = [lax.bitcast_convert_type(each.astype(jnp.int16), self.dtype) for each in (both, both >> 16)]
        return jnp.concatenate([each[..., None] for each in halves], axis=-1)


def reading_of(kernel: Quantised, dtype: jnp.dtype, *, is_compiled: bool) -> Reading:
    """How a kernel is read for rows of this type, without the size of a block.

    Float32 would need products of float32, in which tensor cores are no faster than memory: whoever asks for it asks
    for exact sums, and the reference has them.

    Raises:
        NotImplementedError: Rows in float32, groups with an odd number of inputs, or experts in an order of their own.
    """
    if dtype.name not in EXACT_SCALES:
        raise NotImplementedError(f"the Triton kernel wants rows of 16 bits, not {dtype}")
    if kernel.order is not None and kernel.axis > 0:
        raise NotImplementedError("the Triton kernel wants the inputs of experts in their own order")
    depth = kernel.shape[kernel.axis]
    num_groups = kernel.scale.shape[kernel.axis]
    if kernel.form.per_byte == 2 and depth // num_groups % 2:
        group = depth // num_groups
        raise NotImplementedError(f"the Triton kernel wants an even number of inputs in a group, not {group}")
    return Reading(kernel.form, depth, num_groups, 0, dtype, is_compiled)


def parts_of(kernel: Quantised) -> Parts:
    """The arrays of a kernel that products read."""
    stored = kernel.values, kernel.scale, kernel.zero, kernel.factor, kernel.step
    if kernel.form.scales_columns:
        stored = kernel.values, None, None, kernel.wide_scale, None
    lead = kernel.axis + 1
    parts = Parts(*(None if part is None else part.reshape(*part.shape[:lead], -1) for part in stored))
    return Parts(*(None if part is None else _as_bytes(part) for part in parts))


def _as_bytes(part: Any) -> Any:
    """Floats of 8 bits as bytes: not every card can convert them, and a masked read of them has no value to put in."""
    is_short = part.dtype.itemsize == 1 and jnp.issubdtype(part.dtype, jnp.floating)
    return lax.bitcast_convert_type(part, jnp.uint8) if is_short else part


def numbers_of(codes: UInt8[Array, "*block"], form: Form) -> Float[Array, "*block"]:
    """What codes of 4 bits mean, in bfloat16: see `NUMBERS_OF_4_BITS`."""
    bits = codes.astype(jnp.uint16)
    if form.numbers != "e2m1":
        zero = jnp.bfloat16(136 if form.numbers == "int4" else 128)
        return lax.bitcast_convert_type(bits | 0x4300, jnp.bfloat16) - zero  # 128 + code, less that
    size = bits & 7  # an exponent of two bits and one bit behind the point; below 2 there is no bit before it
    size = jnp.where(size < 2, size * 0x3F00, (size << 6) + 0x3F00)
    return lax.bitcast_convert_type(size | (bits & 8) << 12, jnp.bfloat16)


def codes_in_words(codes: UInt8[Array, "*block"], form: Form, dtype: jnp.dtype) -> UInt[Array, "*block"]:
    """A byte's codes in the halves of a word, where `instructions` want them.

    Those of integers have other bits beside them. Of e2m1 the three bits of size are the last of the exponent and the
    first behind the point.
    """
    wide = codes.astype(jnp.uint32)
    if form.numbers != "e2m1":
        return wide * _apart(0)
    shift = _mantissa_bits(dtype) - 1
    size = wide * _apart(shift) & _both(7 << shift)
    return size | wide * _apart(12) & jnp.uint32(_both(0x8000))


def instructions(form: Form, dtype: jnp.dtype) -> str:
    """What makes the numbers of both halves of a word, plus the two of another word, for `elementwise_inline_asm`.

    Of integers bits are put below those of a power of two whose last bit is 1, which the other word takes away. Of e2m1
    the exponent is too small by the difference of both types' biases, also where it is zero.
    """
    bits = _mantissa_bits(dtype)
    bias = jnp.finfo(dtype).maxexp - 1
    kind = "bf16x2" if dtype == jnp.bfloat16 else "f16x2"
    if form.numbers != "e2m1":
        factor, put = bias, f"lop3.b32 bits, $1, {_both(15):#x}, {_both(bias + bits << bits):#x}, 0xea;"  # (a & b) | c
    else:
        factor, put = 2 * bias - 1, "mov.b32 bits, $1;"
    return (
        f"{{ .reg .b32 bits, factor; {put} mov.b32 factor, {_both(factor << bits):#x}; "
        f"fma.rn.{kind} $0, bits, factor, $2; }}"
    )


def offset_of(form: Form, dtype: jnp.dtype) -> int:
    """What `instructions` have to take away from what they put together, beside a zero."""
    if form.numbers == "e2m1":
        return 0
    return 2 ** _mantissa_bits(dtype) + (8 if form.numbers == "int4" else 0)


def _mantissa_bits(dtype: jnp.dtype) -> int:
    return jnp.finfo(dtype).nmant


def _both(half: int) -> int:
    """A word with these bits in both halves."""
    return half | half << 16


def _apart(shift: int) -> int:
    """What a byte is multiplied with, so that its lower code is so far up in the lower half, its upper in the upper."""
    return 1 << shift | 1 << shift + 12


def _scales(stored: Num[Array, "*block"], form: Form) -> Num[Array, "*block"]:
    """Scales as numbers."""
    if stored.dtype != jnp.uint8:
        return stored
    bits = stored.astype(jnp.uint32)
    if form.scale == "float8_e8m0fnu":
        return lax.bitcast_convert_type(jnp.where(bits == 0, 1 << 22, bits << 23), jnp.float32)
    tiny = (bits & 7).astype(jnp.float32) * 2**-9
    normal = lax.bitcast_convert_type(((bits & 127) << 20) + (120 << 23), jnp.float32)
    return jnp.where(bits & 120 == 0, tiny, normal) * jnp.where(bits & 128 == 0, 1.0, -1.0)
