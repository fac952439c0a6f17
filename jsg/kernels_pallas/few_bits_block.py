"""Blocks of a kernel in few bits, restored in the registers of an NVIDIA card. Letters: `jsg/models/inputs.py`.

Weights are those of `Quantised.restored` to the bit: a number, less its zero, times its scale, rounded once to the type
of the rows. Only what belongs to a whole channel differs: it multiplies the channel's sum, in float32, so that no
weight is rounded after it.

A card reads few bits faster than it computes numbers of them, so what counts is instructions. A byte has two
consecutive inputs. They become one word, with a number of 16 bits in each half, and the card computes both at a time.
Four bytes are read at once, and each instruction that is left of a word is for two of their numbers:

    bytes  hhhhllll ...   << 3 and >> 1, a byte of each   .hhhh....llll...   & 0x00780078 | 0x41804180   16 + h, 16 + l

Tensor cores want two consecutive inputs of an output side by side in a register. So blocks are turned, [outputs,
inputs], and the product is turned too: weights are its left side, which may stay in registers, and rows the other.
Outputs stand in an order in which those that a lane multiplies lie side by side in memory: see `Reading._turned`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, ArrayLike, Bool, Float, Int, Num, UInt8

from jsg.kernels_pallas.few_bits import TYPES, Quantised
from jsg.kernels_pallas.form import Form
from jsg.kernels_pallas.tuning import class_of, target_capability

EXACT_SCALES = {
    "bfloat16": ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu"),
    "float16": ("float16", "float8_e4m3fn"),
}
"""Type of rows → types of scales of which it holds each number, so that their products are rounded once in it."""


UNIT = 3
"""The bit of a half in which codes begin. So the last one is the first behind the point, and what is put below is 16 in
bfloat16, of which a multiple by a scale of five bits is exact."""
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
        totals = [_in_order(total).T for total in lax.fori_loop(first, last, add, begin)[0]]
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
        if per_byte == 2 and self.is_compiled:
            return self._turned(self._of_4_bits(codes, beside))
        zero = None if beside.step is not None else beside.zero
        if per_byte == 2:
            numbers = jnp.stack([numbers_of(half, self.form) for half in (codes & 15, codes >> 4)], 1)
            numbers = numbers.astype(self.dtype).reshape(self.block_k, num_columns)
            numbers = numbers if zero is None else numbers - self._spread(zero.astype(self.dtype), numbers.shape)
        else:
            numbers = self._of_8_bits(codes, zero)
        if beside.scale is not None:
            wide = jnp.float32 if numbers.dtype == jnp.float32 else self._product_type
            scale, offset = self._scales(beside, wide)
            numbers = numbers.astype(wide) * self._spread(scale, numbers.shape)
            numbers = numbers if offset is None else numbers - self._spread(offset, numbers.shape)
        numbers = numbers.astype(self.dtype).reshape(num_places, per_byte, num_columns)
        return self._turned(numbers.transpose(0, 2, 1))

    @staticmethod
    def _turned(numbers: Float[Array, "p n both"]) -> Float[Array, "n k"]:
        """A block with its inputs last, and its outputs in the order of the rows of tensor cores.

        A lane has rows r, r + 8, r + 64 and r + 72 of 128 for four warps. They are made four outputs side by side, so
        that it reads a word and not four bytes.
        """
        num_places, num_columns, both = numbers.shape
        lanes = numbers.reshape(num_places, *_lanes(num_columns), both)
        return lanes.transpose(3, 1, 4, 2, 0, 5).reshape(num_columns, -1)

    def _scales(
        self, beside: Parts, dtype: jax.typing.DTypeLike
    ) -> tuple[Float[Array, "pieces n"], Float[Array, "pieces n"] | None]:
        """What numbers are multiplied with, and what is taken away then, in a type."""
        scale = numbers_of_scales(beside.scale, self.form)
        scale = scale if beside.factor is None else scale.astype(dtype) * beside.factor
        return scale.astype(dtype), None if beside.step is None else beside.zero.astype(jnp.float32) * beside.step

    @property
    def _product_type(self) -> jax.typing.DTypeLike:
        """The type in which a number times its scale is rounded once."""
        is_one = self.form.block is None and self.form.scale in EXACT_SCALES[self.dtype.name]
        return self.dtype if is_one else jnp.float32

    @staticmethod
    def _spread(of_groups: Num[Array, "pieces n"], shape: tuple[int, ...]) -> Num[Array, "p n"]:
        """What each group has, for each of its places."""
        pieces, (num_places, num_columns) = len(of_groups), shape
        spread = jnp.broadcast_to(of_groups[:, None, :], (pieces, num_places // pieces, num_columns))
        return spread.reshape(shape)

    def _of_8_bits(self, codes: Num[Array, "k n"], zero: Num[Array, "pieces n"] | None) -> Float[Array, "k n"]:
        """Numbers less their zeros, in float32 if there are any: the difference of two bytes has nine bits."""
        codes = lax.bitcast_convert_type(codes, TYPES[self.form.numbers])
        if zero is None:
            has_instructions = self.form.numbers == "int8" and self.is_compiled
            made = self._made(bytes_to_numbers(self.dtype), self.dtype, codes) if has_instructions else codes
            return made.astype(self.dtype)
        pieces = codes.astype(jnp.float32).reshape(-1, self.piece, codes.shape[1])
        return (pieces - zero.astype(jnp.float32)[:, None, :]).reshape(codes.shape)

    def _of_4_bits(self, codes: UInt8[Array, "p n"], beside: Parts) -> Float[Array, "p n 2"]:
        """The weights of both codes of each byte. A scale of few bits multiplies them where they get their zero."""
        wide = self._product_type
        scale, offset = self._scales(beside, wide)
        zero = None if beside.step is not None else beside.zero
        is_one_step = self.form.is_exact and zero is None and wide == self.dtype
        factor, less = (np.asarray(each, self.dtype) for each in line_of(self.form, self.dtype))
        if is_one_step:
            given: dict[str, Any] = {"factor": factor * scale, "less": less * scale}
        else:
            given = {} if zero is None else {"less": less - zero.astype(self.dtype)}
            given |= {"scale": scale} | ({} if offset is None else {"offset": offset})
        words = (self._spread(_as_words(each), codes.shape) for each in given.values())
        how = nibbles_to_weights(self.form, self.dtype, wide, tuple(given))
        both = self._made(how, jnp.int32, codes.astype(jnp.int8), *words)
        halves = (lax.bitcast_convert_type(each.astype(jnp.int16), self.dtype) for each in (both, both >> 16))
        return jnp.concatenate([each[..., None] for each in halves], axis=-1)

    @staticmethod
    def _made(instructions: str, dtype: jax.typing.DTypeLike, *args: Num[Array, "p n"]) -> Num[Array, "p n"]:
        """What instructions make of four elements at a time, which are a word of bytes, and words of other types."""
        num_words = [jnp.dtype(each).itemsize for each in (dtype, *(arg.dtype for arg in args))]
        (made,) = plgpu.elementwise_inline_asm(
            instructions,
            args=args,
            constraints=",".join(["=&r"] * num_words[0] + ["r"] * sum(num_words[1:])),  # inputs are read later
            pack=4,
            result_shape_dtypes=[jax.ShapeDtypeStruct(args[0].shape, dtype)],
        )
        return made


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


def _lanes(num_columns: int) -> tuple[int, int, int, int]:
    """Warps of the columns of a block, lanes of one, tiles of 16 columns of each warp, and halves of these.

    Where tensor cores have memory of their own (10.x) a lane has one column.
    """
    if class_of(target_capability()).name == "sm_100":
        return num_columns, 1, 1, 1
    warps = min(4, num_columns // 16)
    return warps, 8, num_columns // (16 * warps), 2


def _in_order(total: Float[Array, "n m"]) -> Float[Array, "n m"]:
    """The sums of a block that was turned, with outputs in their own order."""
    warps, lanes, tiles, halves = _lanes(len(total))
    return total.reshape(tiles, warps, halves, lanes, -1).transpose(1, 3, 0, 2, 4).reshape(total.shape)


def nibbles_to_weights(form: Form, dtype: jnp.dtype, wide: jax.typing.DTypeLike, given: tuple[str, ...]) -> str:
    """What makes words of two weights, $0 to $3, of the four bytes of $4, for `elementwise_inline_asm`.

    Bits of integers are put below those of a power of two. Those of e2m1 are a sign, the last two of an exponent, and
    the first one behind the point. The number is a factor times that and what is "less": see `line_of`. Then a "scale"
    multiplies in the type `wide`, and an "offset" is taken away. Each that is given has four words.
    """
    bits, is_integer = _mantissa_bits(dtype), form.numbers != "e2m1"
    one = jnp.finfo(dtype).maxexp - 1 + bits - UNIT << bits
    kind = "bf16" if dtype == jnp.bfloat16 else "f16"
    low, high = (UNIT, 4 - UNIT) if is_integer else (4, 0)
    factor, less = (_both(int(np.asarray(each, dtype).view(np.uint16))) for each in line_of(form, dtype))
    lines = [".reg .b32 low, high, bits, size, none, factor, less, wide0, wide1", ".reg .b16 half0, half1"]
    lines += [f"mov.b32 none, {_both(0x8000):#x}", f"mov.b32 factor, {factor:#x}", f"mov.b32 less, {less:#x}"]
    lines += [f"shl.b32 low, $4, {low}", f"shr.u32 high, $4, {high}"]
    for i in range(4):
        of = {name: f"${5 + 4 * operand + i}" for operand, name in enumerate(given)}
        lines.append(f"prmt.b32 bits, low, high, {0x4400 + 0x1111 * i:#x}")
        if is_integer:
            lines.append(f"lop3.b32 bits, bits, {_both(15 << UNIT):#x}, {_both(one):#x}, 0xea")  # (a & b) | c
        else:
            lines += [f"shr.u32 size, bits, {13 - bits}", f"and.b32 bits, bits, {_both(0x8000):#x}"]
            lines.append(f"lop3.b32 bits, size, {_both(7 << bits - 1):#x}, bits, 0xea")
        lines.append(f"fma.rn.{kind}x2 bits, bits, {of.get('factor', 'factor')}, {of.get('less', 'less')}")
        if "scale" not in of:
            lines.append(f"mov.b32 ${i}, bits")
        elif wide == dtype:
            lines.append(f"fma.rn.{kind}x2 ${i}, bits, {of['scale']}, none")
        else:
            lines.append("mov.b32 {half0, half1}, bits")
            for half in range(2):
                lines += [f"cvt.f32.{kind} wide{half}, half{half}", f"mul.rn.f32 wide{half}, wide{half}, {of['scale']}"]
                lines += [f"sub.rn.f32 wide{half}, wide{half}, {of['offset']}"] if "offset" in of else []
            lines.append(f"cvt.rn.{kind}x2.f32 ${i}, wide1, wide0")
    return f"{{ {'; '.join(lines)}; }}"


def line_of(form: Form, dtype: jnp.dtype) -> tuple[float, float]:
    """The factor and the summand that make numbers of what `nibbles_to_weights` puts together.

    The exponent of e2m1 is too small by the difference of both types' biases, also where it is zero.
    """
    if form.numbers == "e2m1":
        return 2.0 ** (jnp.finfo(dtype).maxexp - 2), 0.0
    return 1.0, -(2.0 ** (_mantissa_bits(dtype) - UNIT)) - (8 if form.numbers == "int4" else 0)


def bytes_to_numbers(dtype: jnp.dtype) -> str:
    """What makes four numbers, two words, of the four int8 in $2.

    Seven bits are put below those of a power of two. From that is taken this power, and 128 more if the eighth is set.
    """
    bits = _mantissa_bits(dtype)
    one = jnp.finfo(dtype).maxexp - 1 + bits << bits
    lines = [".reg .b32 bits, sign, one", f"mov.b32 one, {_both(jnp.finfo(dtype).maxexp - 1 << bits):#x}"]
    for index, bytes_ in enumerate((0x1100, 0x3322)):
        lines.append(f"prmt.b32 bits, $2, $2, {bytes_:#x}")
        lines.append(f"lop3.b32 sign, bits, {_both(128):#x}, {_both(one | 0x8000):#x}, 0xea")
        lines.append(f"lop3.b32 bits, bits, {_both(127):#x}, {_both(one):#x}, 0xea")
        lines.append(f"fma.rn.{'bf16' if dtype == jnp.bfloat16 else 'f16'}x2 ${index}, bits, one, sign")
    return f"{{ {'; '.join(lines)}; }}"


def _mantissa_bits(dtype: jnp.dtype) -> int:
    return jnp.finfo(dtype).nmant


def _both(half: int) -> int:
    """A word with these bits in both halves."""
    return half | half << 16


def _as_words(numbers: Float[Array, "*block"]) -> Int[Array, "*block"]:
    """The bits of float32, and those of a number of 16 bits in both halves of a word."""
    if numbers.dtype != jnp.float32:
        numbers = lax.bitcast_convert_type(numbers, jnp.uint16).astype(jnp.uint32) * _both(1)
    return lax.bitcast_convert_type(numbers, jnp.int32)


def numbers_of_scales(stored: Num[Array, "*block"], form: Form) -> Num[Array, "*block"]:
    """Scales as numbers."""
    if stored.dtype != jnp.uint8:
        return stored
    bits = stored.astype(jnp.uint32)
    if form.scale == "float8_e8m0fnu":
        return lax.bitcast_convert_type(jnp.where(bits == 0, 1 << 22, bits << 23), jnp.float32)
    tiny = (bits & 7).astype(jnp.float32) * 2**-9
    normal = lax.bitcast_convert_type(((bits & 127) << 20) + (120 << 23), jnp.float32)
    return jnp.where(bits & 120 == 0, tiny, normal) * jnp.where(bits & 128 == 0, 1.0, -1.0)
