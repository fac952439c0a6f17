"""Products of a few or many rows with a kernel that lies in panels, on a CPU. Letters: `jsg/models/inputs.py`.

A tile reads its panels from front to back. So each step reads a kernel once, as fast as memory gives it and in the type
in which it is stored. Sums are float32. Rows in bfloat16 are multiplied by the matrix unit or as pairs, where the
processor can do that: see `amx_matmul.py` and `pairs_matmul.py`.
"""

import functools
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from llvmlite import ir

from jsg.kernels_pallas.inputs import Panels
from jsg.kernels_pallas.native import amx_matmul, pairs_matmul
from jsg.kernels_pallas.native.calls import Buffer, Kernel, emit_handler
from jsg.kernels_pallas.native.emit import INT32, LANES, Function, Value
from jsg.kernels_pallas.native.library import registered
from jsg.kernels_pallas.native.tiles import (
    Panel,
    Types,
    emit_group_sums,
    emit_product,
    emit_results,
    emit_sums,
    load_number,
)

ITEM_PANELS = 12
"""Panels of an item: enough that a thread seldom asks for work, few enough that threads end together."""
SHORT_NAMES = {"float8_e4m3fn": "e4m3", "float8_e8m0fnu": "e8m0"}
"""Types of scales in 8 bits, as `Function.floats` names them."""

EmitItem = Callable[[Types, Function, list[Buffer], Value, Value], None]
"""Emits all rows times some panels, given the buffers, the first panel and the number of panels."""


def matmul(
    x: Float[Array, "T D"],
    kernel: Panels,
    result: jax.typing.DTypeLike = jnp.float32,
    sizes: Int[Array, " E"] | None = None,
) -> Float[Array, "T F"]:
    """See `ops.matmul`."""
    types, variant, emit_item = types_of(kernel, result), "plain", _emit_item
    if x.dtype == jnp.bfloat16 and amx_matmul.can_multiply(x.shape[1], types):
        variant, emit_item = (
            ("few", amx_matmul.emit_item_of_few) if len(x) <= amx_matmul.MAX_FEW else ("amx", amx_matmul.emit_item)
        )
    elif x.dtype == jnp.bfloat16 and pairs_matmul.can_multiply(x.shape[1], types):
        variant, emit_item = "pairs", pairs_matmul.emit_item
    name, count, starts = f"jsg_matmul_{variant}_{types.name}", 1, None
    if sizes is not None:
        name, count = name.replace("matmul", "experts"), len(sizes)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(sizes, dtype=jnp.int32)])
    name = registered(name, functools.partial(_emit, types, emit_item, of_experts=sizes is not None))
    shape = jax.ShapeDtypeStruct((len(x), kernel.values.shape[0] // count * LANES), types.result)
    x = x if kernel.order is None else x[:, kernel.order]
    rows = x if variant in ("amx", "pairs") else x.astype(jnp.float32)
    zero = () if kernel.scale is None or kernel.zero is None else (kernel.zero, -_group_sums(x, kernel.scale.shape[1]))
    arguments = [starts, rows, kernel.values, kernel.scale, *zero, kernel.factor, kernel.step]
    return jax.ffi.ffi_call(name, shape)(*(each for each in arguments if each is not None)).astype(result)


def types_of(kernel: Panels, result: jax.typing.DTypeLike) -> Types:
    """The types of a product with a kernel."""
    form, scale, group, block = kernel.form, None, None, None
    if form is not None and kernel.scale is not None:
        scale, group = SHORT_NAMES.get(form.scale, form.scale), form.group
        block = None if form.block is None else form.block // (group or 1)
    return Types(
        kernel.kind,
        "bfloat16" if result == jnp.bfloat16 else "float32",
        group,
        scale,
        kernel.zero is not None,
        kernel.factor is not None,
        kernel.step is not None,
        block,
        form is not None and form.is_exact,
    )


def _group_sums(x: Float[Array, "T D"], groups: int) -> Float[Array, "T groups"]:
    """The sum of each group of a row, by halves: in an order that does not depend on the number of rows."""
    sums = x.astype(jnp.float32).reshape(len(x), groups, -1)
    while sums.shape[-1] % 2 == 0:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return functools.reduce(jnp.add, (sums[..., i] for i in range(sums.shape[-1])))


def _emit(types: Types, emit_item: EmitItem, module: ir.Module, name: str, *, of_experts: bool) -> None:
    ranks, num_items, part = types.ranks, _num_items, _emit_part
    if of_experts:
        ranks, num_items, part = [1, *ranks], _num_items_of_experts, _emit_part_of_expert
    emit_handler(module, Kernel(name, ranks, 1, num_items, functools.partial(part, types, emit_item)))


def _num_items(function: Function, buffers: list[Buffer]) -> Value:
    return (buffers[1].sizes[0] + (ITEM_PANELS - 1)) // ITEM_PANELS


def _num_items_of_experts(function: Function, buffers: list[Buffer]) -> Value:
    count = buffers[0].sizes[0] - 1
    return (buffers[2].sizes[0] // count + (ITEM_PANELS - 1)) // ITEM_PANELS * count


def _emit_part_of_expert(
    types: Types, emit_item: EmitItem, function: Function, buffers: list[Buffer], index: Value
) -> None:
    """The rows of an expert times some of its panels, which lie behind those of the experts before it."""
    starts, x, values, *beside, result = buffers
    panels = values.sizes[0] // (starts.sizes[0] - 1)
    items = (panels + (ITEM_PANELS - 1)) // ITEM_PANELS
    expert = index // items
    first = (index - expert * items) * ITEM_PANELS
    start, end = (function.widened(function.load(INT32, starts.data, expert * 4 + 4 * i)) for i in range(2))
    row_bytes = x.sizes[1] * (4 if emit_item in (_emit_item, amx_matmul.emit_item_of_few) else 2)
    x = Buffer(function.address(x.data, start * row_bytes), [end - start, x.sizes[1]])
    if types.has_zero:
        beside[2] = Buffer(function.address(beside[2].data, start * beside[2].sizes[1] * 4), beside[2].sizes)
    # Columns are counted from the first expert's on.
    result = Buffer(function.address(result.data, (start - expert) * panels * types.result_bytes), result.sizes)
    with function.when(start < end):
        own = [x, Buffer(values.data, [panels, *values.sizes[1:]]), *beside, result]
        width = function.smaller(panels - first, function.constant(ITEM_PANELS))
        emit_item(types, function, own, expert * panels + first, width)


def _emit_part(types: Types, emit_item: EmitItem, function: Function, buffers: list[Buffer], index: Value) -> None:
    """All rows times `ITEM_PANELS` panels."""
    first = index * ITEM_PANELS
    width = function.smaller(buffers[1].sizes[0] - first, function.constant(ITEM_PANELS))
    emit_item(types, function, buffers, first, width)


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

        if types.scale is not None:
            sums = emit_group_sums(function, types, buffers, read, row, rows, number, vectors, types.together)
        else:
            zeros = [[function.zeros()] * panels] * rows
            sums = emit_sums(function, depth, zeros, number, vectors, types.together)
        emit_results(function, types, buffers, read, sums, row, column)

    emit_product(function, x.sizes[0], width, tile)
