"""silu(gate) · up on a CPU, in one pass over both and rounded once. Arithmetic is float32."""

import functools

import jax
from jaxtyping import Array, Float
from llvmlite import ir

from jsg.kernels_pallas.native.calls import Buffer, Kernel, emit_handler
from jsg.kernels_pallas.native.emit import LANES, Function, Value
from jsg.kernels_pallas.native.library import registered
from jsg.kernels_pallas.native.tiles import ITEM_BYTES

ROWS = 4
"""Rows of an item: enough that a thread seldom asks for work, and few, so that a step of eight rows has two threads."""
KINDS = ("float32", "bfloat16")


def gated(gate_up: Float[Array, "T 2 F"]) -> Float[Array, "T F"]:
    """See `ops.gated`.

    Raises:
        NotImplementedError: Rows are not a multiple of `LANES` numbers, or of another type.
    """
    kind, (count, _, width) = str(gate_up.dtype), gate_up.shape
    if kind not in KINDS or width % LANES:
        raise NotImplementedError(f"the CPU's kernel takes rows of a multiple of {LANES} numbers, float32 or bfloat16")
    name = registered(f"jsg_gated_{kind}", functools.partial(_emit, kind))
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct((count, width), gate_up.dtype))(gate_up)


def _emit(kind: str, module: ir.Module, name: str) -> None:
    def num_items(_: Function, buffers: list[Buffer]) -> Value:
        return (buffers[0].sizes[0] + (ROWS - 1)) // ROWS

    emit_handler(module, Kernel(name, (3, 2), 1, num_items, functools.partial(_emit_rows, kind)))


def _emit_rows(kind: str, function: Function, buffers: list[Buffer], index: Value) -> None:
    gate_up, out = buffers
    (count, width), item_bytes = out.sizes, ITEM_BYTES[kind]
    first = index * ROWS
    with function.loop(function.smaller(first + ROWS, count), start=first) as row:
        start = row * width * item_bytes
        gates, ups = (function.address(gate_up.data, start * 2 + width * (half * item_bytes)) for half in (0, 1))
        with function.loop(width, step=LANES) as at:
            gate, up = (function.floats(kind, half, at * item_bytes) for half in (gates, ups))
            is_negative = gate < 0.0
            decay = function.exp(function.chosen(is_negative, gate, function.zeros() - gate))  # it takes no more than 0
            share = function.chosen(is_negative, decay, function.like(decay, 1.0)) / (decay + 1.0)
            function.store_as(kind, gate * share * up, out.data, start + at * item_bytes)
