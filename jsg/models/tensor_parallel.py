"""One model on several devices: each holds a slice of the kernels, and what they computed is added up.

Shoeybi et al. 2019 (arXiv:1909.08053). A step runs under `shard_map` on a mesh with the axis `AXIS`; every device runs
the same program on its slices. Heads and feed-forward columns are split, so a layer has two sums over all devices, one
behind each of its two blocks; the embedding, split by rows of its table, has one, and logits are split by columns. All
else, the residual stream foremost, is the same on every device.

Outside such a mesh everything here does nothing, so models are written once.
"""

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

AXIS = "tensor"


def num_parts() -> int:
    """Devices that run the program that is being traced."""
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def add_up(x: Float[Array, "*any"]) -> Float[Array, "*any"]:
    """The sum over all devices, on all devices."""
    return lax.psum(x, AXIS) if num_parts() > 1 else x


def gather_columns(x: Float[Array, "R part"]) -> Float[Array, "R V"]:
    """All columns, in order, on all devices."""
    return lax.all_gather(x, AXIS, axis=1, tiled=True) if num_parts() > 1 else x


def first_index(length: int) -> jax.Array | int:
    """Where this device's slice begins, if each has `length`."""
    return lax.axis_index(AXIS) * length if num_parts() > 1 else 0


def make_mesh(count: int) -> Mesh | None:
    """The mesh of JAX's first devices, of each host as many; None for one alone, whose programs need none."""
    if count == 1:
        return None
    hosts = range(jax.process_count())
    devices = [jax.local_devices(host)[: count // len(hosts)] for host in hosts]
    return Mesh(np.array(devices).ravel(), (AXIS,))


def along(axis: int | None, num_axes: int) -> PartitionSpec:
    """An array that is split along one of its axes, or whole on every device."""
    return PartitionSpec(*(AXIS if index == axis else None for index in range(num_axes)))


def sharding_of(mesh: Mesh | None, axis: int | None, num_axes: int) -> NamedSharding | None:
    """The same as JAX's allocator takes it; None without a mesh."""
    return None if mesh is None else NamedSharding(mesh, along(axis, num_axes))


def place(value: np.ndarray | jax.Array, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """An array that this process has whole, where the sharding wants it. No program runs and no other host is asked.

    Of several hosts each gives its devices their slices; all must have the same value.
    """
    if sharding is None:
        return jax.device_put(value)
    slices = sharding.addressable_devices_indices_map(value.shape)
    parts = [jax.device_put(value[index], device) for device, index in slices.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def spec_of(x: object) -> PartitionSpec:
    """How an array, or the shape of one, is split; whole where it does not say."""
    sharding = getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def bytes_on_one_device(x: jax.Array | jax.ShapeDtypeStruct) -> int:
    """What one device holds of an array."""
    shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
    return int(np.prod(shape)) * x.dtype.itemsize
