"""Lays out the kernels of a model in few bits for a TPU. See `vmem_matmul`."""

import jax
from flax import nnx

from jsg.engine.device.fp8_kernels import moved
from jsg.kernels_pallas.few_bits import Quantised


def lay_out(model: nnx.Module) -> None:
    """Moves the inputs of kernels, or of abstract ones, to the last axis but one, one kernel after another.

    There a block of inputs and columns is tiles of the memory. Otherwise XLA would copy the kernel in every step.
    """
    for _, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param):
            value = param.get_value()
            if isinstance(value, Quantised) and not value.form.scales_columns and value.axis < len(value.shape) - 2:
                axis = value.axis
                param.set_value(jax.tree.map(lambda x, axis=axis: x if x.ndim == 1 else moved(x, axis, -2), value))
