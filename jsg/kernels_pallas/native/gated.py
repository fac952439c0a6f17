"""activation(gate) · up on a CPU, in one pass over both and rounded once. Arithmetic is float32."""

import functools
import math

import jax
from jaxtyping import Array, Float
from llvmlite import ir

from jsg.kernels_pallas.activation import Activation, ClampedGate
from jsg.kernels_pallas.native.calls import Buffer, Kernel, emit_handler
from jsg.kernels_pallas.native.emit import LANES, Function, Value
from jsg.kernels_pallas.native.library import registered
from jsg.kernels_pallas.native.tiles import ITEM_BYTES

ROWS = 4
"""Rows of an item: enough that a thread seldom asks for work, and few, so that a step of eight rows has two threads."""
KINDS = ("float32", "bfloat16")
GELU_SLOPE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715
"""GELU(x) = x · (1 + tanh(slope · (x + cube · x³))) / 2."""


def gated(gate_up: Float[Array, "T 2 F"], activation: Activation) -> Float[Array, "T F"]:
    """See `ops.gated`.

    Raises:
        NotImplementedError: Rows are not a multiple of `LANES` numbers, or of another type.
    """
    kind, (count, _, width) = str(gate_up.dtype), gate_up.shape
    if kind not in KINDS or width % LANES:
        raise NotImplementedError(f"the CPU's kernel takes rows of a multiple of {LANES} numbers, float32 or bfloat16")
    is_clamped = isinstance(activation, ClampedGate)
    named = f"clamped_{activation.limit}_{activation.slope}" if is_clamped else activation
    name = registered(f"jsg_gated_{named}_{kind}", functools.partial(_emit, activation, kind))
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((count, width), gate_up.dtype))(gate_up)


def _emit(activation: Activation, kind: str, module: ir.Module, name: str) -> None:
    def num_items(_: Function, buffers: list[Buffer]) -> Value:
        return (buffers[0].sizes[0] + (ROWS - 1)) // ROWS

    emit_handler(module, Kernel(name, (3, 2), 1, num_items, functools.partial(_emit_rows, activation, kind)))


def _emit_rows(activation: Activation, kind: str, function: Function, buffers: list[Buffer], index: Value) -> None:
    gate_up, out = buffers
    (count, width), item_bytes = out.sizes, ITEM_BYTES[kind]
    first = index * ROWS
    with function.loop(function.smaller(first + ROWS, count), start=first) as row:
        start = row * width * item_bytes
        gates, ups = (function.address(gate_up.data, start * 2 + width * (half * item_bytes)) for half in (0, 1))
        with function.loop(width, step=LANES) as at:
            gate, up = (function.floats(kind, half, at * item_bytes) for half in (gates, ups))
            if isinstance(activation, ClampedGate):
                gate, up = _at_most(function, gate, activation.limit), _clamped(function, up, activation.limit) + 1.0
                share = sigmoid(function, gate * activation.slope)
            else:
                share = sigmoid(function, gate if activation == "silu" else _gelu_curve(gate))
            function.store_as(kind, gate * share * up, out.data, start + at * item_bytes)


def _at_most(function: Function, x: Value, limit: float) -> Value:
    """The smaller of both. NaN stays NaN."""
    return function.chosen(function.like(x, limit) < x, function.like(x, limit), x)


def _clamped(function: Function, x: Value, limit: float) -> Value:
    return _at_most(function, function.chosen(x < -limit, function.like(x, -limit), x), limit)


def sigmoid(function: Function, x: Value) -> Value:
    """1 / (1 + exp(-x)) of a vector. NaN stays NaN."""
    is_negative = x < 0.0
    decay = function.exp(function.chosen(is_negative, x, function.zeros() - x))  # it takes no more than 0
    return function.chosen(is_negative, decay, function.like(decay, 1.0)) / (decay + 1.0)


def _gelu_curve(x: Value) -> Value:
    """Of this the sigmoid is what GELU multiplies by: (1 + tanh(y)) / 2 = sigmoid(2 y)."""
    return (x * x * GELU_CUBE + 1.0) * x * (2 * GELU_SLOPE)
