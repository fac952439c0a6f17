"""A thin layer over LLVM's intermediate code, in which the kernels for CPUs are written.

A kernel is a Python function that emits code: Python's own loops and calls run while it is emitted and are unrolled,
`Function.loop` and `Function.when` become loops and branches of the machine. Numbers are `Value`s with Python's
operators. A vector has `LANES` float32 or int32; LLVM cuts it into the registers that the processor has.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from llvmlite import ir

from jsg.kernels_pallas.form import NUMBERS_OF_4_BITS
from jsg.kernels_pallas.inputs import PANEL_WIDTH
from jsg.kernels_pallas.native import library

LANES = PANEL_WIDTH
"""Numbers in a vector."""
INT, INT32, INT16, BYTE = (ir.IntType(bits) for bits in (64, 32, 16, 8))
FLOAT = ir.FloatType()
POINTER = BYTE.as_pointer()
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
EXP_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""(exp(r) - 1 - r) / r² for |r| <= ln(2) / 2, highest power first: Cephes' `expf`."""
POWER_POLYNOMIAL = (5.50082841e-2, 0.242211054, 0.693283007)
"""(2^r - 1) / r for |r| <= 1 / 2, highest power first. Fitted for the least relative error of 2^r: at most 1e-4."""
TANH_POLYNOMIAL = (62 / 2835, -17 / 315, 2 / 15, -1 / 3, 1.0)
TANH_NEAR = 0.25
"""Below it tanh(x) is x times its series in x², highest power first, because 1 - exp(-2 x) would lose digits."""
LEAST_EXPONENT = -87.0
"""Below it exp is smaller than the least normal float32, and is 0 here."""


def vector(element: ir.Type) -> ir.VectorType:
    """The type of `LANES` numbers."""
    return ir.VectorType(element, LANES)


class Value:
    """A number or a vector of a function that is being emitted."""

    def __init__(self, function: "Function", value: Any):
        self._function = function
        self.ir: Any = value  # llvmlite has no types

    @property
    def type(self) -> ir.Type:
        """Its LLVM type."""
        return self.ir.type

    def __add__(self, other: "Value | int | float") -> "Value":
        return self._with(other, "fadd", "add")

    def __sub__(self, other: "Value | int | float") -> "Value":
        return self._with(other, "fsub", "sub")

    def __mul__(self, other: "Value | int | float") -> "Value":
        return self._with(other, "fmul", "mul")

    def __truediv__(self, other: "Value | int | float") -> "Value":
        return self._with(other, "fdiv", "fdiv")

    def __floordiv__(self, other: "Value | int | float") -> "Value":
        """The quotient of numbers that are not negative."""
        return self._with(other, "fdiv", "udiv")

    def __lt__(self, other: "Value | int | float") -> "Value":
        return self._compared("<", other)

    def __le__(self, other: "Value | int | float") -> "Value":
        return self._compared("<=", other)

    def equals(self, other: "Value | int | float") -> "Value":
        """Whether both are equal, as a bit."""
        return self._compared("==", other)

    def _compared(self, sign: str, other: "Value | int | float") -> "Value":
        builder, right = self._function.builder, self._function.like(self, other).ir
        compare = builder.fcmp_ordered if _is_float(self.type) else builder.icmp_signed
        return Value(self._function, compare(sign, self.ir, right))

    def _with(self, other: "Value | int | float", float_operation: str, int_operation: str) -> "Value":
        operation = float_operation if _is_float(self.type) else int_operation
        right = self._function.like(self, other).ir
        return Value(self._function, getattr(self._function.builder, operation)(self.ir, right))


def _is_float(kind: ir.Type) -> bool:
    return (kind.element if isinstance(kind, ir.VectorType) else kind) == FLOAT


class Variable:
    """A number or a vector that changes. LLVM keeps it in a register."""

    def __init__(self, function: "Function", initial: Value):
        self._function, self._slot = function, function.stack(initial.type)
        self.set(initial)

    def get(self) -> Value:
        """Its value now."""
        return Value(self._function, self._function.builder.load(self._slot))

    def set(self, value: Value) -> None:
        """Changes it."""
        self._function.builder.store(value.ir, self._slot)


class Function:
    """A function that is being emitted.

    Attributes:
        module: The module that it belongs to.
        builder: llvmlite's builder, at the end of what was emitted.
        ir: The function itself, for calls and for its address.
        arguments: Its arguments.
    """

    def __init__(self, module: ir.Module, name: str, arguments: list[ir.Type], result: ir.Type | None = None):
        self.module = module
        self.ir = ir.Function(module, ir.FunctionType(result or ir.VoidType(), arguments), name)
        # The variables stand in a block of their own, because LLVM moves only those of the first block to registers.
        self._variables: Any = ir.IRBuilder(self.ir.append_basic_block("variables"))
        body = self.ir.append_basic_block("body")
        self._variables.branch(body)
        self._variables.position_before(self._variables.block.terminator)
        self.builder: Any = ir.IRBuilder(body)
        self.arguments = [Value(self, argument) for argument in self.ir.args]

    def stack(self, kind: ir.Type, count: int = 1) -> Any:
        """Memory for `count` values, until the function returns."""
        slot = self._variables.alloca(kind, count)
        slot.align = 64
        return slot

    def buffer(self, num_bytes: int) -> Value:
        """The address of memory until the function returns."""
        return Value(self, self.builder.bitcast(self.stack(BYTE, num_bytes), POINTER))

    def allocated(self, num_bytes: Value) -> Value:
        """The address of memory that must be freed."""
        allocate = self.external("malloc", ir.FunctionType(POINTER, [INT]))
        return Value(self, self.builder.call(allocate, [num_bytes.ir]))

    def free(self, address: Value) -> None:
        """Gives allocated memory back."""
        self.builder.call(self.external("free", ir.FunctionType(ir.VoidType(), [POINTER])), [address.ir])

    def constant(self, number: int) -> Value:
        """An int64 that does not change."""
        return Value(self, ir.Constant(INT, number))

    def like(self, value: Value, other: Value | int | float) -> Value:
        """A constant of the type of `value`, or `other` itself, spread over all lanes if it must be."""
        if isinstance(other, Value):
            is_spread = isinstance(value.type, ir.VectorType) and not isinstance(other.type, ir.VectorType)
            return self.spread(other) if is_spread else other
        if isinstance(value.type, ir.VectorType):
            return Value(self, ir.Constant(value.type, [other] * LANES))
        return Value(self, ir.Constant(value.type, other))

    def zeros(self) -> Value:
        """A vector of float32 zeros."""
        return Value(self, ir.Constant(vector(FLOAT), [0.0] * LANES))

    def lanes(self) -> Value:
        """The vector 0, 1, 2, ... of int32."""
        return Value(self, ir.Constant(vector(INT32), list(range(LANES))))

    def spread(self, number: Value) -> Value:
        """A vector that has the number in all lanes."""
        kind = ir.VectorType(number.type, LANES)
        nothing = ir.Constant(kind, ir.Undefined)
        first = self.builder.insert_element(nothing, number.ir, ir.Constant(INT32, 0))
        return self.shuffled(Value(self, first), Value(self, nothing), [0] * LANES)

    def shuffled(self, first: Value, second: Value, order: list[int]) -> Value:
        """The lanes of two vectors, which are numbered one after the other, in this order."""
        numbers = ir.Constant(ir.VectorType(INT32, len(order)), order)
        return Value(self, self.builder.shuffle_vector(first.ir, second.ir, numbers))

    def load(self, kind: ir.Type, address: Value, offset: Value | int = 0) -> Value:
        """What lies `offset` bytes behind an address, which need not be aligned."""
        loaded = self.builder.load(self._at(kind, address, offset))
        loaded.align = _item_bytes(kind)
        return Value(self, loaded)

    def store(self, value: Value, address: Value, offset: Value | int = 0) -> None:
        """Writes `offset` bytes behind an address."""
        stored = self.builder.store(value.ir, self._at(value.type, address, offset))
        stored.align = _item_bytes(value.type)

    def address(self, address: Value, offset: Value | int) -> Value:
        """The address `offset` bytes behind another."""
        return Value(self, self.builder.gep(address.ir, [self._offset(offset)]))

    def _at(self, kind: ir.Type, address: Value, offset: Value | int) -> ir.Value:
        return self.builder.bitcast(self.address(address, offset).ir, kind.as_pointer())

    def _offset(self, offset: Value | int) -> ir.Value:
        return offset.ir if isinstance(offset, Value) else ir.Constant(INT, offset)

    def fused(self, a: Value, b: Value, c: Value) -> Value:
        """The sum of a · b and c, rounded once."""
        return self.intrinsic(f"llvm.fma.v{LANES}f32", a, b, c)

    def fused_pairs(self, a: Value, b: Value, c: Value) -> Value:
        """`c` and the products of the pairs of bfloat16 in each lane of `a` and `b`, by an instruction of AVX512-BF16.

        Numbers too small for a normal float32 count as zero.
        """
        kinds = ir.FunctionType(vector(FLOAT), [vector(FLOAT), vector(INT32), vector(INT32)])
        arguments = [c.ir, a.ir, b.ir]
        summed = self.builder.asm(kinds, "vdpbf16ps $3, $2, $0", "=v,0,v,v", arguments, side_effect=False)
        return Value(self, summed)

    def larger(self, a: Value, b: Value) -> Value:
        """The larger number of each lane; `b` where `a` is NaN. It is one instruction of x86."""
        return self.chosen(b < a, a, b)

    def largest(self, a: Value) -> Value:
        """The largest lane, in all lanes. There must be no NaN."""
        distance = LANES // 2
        while distance:
            a = self.larger(a, self.shuffled(a, a, [lane ^ distance for lane in range(LANES)]))
            distance //= 2
        return a

    def total(self, a: Value) -> Value:
        """The sum of all lanes: of halves, of their halves, and so on."""
        width = LANES
        while width > 1:
            width //= 2
            halves = [self.shuffled(a, a, [*range(first, first + width)]) for first in (0, width)]
            a = halves[0] + halves[1]
        return Value(self, self.builder.extract_element(a.ir, ir.Constant(INT32, 0)))

    def chosen(self, condition: Value, a: Value, b: Value) -> Value:
        """`a` where the condition holds, else `b`."""
        return Value(self, self.builder.select(condition.ir, a.ir, b.ir))

    def smaller(self, a: Value, b: Value) -> Value:
        """The smaller of two integers."""
        return self.chosen(a < b, a, b)

    def larger_int(self, a: Value, b: Value) -> Value:
        """The larger of two integers."""
        return self.chosen(a < b, b, a)

    def both(self, a: Value, b: Value) -> Value:
        """Whether two conditions hold."""
        return Value(self, self.builder.and_(a.ir, b.ir))

    def transposed(self, rows: list[Value]) -> list[Value]:
        """The columns of `LANES` vectors: halves change places, then quarters, and so on."""
        distance = LANES // 2
        while distance:
            turned = [*rows]
            for i in range(LANES):
                if i & distance:
                    continue
                first, second = rows[i], rows[i + distance]
                low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
                high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
                turned[i] = self.shuffled(first, second, low)
                turned[i + distance] = self.shuffled(first, second, high)
            rows, distance = turned, distance // 2
        return rows

    def exp(self, x: Value) -> Value:
        """The exponential of a vector of numbers up to 0, to about one unit in the last place. NaN stays NaN."""
        power = self.intrinsic(f"llvm.rint.v{LANES}f32", x * LOG2_E)
        rest = self.fused(power, self.like(x, -LN2_HIGH), x)
        rest = self.fused(power, self.like(x, -LN2_LOW), rest)
        curve = self.like(x, EXP_POLYNOMIAL[0])
        for factor in EXP_POLYNOMIAL[1:]:
            curve = self.fused(curve, rest, self.like(x, factor))
        curve = self.fused(curve * rest, rest, rest) + 1.0
        # The integer added to the exponent's bits multiplies by that power of two.
        bits = Value(self, self.builder.bitcast(curve.ir, vector(INT32)))
        integer = Value(self, self.builder.fptosi(power.ir, vector(INT32)))
        shifted = bits + integer * (1 << 23)
        raised = Value(self, self.builder.bitcast(shifted.ir, vector(FLOAT)))
        is_tiny = Value(self, self.builder.fcmp_ordered("<", x.ir, self.like(x, LEAST_EXPONENT).ir))
        is_nan = Value(self, self.builder.fcmp_unordered("uno", x.ir, x.ir))
        return self.chosen(is_nan, x, self.chosen(is_tiny, self.zeros(), raised))

    def tanh(self, x: Value) -> Value:
        """The hyperbolic tangent of a vector, to a few units in the last place. NaN stays NaN."""
        is_negative = x < 0.0
        size = self.chosen(is_negative, self.zeros() - x, x)
        decay = self.exp(size * -2.0)
        curve = (self.like(decay, 1.0) - decay) / (decay + 1.0)
        square, near = x * x, self.like(x, TANH_POLYNOMIAL[0])
        for factor in TANH_POLYNOMIAL[1:]:
            near = self.fused(near, square, self.like(x, factor))
        return self.chosen(size < TANH_NEAR, near * x, self.chosen(is_negative, self.zeros() - curve, curve))

    def power_of_2(self, x: Value) -> Value:
        """2 to a vector of any numbers, by an instruction of AVX-512, with a relative error of 1e-4.

        That is a twentieth of what is lost where the result becomes a bfloat16. 2 to 0 is 1 exactly.
        """
        power = self.intrinsic(f"llvm.rint.v{LANES}f32", x)
        rest = x - power
        curve = self.like(x, POWER_POLYNOMIAL[0])
        for factor in (*POWER_POLYNOMIAL[1:], 1.0):
            curve = self.fused(curve, rest, self.like(x, factor))
        every, rounding = ir.Constant(INT16, -1), ir.Constant(INT32, 4)
        kinds = [vector(FLOAT), vector(FLOAT), vector(FLOAT), INT16, INT32]
        scale = self.external("llvm.x86.avx512.mask.scalef.ps.512", ir.FunctionType(vector(FLOAT), kinds))
        return Value(self, self.builder.call(scale, [curve.ir, power.ir, curve.ir, every, rounding]))

    def floats(self, kind: str, address: Value, offset: Value | int = 0) -> Value:
        """`LANES` numbers in memory as float32, all without rounding.

        Args:
            kind: "float32", "bfloat16", "float16", "int8", or in 8 bits "e4m3" and "e8m0", without NaN.
            address: Where they are.
            offset: How many bytes behind it.
        """
        if kind == "float32":
            return self.load(vector(FLOAT), address, offset)
        if kind == "bfloat16":
            bits = self.builder.zext(self.load(vector(INT16), address, offset).ir, vector(INT32))
            return self._upper_half(self.builder.shl(bits, self._bits(16)))
        if kind == "float16":
            return self._halves(self.load(vector(INT16), address, offset).ir)
        stored = self.load(vector(BYTE), address, offset).ir
        if kind == "e8m0":  # the bits of an exponent
            return self._upper_half(self.builder.shl(self.builder.zext(stored, vector(INT32)), self._bits(23)))
        if kind == "e4m3":  # float16 with a smaller exponent. What is subnormal stays so, and is converted as well.
            moved = self.builder.shl(self.builder.sext(stored, vector(INT16)), ir.Constant(vector(INT16), [7] * LANES))
            return self._halves(self.builder.and_(moved, ir.Constant(vector(INT16), [0xBF80] * LANES))) * 256.0
        return Value(self, self.builder.sitofp(self.builder.sext(stored, vector(INT32)), vector(FLOAT)))

    def _halves(self, bits: ir.Value) -> Value:
        """`LANES` float16 of these bits, as float32."""
        halves = self.builder.bitcast(bits, vector(ir.HalfType()))
        return Value(self, self.builder.fpext(halves, vector(FLOAT)))

    def float_pairs(self, address: Value, offset: Value | int = 0) -> tuple[Value, Value]:
        """The first and the second numbers of `LANES` pairs of bfloat16, as float32."""
        pairs = self.load(vector(INT32), address, offset).ir
        first, second = self.builder.shl(pairs, self._bits(16)), self.builder.and_(pairs, self._bits(-(1 << 16)))
        return self._upper_half(first), self._upper_half(second)

    def nibble_unit(self, kind: str) -> float:
        """What numbers of 4 bits in float32 are to be multiplied with: of e2m1 they may be large integers."""
        return 2.0**-25 if kind == "e2m1" and not self._looks_up_floats() else 1.0

    def _looks_up_floats(self) -> bool:
        return library.has_long_registers() and library.has_avx512()

    def nibbles(self, kind: str, address: Value, offset: Value | int = 0) -> Iterator[Value]:
        """Eight vectors of float32, of int32 lanes in memory whose 4 bits each, the lowest first, are codes of a kind.

        See `NUMBERS_OF_4_BITS`. They are to be multiplied with `nibble_unit`.
        """
        bits = self.load(vector(INT32), address, offset).ir
        if self._looks_up_floats():
            # An instruction takes the lowest 4 bits of each lane as an index.
            take = self.external(
                "llvm.x86.avx512.permvar.sf.512", ir.FunctionType(vector(FLOAT), [vector(FLOAT), vector(INT32)])
            )
            numbers = ir.Constant(vector(FLOAT), NUMBERS_OF_4_BITS[kind])
            for place in range(8):
                shifted = self.builder.lshr(bits, self._bits(4 * place))
                yield Value(self, self.builder.call(take, [numbers, shifted]))
            return
        if kind == "e2m1":
            for place in range(8):
                move, by = (self.builder.shl, 24 - 4 * place) if place < 6 else (self.builder.lshr, 4 * place - 24)
                yield Value(self, self.builder.sitofp(self._looked_up(move(bits, self._bits(by))), vector(FLOAT)))
            return
        is_signed = kind == "int4"
        if is_signed:  # the highest of each 4 bits becomes a sign
            bits = self.builder.xor(bits, self._bits(-0x77777778))
        back = self.builder.ashr if is_signed else self.builder.lshr
        for place in range(8):
            number = back(self.builder.shl(bits, self._bits(28 - 4 * place)), self._bits(28))
            yield Value(self, self.builder.sitofp(number, vector(FLOAT)))

    def _looked_up(self, bits: ir.Value) -> ir.Value:
        """In the highest byte of each int32, twice the e2m1 that its lowest 4 bits are."""
        bytes_of = ir.VectorType(BYTE, 32)
        take = self.external("llvm.x86.avx2.pshuf.b", ir.FunctionType(bytes_of, [bytes_of, bytes_of]))
        table = ir.Constant(bytes_of, [int(2 * number) & 255 for number in NUMBERS_OF_4_BITS["e2m1"]] * 2)
        codes = self.builder.bitcast(self.builder.and_(bits, self._bits(0x0F000000)), ir.VectorType(BYTE, 64))
        halves = []
        for first in (0, 32):
            order = ir.Constant(ir.VectorType(INT32, 32), list(range(first, first + 32)))
            halves.append(self.builder.call(take, [table, self.builder.shuffle_vector(codes, codes, order)]))
        order = ir.Constant(ir.VectorType(INT32, 64), list(range(64)))
        return self.builder.bitcast(self.builder.shuffle_vector(*halves, order), vector(INT32))

    def nibble_pairs(self, kind: str, address: Value, offset: Value | int = 0) -> Iterator[Value]:
        """The same as four vectors of pairs of bfloat16, by instructions of AVX-512."""
        bits = self.load(vector(INT32), address, offset).ir
        words = ir.VectorType(INT16, 2 * LANES)
        take = self.external("llvm.x86.avx512.permvar.hi.512", ir.FunctionType(words, [words, words]))
        codes = [int(np.float32(number).view(np.uint32)) >> 16 for number in NUMBERS_OF_4_BITS[kind]]
        numbers = ir.Constant(words, codes * 2)  # an index has 5 bits, of which the highest may be anything
        for place in range(4):
            low = self.builder.and_(self.builder.lshr(bits, self._bits(8 * place)), self._bits(0xFFFF))
            high = (
                self.builder.shl(bits, self._bits(12 - 8 * place))
                if place < 2
                else self.builder.lshr(bits, self._bits(8 * place - 12))
            )
            index = self.builder.or_(low, self.builder.and_(high, self._bits(-(1 << 16))))
            found = self.builder.call(take, [numbers, self.builder.bitcast(index, words)])
            yield Value(self, self.builder.bitcast(found, vector(INT32)))

    def store_as(self, kind: str, numbers: Value, address: Value, offset: Value | int = 0) -> None:
        """Writes float32 as "float32" or "bfloat16", rounded to the nearest, and to even where two are as near.

        Numbers too small for a normal float32 may become zero.
        """
        self.store(numbers if kind == "float32" else self._bfloat16(numbers), address, offset)

    def rounded(self, kind: str, numbers: Value) -> Value:
        """Float32 as `store_as` would write them."""
        if kind == "float32":
            return numbers
        bits = self.builder.zext(self._bfloat16(numbers).ir, vector(INT32))
        return self._upper_half(self.builder.shl(bits, self._bits(16)))

    def _bfloat16(self, numbers: Value) -> Value:
        """The bits of float32 that are rounded to bfloat16."""
        if library.rounds_to_bfloat16():
            kinds = ir.FunctionType(vector(INT16), [vector(FLOAT)])
            converted = self.builder.asm(kinds, "vcvtneps2bf16 $1, $0", "=v,v", [numbers.ir], side_effect=False)
            return Value(self, converted)
        bits = self.builder.bitcast(numbers.ir, vector(INT32))
        upper = self.builder.lshr(bits, self._bits(16))
        is_odd = self.builder.and_(upper, self._bits(1))
        rounded = self.builder.add(self.builder.add(bits, self._bits(0x7FFF)), is_odd)
        is_nan = self.builder.fcmp_unordered("uno", numbers.ir, numbers.ir)
        quiet = self.builder.or_(upper, self._bits(0x40))
        chosen = self.builder.select(is_nan, quiet, self.builder.lshr(rounded, self._bits(16)))
        return Value(self, self.builder.trunc(chosen, vector(INT16)))

    def bfloat16_pairs(self, first: Value, second: Value) -> Value:
        """Two vectors of float32 that bfloat16 holds without rounding, as pairs of bfloat16."""
        low, high = (self.builder.bitcast(x.ir, vector(INT32)) for x in (first, second))
        return Value(self, self.builder.or_(self.builder.lshr(low, self._bits(16)), high))

    def _upper_half(self, bits: ir.Value) -> Value:
        """The float32 with these bits: bfloat16 in their upper halves, and zeros."""
        return Value(self, self.builder.bitcast(bits, vector(FLOAT)))

    def _bits(self, number: int) -> ir.Constant:
        return ir.Constant(vector(INT32), [number] * LANES)

    def widened(self, number: Value) -> Value:
        """An int32 as int64."""
        return Value(self, self.builder.sext(number.ir, INT))

    def narrowed(self, number: Value) -> Value:
        """An int64 as int32."""
        return Value(self, self.builder.trunc(number.ir, INT32))

    def as_float(self, number: Value) -> Value:
        """An int64 as float32."""
        return Value(self, self.builder.sitofp(number.ir, FLOAT))

    def byte(self, number: Value) -> Value:
        """The lowest byte of an int64."""
        return Value(self, self.builder.trunc(number.ir, BYTE))

    def prefetch(self, address: Value, offset: Value | int = 0) -> None:
        """Asks for a cache line before it is needed."""
        kind = ir.FunctionType(ir.VoidType(), [POINTER, INT32, INT32, INT32])
        read, near, data = (ir.Constant(INT32, number) for number in (0, 3, 1))
        function = self.external("llvm.prefetch.p0", kind)
        self.builder.call(function, [self.address(address, offset).ir, read, near, data])

    def intrinsic(self, name: str, *arguments: Value, result: ir.Type | None = None) -> Value:
        """One of LLVM's own functions. The result has the type of the first argument if none is given."""
        kinds = [argument.type for argument in arguments]
        function = self.external(name, ir.FunctionType(result or kinds[0], kinds))
        return Value(self, self.builder.call(function, [argument.ir for argument in arguments]))

    def external(self, name: str, kind: ir.FunctionType) -> ir.Function:
        """A function that is defined elsewhere: by LLVM or in the C library."""
        return cast(ir.Function, self.module.globals.get(name)) or ir.Function(self.module, kind, name)

    def call(self, function: "Function", *arguments: Value | int) -> Value:
        """Calls a function of the same module."""
        values = [argument if isinstance(argument, Value) else self.constant(argument) for argument in arguments]
        return Value(self, self.builder.call(function.ir, [value.ir for value in values]))

    @contextlib.contextmanager
    def loop(self, stop: Value | int, *, start: Value | int = 0, step: Value | int = 1) -> Iterator[Value]:
        """A loop over start, start + step, ... below stop."""
        first, last, stride = (x if isinstance(x, Value) else self.constant(x) for x in (start, stop, step))
        test, body, done = (self.builder.append_basic_block(name) for name in ("test", "body", "done"))
        before = self.builder.block
        self.builder.branch(test)
        self.builder.position_at_end(test)
        index = self.builder.phi(INT)
        index.add_incoming(first.ir, before)
        self.builder.cbranch(self.builder.icmp_signed("<", index, last.ir), body, done)
        self.builder.position_at_end(body)
        yield Value(self, index)
        index.add_incoming(self.builder.add(index, stride.ir), self.builder.block)
        self.builder.branch(test)
        self.builder.position_at_end(done)

    @contextlib.contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """What is emitted inside runs only if the condition holds."""
        with self.builder.if_then(condition.ir):
            yield


def _item_bytes(kind: ir.Type) -> int:
    item = kind.element if isinstance(kind, ir.VectorType) else kind
    if isinstance(item, ir.IntType):
        return item.width // 8
    return 4 if item == FLOAT else 8
