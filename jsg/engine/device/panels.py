"""Lays the kernels of a model out in panels, as the products of a CPU read them. See `Panels`.

A checkpoint has a projection as [out, in] and XLA reads it as [in, out]. Neither is fast for a few rows: in the first
the columns that are summed together lie far apart, in the second a row of the result jumps through all of memory.
"""

from typing import Any

import jax
import numpy as np
from flax import nnx

from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.inputs import PANEL_WIDTH, TOGETHER, Fp8Kernel, Panels
from jsg.models.in_place import empty
from jsg.models.layers import Embedding


def lay_out(model: nnx.Module) -> None:
    """Changes the kernels of a model that one CPU computes, or of an abstract model, one after another.

    Kernels that do not fill panels, or whose type the products cannot read, stay as they are.
    """
    tables = {id(module.table) for _, module in nnx.iter_graph(model) if isinstance(module, Embedding)}
    for _, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param):
            value, is_kernel = param.get_value(), param.get_metadata("is_kernel")
            if isinstance(value, Fp8Kernel):
                continue
            if is_kernel or (isinstance(value, Quantised) and value.axis == 1):
                param.set_value(
                    _laid_out(value, is_table=id(param) in tables, count=1 if is_kernel else len(value.values))
                )


_Kernel = jax.Array | jax.ShapeDtypeStruct | Quantised


def _laid_out(value: _Kernel, *, is_table: bool, count: int = 1) -> _Kernel | Panels:
    """A kernel [D, *out], a table [out, D], or the kernels of several experts [E, D, F], in panels."""
    numbers, form = (value.values, value.form) if isinstance(value, Quantised) else (value, None)
    axis = -1 if is_table else value.axis if isinstance(value, Quantised) else 0
    depth = numbers.shape[axis]
    together = TOGETHER.get(form.numbers if form else str(numbers.dtype))
    if together is None or numbers.size // depth // count % PANEL_WIDTH or depth % together:
        return value
    laid_out = _in_panels(numbers, depth, together, count, is_table=is_table)
    if not isinstance(value, Quantised):
        return Panels(laid_out)
    is_whole = value.form.group is None and value.zero is None
    beside = (None if is_whole else value.scale, value.zero, _of_columns(value, is_whole=is_whole), value.step)
    scale, zero, factor, step = (
        None if each is None else _in_panels(each, each.shape[axis], 1, count, is_table=False) for each in beside
    )
    return Panels(laid_out, form, scale, zero, factor, value.order, step)


def _of_columns(kernel: Quantised, *, is_whole: bool) -> Any:
    """The factors of blocks, or what multiplies the sum of each column, in float32; None for nothing."""
    if not is_whole and (kernel.factor is None or kernel.form.block is not None):
        return kernel.factor
    shape = tuple(1 if axis == kernel.axis else length for axis, length in enumerate(kernel.scale.shape))
    if isinstance(kernel.scale, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, np.float32)
    scale = np.asarray(kernel.scale if is_whole else np.ones(shape), np.float32)
    return scale if kernel.factor is None else scale * np.asarray(kernel.factor)


def _in_panels(numbers: Any, depth: int, together: int, count: int, *, is_table: bool) -> Any:
    """An array, or the shape of one, with `depth` numbers in each column, of which `together` stay side by side.

    With several experts, those of each are side by side.
    """
    shape = (numbers.size // depth // PANEL_WIDTH, depth // together, PANEL_WIDTH, together)
    if isinstance(numbers, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, numbers.dtype)
    laid_out, stored = empty(shape, numbers.dtype), np.asarray(numbers)
    if is_table:
        laid_out[...] = stored.reshape(-1, PANEL_WIDTH, depth // together, together).transpose(0, 2, 1, 3)
    else:
        columns = stored.reshape(count, depth // together, together, -1, PANEL_WIDTH)
        laid_out.reshape(count, -1, *shape[1:])[...] = columns.transpose(0, 3, 1, 4, 2)
    return jax.device_put(laid_out)
