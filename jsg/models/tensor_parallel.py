"""One model on several devices. Each holds a slice of the kernels, and their results are added up.

Shoeybi et al. 2019 (arXiv:1909.08053). A step runs under `shard_map` on a mesh of the axes `AXES`, and every device
runs the same program on its slices. Heads and feed-forward columns are split, so a layer has two sums over all devices,
one after each of its two blocks. The embedding, split by rows of its table, has one sum, and logits are split by
columns. All else, such as the residual stream, is the same on every device.

Only experts use the two axes separately. Along `EXPERT_AXIS` are groups of devices, each of which has experts of its
own (Lepikhin et al. 2020, arXiv:2006.16668, but without the exchange of tokens, because every device has all tokens).
Along `TENSOR_AXIS` are the devices of a group, which share the columns of each of its experts:

    4 devices in 2 groups, 8 experts        tensor 0               tensor 1
                                expert 0    0: experts 0 to 3,     1: experts 0 to 3,
                                               left columns           right columns
                                expert 1    2: experts 4 to 7, …   3: experts 4 to 7, …

All else is shared out over both axes as if they were one, device after device.

Outside such a mesh the functions here do nothing, so models are written once.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

EXPERT_AXIS = "expert"
TENSOR_AXIS = "tensor"
AXES = (EXPERT_AXIS, TENSOR_AXIS)
AnyMesh = Mesh | AbstractMesh
"""A mesh of devices that are here, or of any."""


def num_parts() -> int:
    """The number of devices that run the program that is being traced."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in AXES)


def num_groups() -> int:
    """The number of groups of devices that have experts of their own."""
    return jax.sharding.get_abstract_mesh().shape.get(EXPERT_AXIS, 1)


def add_up(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """The sum over all devices, on all devices."""
    return lax.psum(x, AXES) if num_parts() > 1 else x


def gather_columns(x: Float[Array, "R part"]) -> Float[Array, "R V"]:
    """All columns in order, on all devices."""
    return lax.all_gather(x, AXES, axis=1, tiled=True) if num_parts() > 1 else x


def first_index(length: int) -> jax.Array | int:
    """The first index of this device's slice, if each device has `length`."""
    return lax.axis_index(AXES) * length if num_parts() > 1 else 0


def first_expert(length: int) -> jax.Array | int:
    """The first expert of this device's group, if each group has `length`."""
    return lax.axis_index(EXPERT_AXIS) * length if num_groups() > 1 else 0


def on_first_of_group(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """The array on the first device of each group, and zeros on the others, so that a group adds it up once."""
    if jax.sharding.get_abstract_mesh().shape.get(TENSOR_AXIS, 1) == 1:
        return x
    return jnp.where(lax.axis_index(TENSOR_AXIS) == 0, x, 0)


def make_mesh(count: int, groups: int = 1) -> Mesh | None:
    """The mesh of JAX's first devices, with equally many of each host, in `groups` of equal size.

    None for a single device, whose programs need no mesh.
    """
    if count == 1:
        return None
    hosts = range(jax.process_count())
    devices = [device for host in hosts for device in jax.local_devices(host)[: count // len(hosts)]]
    return Mesh(in_ring(devices, groups), AXES)


def in_ring(devices: Sequence[Any], groups: int = 1) -> np.ndarray:
    """The devices in groups, in JAX's order; chips of a TPU so that neighbours of the mesh are joined by a link.

    JAX numbers the chips of a 2 × 2 square by rows, so that of every two steps in its order one crosses the square.
    Chips that are no box, such as three of four, stay in JAX's order.
    """
    shape = (groups, len(devices) // groups)
    if devices[0].platform == "tpu":
        with contextlib.suppress(AssertionError, ValueError):  # no box
            return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return np.array(devices).reshape(shape)


def along(axis: int | None, num_axes: int, *, expert_axis: int | None = None) -> PartitionSpec:
    """The partition of an array that is split along one of its axes, or whole on every device.

    Args:
        axis: The axis that is split over all devices, or with `expert_axis` over those of a group; None for none.
        num_axes: The number of axes of the array.
        expert_axis: The axis of experts, of which each group has its own; None if the array has no such axis.
    """
    names: list[str | tuple[str, ...] | None] = [None] * num_axes
    if axis is not None:
        names[axis] = AXES if expert_axis is None else TENSOR_AXIS
    if expert_axis is not None:
        names[expert_axis] = EXPERT_AXIS
    return PartitionSpec(*names)


def sharding_of(
    mesh: AnyMesh | None, axis: int | None, num_axes: int, *, expert_axis: int | None = None
) -> NamedSharding | None:
    """`along` as a sharding on a mesh; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, along(axis, num_axes, expert_axis=expert_axis))


def place(value: np.ndarray | jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Puts an array, which this process has whole, where its sharding wants it. No program runs.

    Each of several hosts gives its devices their slices, without asking other hosts. All must have the same value.
    """
    if sharding is None:
        return jax.device_put(value)
    slices = sharding.addressable_devices_indices_map(value.shape)
    parts = [jax.device_put(value[index], device) for device, index in slices.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def spec_of(x: object) -> PartitionSpec:
    """How an array, or the shape of one, is split. Without a named sharding it is whole."""
    sharding = getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def bytes_on_one_device(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """The bytes of an array that one device holds."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return int(np.prod(shape)) * x.dtype.itemsize
