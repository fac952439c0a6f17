"""Products of a few or many rows with a kernel that lies in panels, on a CPU. Letters: `jsg/models/inputs.py`.

A tile reads its panels from front to back. So each step reads a kernel once, as fast as memory gives it and in the type
in which it is stored. Sums are float32.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from jsg.kernels_pallas.inputs import Panels
from jsg.kernels_pallas.native.calls import Buffer, Kernel, emit_handler
from jsg.kernels_pallas.native.emit import LANES, Function, Value
from jsg.kernels_pallas.native.library import registered
from jsg.kernels_pallas.native.tiles import PANEL_BYTES, emit_product, emit_sums, load_number, load_panel

ITEM_PANELS = 12
"""Panels of an item: enough that a thread seldom asks for work, few enough that threads end together."""


def matmul(x: Float[Array, "T D"], kernel: Panels) -> Float[Array, "T F"]:
    """See `ops.matmul`."""
    values, scale = kernel
    kind = str(values.dtype)
    name = registered(f"jsg_matmul_{kind}", functools.partial(_emit, kind))
    result = jax.ShapeDtypeStruct((len(x), values.shape[0] * LANES), jnp.float32)
    factors = () if scale is None else (scale,)
    return jax.ffi.ffi_call(name, result)(x.astype(jnp.float32), values, *factors)


def _emit(kind: str, module: ir.Module, name: str) -> None:
    has_scale = kind == "int8"
    ranks = (2, 3, 1, 2) if has_scale else (2, 3, 2)
    emit_handler(module, Kernel(name, ranks, 1, _num_items, functools.partial(_emit_item, kind)))


def _num_items(function: Function, buffers: list[Buffer]) -> Value:
    return (buffers[1].sizes[0] + (ITEM_PANELS - 1)) // ITEM_PANELS


def _emit_item(kind: str, function: Function, buffers: list[Buffer], index: Value) -> None:
    """All rows times `ITEM_PANELS` panels."""
    x, kernel, result = buffers[0], buffers[1], buffers[-1]
    scale = buffers[2] if kind == "int8" else None
    depth, num_panels = kernel.sizes[1], kernel.sizes[0]
    lane_bytes = {"float32": 4, "bfloat16": 2, "int8": 1}[kind] * LANES
    first = index * ITEM_PANELS
    left = num_panels - first
    row_bytes, result_bytes = depth * 4, num_panels * PANEL_BYTES
    panel_bytes = depth * lane_bytes

    def tile(row: Value, rows: int, panel: Value, panels: int) -> None:
        at = [function.address(x.data, (row + r) * row_bytes) for r in range(rows)]
        column = first + panel
        weights = [function.address(kernel.data, (column + p) * panel_bytes) for p in range(panels)]
        sums = emit_sums(
            function,
            depth,
            [[function.zeros()] * panels] * rows,
            lambda k, r: load_number(function, at[r], k * 4),
            lambda k, p: function.floats(kind, weights[p], k * lane_bytes),
        )
        for p in range(panels):
            offset = (column + p) * PANEL_BYTES
            factor = None if scale is None else load_panel(function, scale.data, offset)
            for r in range(rows):
                total = sums[r][p] if factor is None else sums[r][p] * factor
                function.store(total, result.data, (row + r) * result_bytes + offset)

    width = function.smaller(left, function.constant(ITEM_PANELS))
    emit_product(function, x.sizes[0], width, tile)
