"""Products of a few or many rows with a kernel that lies in panels, on a CPU. Letters: `jsg/models/inputs.py`.

A tile reads its panels from front to back. So each step reads a kernel once, as fast as memory gives it and in the type
in which it is stored. Sums are float32. Rows in bfloat16 are multiplied by the matrix unit, where the processor has
one: see `amx.py`.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from jsg.kernels_pallas.inputs import INPUTS_TOGETHER, Panels
from jsg.kernels_pallas.native import amx
from jsg.kernels_pallas.native.calls import Buffer, Kernel, emit_handler
from jsg.kernels_pallas.native.emit import LANES, Function, Value
from jsg.kernels_pallas.native.library import registered
from jsg.kernels_pallas.native.tiles import ITEM_BYTES, PANEL_BYTES, emit_product, emit_sums, load_number

ITEM_PANELS = 12
"""Panels of an item: enough that a thread seldom asks for work, few enough that threads end together."""


def matmul(x: Float[Array, "T D"], kernel: Panels) -> Float[Array, "T F"]:
    """See `ops.matmul`."""
    values, scale = kernel
    kind = str(values.dtype)
    variant, emit_item = "", _emit_item
    if x.dtype == jnp.bfloat16 and amx.can_multiply(x.shape[1], kind):
        variant, emit_item = ("few_", amx.emit_item_of_few) if len(x) <= amx.MAX_FEW else ("amx_", amx.emit_item)
    name = registered(f"jsg_matmul_{variant}{kind}", functools.partial(_emit, kind, emit_item))
    result = jax.ShapeDtypeStruct((len(x), values.shape[0] * LANES), jnp.float32)
    factors = () if scale is None else (scale,)
    return jax.ffi.ffi_call(name, result)(x if variant == "amx_" else x.astype(jnp.float32), values, *factors)


def _emit(kind: str, emit_item: amx.EmitItem, module: ir.Module, name: str) -> None:
    ranks = (2, 4, 1, 2) if kind == "int8" else (2, 4, 2)
    emit_handler(module, Kernel(name, ranks, 1, _num_items, functools.partial(_emit_part, kind, emit_item)))


def _num_items(function: Function, buffers: list[Buffer]) -> Value:
    return (buffers[1].sizes[0] + (ITEM_PANELS - 1)) // ITEM_PANELS


def _emit_part(kind: str, emit_item: amx.EmitItem, function: Function, buffers: list[Buffer], index: Value) -> None:
    """All rows times `ITEM_PANELS` panels."""
    first = index * ITEM_PANELS
    width = function.smaller(buffers[1].sizes[0] - first, function.constant(ITEM_PANELS))
    emit_item(kind, function, buffers, first, width)


def _emit_item(kind: str, function: Function, buffers: list[Buffer], first: Value, width: Value) -> None:
    """All rows times `width` panels from the first one on, by fused multiplications and additions."""
    x, kernel, result = buffers[0], buffers[1], buffers[-1]
    scale = buffers[2] if kind == "int8" else None
    together = INPUTS_TOGETHER[kind]
    lane_bytes = ITEM_BYTES[kind] * LANES
    depth = kernel.sizes[1] * together
    row_bytes, result_bytes = depth * 4, kernel.sizes[0] * PANEL_BYTES
    panel_bytes = depth * lane_bytes

    def tile(row: Value, rows: int, panel: Value, panels: int) -> None:
        at = [function.address(x.data, (row + r) * row_bytes) for r in range(rows)]
        column = first + panel
        weights = [function.address(kernel.data, (column + p) * panel_bytes) for p in range(panels)]

        def vectors(k: Value, p: int) -> tuple[Value, ...]:
            at = k * lane_bytes
            return function.float_pairs(weights[p], at) if together == 2 else (function.floats(kind, weights[p], at),)

        zeros = [[function.zeros()] * panels] * rows
        sums = emit_sums(function, depth, zeros, lambda k, r: load_number(function, at[r], k * 4), vectors, together)
        for p in range(panels):
            offset = (column + p) * PANEL_BYTES
            factor = None if scale is None else function.floats("float32", scale.data, offset)
            for r in range(rows):
                total = sums[r][p] if factor is None else sums[r][p] * factor
                function.store(total, result.data, (row + r) * result_bytes + offset)

    emit_product(function, x.sizes[0], width, tile)
