"""The gated delta rule on a CPU: one pass over each state for each token. See `ops.gated_delta`.

An item is a piece in one key head, so no other item reads or writes what it does. A row of a state, whose numbers
belong to one value, is read, decayed, corrected and written while it is in registers. Arithmetic is float32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, StateCache
from jsg.kernels_pallas.native.calls import Buffer, Kernel, emit_handler
from jsg.kernels_pallas.native.emit import INT32, LANES, Function, Value, Variable
from jsg.kernels_pallas.native.gated import sigmoid
from jsg.kernels_pallas.native.library import registered
from jsg.kernels_pallas.native.tiles import ITEM_BYTES, load_number, load_panel
from jsg.kernels_pallas.reference_delta import UNIT_EPS, gates

KINDS = ("float32", "bfloat16")


class _Shape(NamedTuple):
    """What machine code is made for.

    Attributes:
        kind: The type of the projections, of the taps and of the inputs that are kept.
        taps: How many tokens the convolution sees.
        group: Value heads of a key head.
        keys: Width of a query and key.
        values: Width of a value.
        is_apart: Gates of the output are not in the projection, and each number of a key has a decay.
    """

    kind: str
    taps: int
    group: int
    keys: int
    values: int
    is_apart: bool

    @property
    def mixed(self) -> int:
        """Channels of the convolution in a key head."""
        return 2 * self.keys + self.group * self.values

    @property
    def joint(self) -> int:
        """Numbers of a key head in the projection."""
        return self.mixed + (0 if self.is_apart else self.group * self.values)

    @property
    def item_bytes(self) -> int:
        """Bytes of a number of `kind`."""
        return ITEM_BYTES[self.kind]


class _Call(NamedTuple):
    """The buffers of a call. `pieces` has the fields of `Pieces` in order. States that are written are those given."""

    joint: Buffer
    gates: Buffer
    decay: Buffer
    strength: Buffer
    taps: Buffer
    norm: Buffer
    eps: Buffer
    pieces: list[Buffer]
    out: Buffer
    inputs: Buffer
    states: Buffer

    @classmethod
    def of(cls, buffers: list[Buffer]) -> "_Call":
        """The buffers in the order in which XLA has them."""
        joint, gates, decay, strength, taps, norm, eps = buffers[:7]
        out, inputs, states = buffers[15:]
        return cls(joint, gates, decay, strength, taps, norm, eps, buffers[7:13], out, inputs, states)

    @property
    def lens(self) -> Buffer:
        """The tokens of each piece."""
        return self.pieces[Pieces._fields.index("lens")]


def gated_delta(
    joint: Float[Array, "T K joint"],
    raw_gates: Float[Array, "T K gates"],
    weights: DeltaWeights,
    cache: StateCache,
    pieces: Pieces,
    apart: GatesApart | None = None,
) -> tuple[Float[Array, "T N Dv"], StateCache]:
    """See `ops.gated_delta`.

    Raises:
        NotImplementedError: A query or value is no multiple of `LANES` numbers, or a type is not supported.
    """
    kind, (heads, values, keys) = str(joint.dtype), cache.states.shape[1:]
    shape = _Shape(kind, len(weights.taps), heads // joint.shape[1], keys, values, apart is not None)
    if kind not in KINDS or keys % LANES or values % LANES or not kind == weights.taps.dtype == cache.inputs.dtype:
        raise NotImplementedError(
            f"the CPU's kernel takes queries and values of a multiple of {LANES} numbers, and projections, taps and "
            "inputs that are all float32 or all bfloat16"
        )
    shapes = [
        jax.ShapeDtypeStruct((len(joint), heads, values), joint.dtype),
        *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache),
    ]
    name = registered("jsg_delta_" + "_".join(map(str, shape)), functools.partial(_emit, shape))
    call = jax.ffi.ffi_call(name, shapes, input_output_aliases={13: 1, 14: 2})
    each = (weights.taps, weights.norm.astype(jnp.float32), jnp.float32(weights.eps))
    decay, strength = gates(raw_gates, weights, apart)
    where = (joint, joint if apart is None else apart.output, decay.reshape(len(joint), heads, -1), strength)
    out, *written = call(*where, *each, *pieces, *cache)
    return out, StateCache(*written)


def _emit(shape: _Shape, module: ir.Module, name: str) -> None:
    ranks = (3, 3, 3, 2, 3, 1, 0, *(1,) * 6, 4, 4, 3, 4, 4)

    def num_items(_: Function, buffers: list[Buffer]) -> Value:
        call = _Call.of(buffers)
        return call.lens.sizes[0] * call.joint.sizes[1]

    def clear(function: Function, buffers: list[Buffer]) -> None:
        call = _Call.of(buffers)
        clear_padding(shape.kind, function, call.lens, call.out)

    def item(function: Function, buffers: list[Buffer], index: Value) -> None:
        call = _Call.of(buffers)
        piece = index // call.joint.sizes[1]
        run = _Piece(shape, function, call, piece, index - piece * call.joint.sizes[1])
        with function.when(function.constant(0) < run.length):
            run.emit()

    emit_handler(module, Kernel(name, ranks, 3, num_items, item, clear))


def clear_padding(kind: str, function: Function, lens: Buffer, out: Buffer) -> None:
    """Zeros for the tokens in no piece, which come last."""
    total = Variable(function, function.constant(0))
    with function.loop(lens.sizes[0]) as piece:
        total.set(total.get() + integer(function, lens, piece))
    width = out.sizes[1] * out.sizes[2]
    with function.loop(out.sizes[0] * width, start=total.get() * width, step=LANES) as at:
        function.store_as(kind, function.zeros(), out.data, at * ITEM_BYTES[kind])


def integer(function: Function, buffer: Buffer, index: Value) -> Value:
    """A field of a piece."""
    return function.widened(function.load(INT32, buffer.data, index * 4))


def bring_states(
    function: Function, num_bytes: int, source: Value, target: Value, is_there: Value, is_fresh: Value
) -> None:
    """Zeros at the beginning of a sequence, else the states of the source, unless they are there."""
    is_moved = function.chosen(is_there, function.constant(0), function.constant(1))
    end = function.chosen(is_fresh, function.constant(num_bytes), is_moved * num_bytes)
    with function.loop(end, step=4 * LANES) as at:
        numbers = load_panel(function, source, at)
        function.store(function.chosen(is_fresh, function.zeros(), numbers), target, at)


def product(function: Function, numbers: list[Value], others: list[Value]) -> Value:
    """The sum of the products of two rows."""
    total = function.zeros()
    for x, y in zip(numbers, others, strict=True):
        total = function.fused(x, y, total)
    return function.total(total)


class _Piece:
    """Code that computes one piece in one key head."""

    def __init__(self, shape: _Shape, function: Function, call: _Call, piece: Value, head: Value):
        self._shape, self._function, self._call, self._head = shape, function, call, head
        numbers = (integer(function, field, piece) for field in call.pieces)
        self._start, self.length, self._source, self._target, self._position, self._is_known = numbers
        self._heads = call.joint.sizes[1]
        self._mixed = function.buffer(4 * shape.mixed)
        self._made = function.buffer(4 * shape.values)
        self._of_keys = function.buffer(4 * shape.keys)

    def emit(self) -> None:
        """Emits the computation. States change in their target, after they were brought there."""
        function, shape = self._function, self._shape
        self._bring_states()
        with function.loop(self.length) as offset:
            token = self._start + offset
            self._convolve(token, offset)
            query, key = (self._unit(part, scale) for part, scale in ((0, shape.keys**-0.5), (1, 1.0)))
            is_known = function.both(offset.equals(0), self._is_known.equals(1))
            with function.loop(shape.group) as member:
                self._pass_over(token, member, query, key, is_known)
                self._write_output(token, member)
        self._keep_inputs()

    def _bring_states(self) -> None:
        """The states of all heads of this key head."""
        function, num_bytes = self._function, self._shape.group * self._shape.keys * self._shape.values * 4
        states = self._call.states.data
        source, target = (
            function.address(states, (slot * self._heads + self._head) * num_bytes)
            for slot in (self._source, self._target)
        )
        is_fresh = function.both(self._position.equals(0), self._is_known.equals(0))
        bring_states(function, num_bytes, source, target, self._source.equals(self._target), is_fresh)

    def _convolve(self, token: Value, offset: Value) -> None:
        """The convolution and SiLU of one token, from the oldest tap on."""
        function, shape, size = self._function, self._shape, self._shape.item_bytes
        position, places = self._position + offset, []
        for back in range(shape.taps - 1, -1, -1):
            here = self._joint_at(token - back)
            kept = self._input_at(self._call.inputs, self._source, self._column(position + (shape.taps - back)))
            is_there = Value(function, function.builder.icmp_signed("<=", function.constant(back).ir, position.ir))
            place = function.chosen(offset < back, kept, here)
            places.append((place, is_there, self._channels(self._call.taps, function.constant(shape.taps - 1 - back))))
        with function.loop(shape.mixed, step=LANES) as channel:
            total = function.zeros()
            for place, is_there, taps in places:
                x = function.floats(shape.kind, place, channel * size)
                tap = function.floats(shape.kind, taps, channel * size)
                total = function.fused(function.chosen(is_there, x, function.zeros()), tap, total)
            function.store(total * sigmoid(function, total), self._mixed, channel * 4)

    def _joint_at(self, token: Value) -> Value:
        """Where the numbers of a token are in this head."""
        offset = (token * self._heads + self._head) * (self._shape.joint * self._shape.item_bytes)
        return self._function.address(self._call.joint.data, offset)

    def _column(self, position: Value) -> Value:
        """The column of a position that is not negative."""
        return position - position // self._shape.taps * self._shape.taps

    def _input_at(self, inputs: Buffer, slot: Value, column: Value) -> Value:
        """Where a column of a slot is in this head."""
        return self._channels(inputs, slot * self._shape.taps + column)

    def _channels(self, buffer: Buffer, row: Value) -> Value:
        """Where the channels of this head are in a row of an array of rows of all heads."""
        offset = (row * self._heads + self._head) * (self._shape.mixed * self._shape.item_bytes)
        return self._function.address(buffer.data, offset)

    def _unit(self, part: int, scale: float) -> list[Value]:
        """The query or the key, of this length."""
        function, first = self._function, part * self._shape.keys
        vectors = [load_panel(function, self._mixed, (first + i) * 4) for i in range(0, self._shape.keys, LANES)]
        squares = function.zeros()
        for numbers in vectors:
            squares = function.fused(numbers, numbers, squares)
        root = function.intrinsic("llvm.sqrt.f32", function.total(squares) + UNIT_EPS)
        factor = function.spread(function.like(root, scale) / root)
        return [numbers * factor for numbers in vectors]

    def _pass_over(self, token: Value, member: Value, query: list[Value], key: list[Value], is_known: Value) -> None:
        """One token in the state of one value head: a row is decayed, corrected, and multiplied with the query."""
        function, shape, call = self._function, self._shape, self._call
        head = self._head * shape.group + member
        at = (token * call.decay.sizes[1] + head) * 4
        strength, decays = load_number(function, call.strength.data, at), self._decays(at, is_known)
        strength = function.chosen(is_known, function.like(strength, 0.0), strength)
        values = function.address(self._mixed, (member * shape.values + 2 * shape.keys) * 4)
        place = (self._target * call.states.sizes[1] + head) * (shape.values * shape.keys * 4)
        state = function.address(call.states.data, place)
        with function.loop(shape.values) as row:
            line = function.address(state, row * (shape.keys * 4))
            numbers = [load_panel(function, line, 4 * i) * decays(4 * i) for i in range(0, shape.keys, LANES)]
            seen = product(function, numbers, key)
            difference = function.spread((load_number(function, values, row * 4) - seen) * strength)
            numbers = [function.fused(difference, k, x) for k, x in zip(key, numbers, strict=True)]
            for i, x in enumerate(numbers):
                function.store(x, line, i * LANES * 4)
            function.store(product(function, numbers, query), self._made, row * 4)

    def _decays(self, at: Value, is_known: Value) -> Callable[[int], Value]:
        """What multiplies a row of the state, at an offset."""
        function, shape, data = self._function, self._shape, self._call.decay.data
        if not shape.is_apart:
            decay = load_number(function, data, at)
            decays = function.spread(function.chosen(is_known, function.like(decay, 1.0), decay))
            return lambda _: decays
        for i in range(0, 4 * shape.keys, 4 * LANES):
            decays = load_panel(function, data, at * shape.keys + i)
            function.store(function.chosen(is_known, function.like(decays, 1.0), decays), self._of_keys, i)
        return lambda i: load_panel(function, self._of_keys, i)

    def _write_output(self, token: Value, member: Value) -> None:
        """The output of one head, normed, then multiplied by its gate."""
        function, shape, call = self._function, self._shape, self._call
        squares = function.zeros()
        for i in range(0, shape.values, LANES):
            x = load_panel(function, self._made, 4 * i)
            squares = function.fused(x, x, squares)
        mean = function.total(squares) / float(shape.values)
        root = function.intrinsic("llvm.sqrt.f32", mean + load_number(function, call.eps.data, 0))
        factor = function.spread(function.like(root, 1.0) / root)
        width = shape.group * shape.values
        rows = width if shape.is_apart else shape.joint  # numbers of a key head, of which the gates are the last
        gates = (token * self._heads + self._head) * rows + member * shape.values + (rows - width)
        gates = function.address(call.gates.data, gates * shape.item_bytes)
        head = self._head * shape.group + member
        out = (token * call.decay.sizes[1] + head) * (shape.values * shape.item_bytes)
        for i in range(0, shape.values, LANES):
            gate = function.floats(shape.kind, gates, i * shape.item_bytes)
            x = load_panel(function, self._made, 4 * i) * factor * load_panel(function, call.norm.data, 4 * i)
            x = x * sigmoid(function, gate) if shape.is_apart else x * gate * sigmoid(function, gate)
            function.store_as(shape.kind, x, call.out.data, out + i * shape.item_bytes)

    def _keep_inputs(self) -> None:
        """The last inputs of the convolution in the target: those of this piece, and before it those of the source."""
        function, shape, size = self._function, self._shape, self._shape.item_bytes
        end, taps = self._position + self.length, shape.taps
        for back in range(1, taps + 1):
            column = self._column(end + (taps - back))
            kept = self._input_at(self._call.inputs, self._source, column)
            here = self._joint_at(self._start + self.length - back)
            place = function.chosen(self.length < back, kept, here)
            is_there = Value(function, function.builder.icmp_signed("<=", function.constant(back).ir, end.ir))
            target = self._input_at(self._call.inputs, self._target, column)
            with function.loop(shape.mixed, step=LANES) as channel:
                x = function.floats(shape.kind, place, channel * size)
                function.store_as(shape.kind, function.chosen(is_there, x, function.zeros()), target, channel * size)
