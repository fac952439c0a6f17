"""Products of a few or many rows with a kernel that lies in panels, on a CPU. Letters: `jsg/models/inputs.py`.

A tile reads its panels from front to back. So each step reads a kernel once, as fast as memory gives it and in the type
in which it is stored. Sums are float32. Rows in bfloat16 are multiplied by the matrix unit or as pairs, where the
processor can do that: see `amx_matmul.py` and `pairs_matmul.py`.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from llvmlite import ir

from jsg.kernels_pallas.inputs import SCALE_GROUP, Panels
from jsg.kernels_pallas.native import amx_matmul, pairs_matmul
from jsg.kernels_pallas.native.calls import Buffer, Kernel, emit_handler
from jsg.kernels_pallas.native.emit import LANES, Function, Value, Variable
from jsg.kernels_pallas.native.library import registered
from jsg.kernels_pallas.native.tiles import (
    Panel,
    Types,
    emit_product,
    emit_results,
    emit_sums,
    load_number,
)

ITEM_PANELS = 12
"""Panels of an item: enough that a thread seldom asks for work, few enough that threads end together."""


EmitItem = Callable[[Types, Function, list[Buffer], Value, Value], None]
"""Emits all rows times some panels, given the buffers, the first panel and the number of panels."""


def matmul(x: Float[Array, "T D"], kernel: Panels, result: jax.typing.DTypeLike = jnp.float32) -> Float[Array, "T F"]:
    """See `ops.matmul`."""
    values, scale = kernel
    kind, variant, emit_item = str(values.dtype), "plain", _emit_item
    if x.dtype == jnp.bfloat16 and amx_matmul.can_multiply(x.shape[1], kind):
        variant, emit_item = (
            ("few", amx_matmul.emit_item_of_few) if len(x) <= amx_matmul.MAX_FEW else ("amx", amx_matmul.emit_item)
        )
    elif x.dtype == jnp.bfloat16 and pairs_matmul.can_multiply(x.shape[1], kind):
        variant, emit_item = "pairs", pairs_matmul.emit_item
    types = Types(kind, "bfloat16" if result == jnp.bfloat16 else "float32")
    name = registered(f"jsg_matmul_{variant}_{kind}_{types.result}", functools.partial(_emit, types, emit_item))
    shape = jax.ShapeDtypeStruct((len(x), values.shape[0] * LANES), types.result)
    factors = () if scale is None else (scale,)
    rows = x if variant in ("amx", "pairs") else x.astype(jnp.float32)
    return jax.ffi.ffi_call(name, shape)(rows, values, *factors).astype(result)


def _emit(types: Types, emit_item: EmitItem, module: ir.Module, name: str) -> None:
    ranks = (2, 4, 4, 2) if types.has_scale else (2, 4, 2)
    emit_handler(module, Kernel(name, ranks, 1, _num_items, functools.partial(_emit_part, types, emit_item)))


def _num_items(function: Function, buffers: list[Buffer]) -> Value:
    return (buffers[1].sizes[0] + (ITEM_PANELS - 1)) // ITEM_PANELS


def _emit_part(types: Types, emit_item: EmitItem, function: Function, buffers: list[Buffer], index: Value) -> None:
    """All rows times `ITEM_PANELS` panels."""
    first = index * ITEM_PANELS
    width = function.smaller(buffers[1].sizes[0] - first, function.constant(ITEM_PANELS))
    emit_item(types, function, buffers, first, width)


def _emit_group_sums(
    function: Function,
    types: Types,
    depth: Value,
    zeros: list[list[Value]],
    number: Callable[[Value, int], Value],
    read: list[Panel],
) -> list[list[Value]]:
    """The sums for kernels in 4 bits: each group's own sum is multiplied with its scale and added.

    So an input costs no multiplication with its scale, and the sums of a group have the registers for themselves.
    """
    totals = [[Variable(function, start) for start in row] for row in zeros]
    with function.loop(depth, step=SCALE_GROUP) as group:

        def vectors(k: Value, p: int) -> Iterable[Value]:
            return read[p].inputs(function, types, group + k, types.together)

        def own_number(k: Value, r: int) -> Value:
            return number(group + k, r)

        sums = emit_sums(function, SCALE_GROUP, zeros, own_number, vectors, types.together)
        for p, panel in enumerate(read):
            factor = panel.group_factor(function, group)
            for row, own in zip(totals, sums, strict=True):
                row[p].set(function.fused(own[p], factor, row[p].get()))
    return [[total.get() for total in row] for row in totals]


def _emit_item(types: Types, function: Function, buffers: list[Buffer], first: Value, width: Value) -> None:
    """All rows times `width` panels from the first one on, by fused multiplications and additions."""
    x = buffers[0]
    depth = x.sizes[1]
    row_bytes = depth * 4

    def tile(row: Value, rows: int, panel: Value, panels: int) -> None:
        at = [function.address(x.data, (row + r) * row_bytes) for r in range(rows)]
        column = first + panel
        read = [Panel.at(function, types, buffers, column + p) for p in range(panels)]

        def vectors(k: Value, p: int) -> Iterable[Value]:
            return read[p].inputs(function, types, k, types.together)

        def number(k: Value, r: int) -> Value:
            return load_number(function, at[r], k * 4)

        zeros = [[function.zeros()] * panels] * rows
        if types.kernel == "uint8":
            sums = _emit_group_sums(function, types, depth, zeros, number, read)
        else:
            sums = emit_sums(function, depth, zeros, number, vectors, types.together)
        emit_results(function, types, buffers, read, sums, row, column)

    emit_product(function, x.sizes[0], width, tile)
