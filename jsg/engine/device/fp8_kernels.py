"""Lays out the kernels of a model for products of e4m3 with e4m3. See `Fp8Kernel`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jsg.config import EngineConfig
from jsg.engine.device.devices import Device, multiplies_e4m3
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import Form
from jsg.kernels_pallas.inputs import Fp8Kernel
from jsg.models.quantise import FORMS
from jsg.models.spec import ModelSpec

TOGETHER = 16
"""Tensor cores take so many inputs of a row, or of a group of it, or a multiple."""


def takes(form: Form) -> bool:
    """Whether rows can be rounded for products with kernels of this form."""
    is_alone = not (form.has_zero or form.has_order)
    return form.numbers == "e4m3" and is_alone and (form.group or TOGETHER) % TOGETHER == 0


def forms_of(config: EngineConfig, model: ModelSpec) -> list[Form]:
    """The forms in which kernels of a model are in few bits, by `--quantization` or in its checkpoint."""
    given = FORMS.get(config.quantization)
    return [each.form for each in model.names.kept.values()] if given is None else [given]


def rounds_rows(device: Device, config: EngineConfig, model: ModelSpec) -> bool:
    """Whether there are products whose rows are rounded to e4m3."""
    return multiplies_e4m3(device, config.fp8_products) and any(map(takes, forms_of(config, model)))


def lay_out(model: nnx.Module) -> None:
    """Changes the kernels of a model, or of an abstract model, that such products take, one after another.

    Their numbers are moved on the devices that hold them.
    """
    for _, param in nnx.iter_graph(model):
        if isinstance(param, nnx.Param):
            value = param.get_value()
            if isinstance(value, Quantised) and takes(value.form) and value.shape[value.axis] % TOGETHER == 0:
                param.set_value(_laid_out(value))


def _laid_out(kernel: Quantised) -> Fp8Kernel:
    if isinstance(kernel.scale, jax.ShapeDtypeStruct):
        scale = jax.ShapeDtypeStruct(kernel.scale.shape, jnp.float32, sharding=kernel.scale.sharding)
    else:
        scale = kernel.wide_scale
    return Fp8Kernel(moved(kernel.values, kernel.axis, -1), scale)


def moved(x: Any, axis: int, place: int) -> Any:
    """An array, or the shape of one, with this axis in another place, and shared out among devices as it was."""
    order = [i for i in range(x.ndim) if i != axis]
    order.insert(place % x.ndim, axis)
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        spec = (*sharding.spec, *[None] * (x.ndim - len(sharding.spec)))
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*(spec[i] for i in order)))
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(tuple(x.shape[i] for i in order), x.dtype, sharding=sharding)
    return jax.device_put(jnp.transpose(x, order), sharding)
