"""Makes a parameter of the tensors of a checkpoint. If devices share it out, each gets its own slice.

Of each tensor only the slice is read that a device holds. The host makes what devices hold (`in_place.py`). On a CPU
that is the parameter's memory; to an accelerator it is sent, one parameter after another. See `Origin`.
"""

import concurrent.futures
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jsg.kernels_pallas.few_bits import Quantised
from jsg.models.in_place import fill
from jsg.models.origin import Origin
from jsg.models.slices import Reader, Span

_Declared = jax.ShapeDtypeStruct | Quantised


def assemble(
    declared: _Declared, origin: Origin, reader: Reader, pool: concurrent.futures.Executor
) -> Array | Quantised:
    """The value of a parameter, on the default device or on the devices that its declaration names.

    Each number is rounded once, to the declared type. A group of devices that has experts of its own reads only their
    tensors.

    Args:
        declared: Shapes, types and shardings of the value.
        origin: The tensors it is made of.
        reader: Reads them.
        pool: Reads pieces at the same time.

    Raises:
        ModelError: A tensor cannot be read, or cannot be quantised.
    """
    leaves, axis, tree = jax.tree.leaves(declared), origin.split_axis, jax.tree.structure(declared)
    sharding, shape = leaves[0].sharding, declared.shape
    if sharding is None:
        (whole,) = fill(declared, origin, reader, pool, [None])
        return tree.unflatten(map(jax.device_put, whole))
    places = sharding.addressable_devices_indices_map(shape)
    groups: dict[Span | None, dict[Any, Span | None]] = {}  # devices, by the experts that they have
    for device, index in places.items():
        spans: list[Span] = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
        experts = None if origin.expert_axis is None else spans[origin.expert_axis]
        own = spans[axis] if axis is not None and spans[axis] != (0, shape[axis]) else None
        groups.setdefault(experts, {})[device] = own
    parts: dict[Any, list[Array]] = {}
    for experts, members in groups.items():
        spans_of_group = list(dict.fromkeys(members.values()))  # several devices may have the same
        made = fill(*_own_experts(declared, origin, experts), reader, pool, spans_of_group)
        arrays: dict[Span | None, list[np.ndarray]] = dict(zip(spans_of_group, made, strict=True))
        for device, span in members.items():
            parts[device] = [jax.device_put(x, device) for x in arrays[span]]
    return tree.unflatten(
        [
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, list(each))
            for leaf, *each in zip(leaves, *(parts[device] for device in places), strict=True)
        ]
    )


def _own_experts(declared: _Declared, origin: Origin, experts: Span | None) -> tuple[_Declared, Origin]:
    """The shape and the origin as if there were only these experts. A parameter without experts stays as it is."""
    axis = origin.expert_axis
    if axis is None or experts is None:
        return declared, origin
    first, last = experts

    def own(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:axis], last - first, *x.shape[axis + 1 :]), x.dtype)

    return jax.tree.map(own, declared), origin._replace(sources=origin.sources[first:last])
