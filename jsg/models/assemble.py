"""Makes a parameter of the tensors of a checkpoint. If devices share it out, each gets its own slice.

Of each tensor only the slice is read that a device holds. On a CPU the parameter's own memory is filled in place
(`in_place.py`). To an accelerator the tensors are sent one by one, and are transposed and joined there. So a host holds
what its devices hold, and one tensor more, however many tensors make a parameter. See `Origin`.
"""

import concurrent.futures
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jsg.models.in_place import fill
from jsg.models.origin import Origin
from jsg.models.quantise import Quantised, quantise
from jsg.models.slices import Reader, Span, heads_of, leaf_span, source_slices
from jsg.models.tensor_parallel import place

_Spans = dict[Any, Span | None]
"""Device → its span of the axis that is shared out, None for all of it. The default device is None."""


def assemble(
    declared: jax.ShapeDtypeStruct | Quantised,
    origin: Origin,
    reader: Reader,
    pool: concurrent.futures.Executor,
    *,
    is_in_place: bool,
) -> Array | Quantised:
    """The value of a parameter, on the default device or on the devices that its declaration names.

    Each number is rounded once, to the declared type. If devices share out the rows that scales belong to, no device
    has all numbers that decide a scale, so whole rows are read.

    A group of devices that has experts of its own reads only their tensors.

    Args:
        declared: Shapes, types and shardings of the value.
        origin: The tensors it is made of.
        reader: Reads them.
        pool: Reads pieces at the same time.
        is_in_place: Whether the host's memory is the device's memory, as for a CPU.

    Raises:
        ModelError: A tensor cannot be read, or cannot be quantised.
    """
    leaves, axis, tree = jax.tree.leaves(declared), origin.split_axis, jax.tree.structure(declared)
    numbers, *scales = leaves

    def make(declared: jax.ShapeDtypeStruct | Quantised, origin: Origin, spans: _Spans) -> list[Any]:
        """The leaves of each device: in place on the host, or on the device."""
        if is_in_place:
            return fill(declared, origin, reader, pool, list(spans.values()))
        made = []
        for device, span in spans.items():
            with jax.default_device(device):
                made.append(_sent(declared, origin, reader, span))
        return made

    is_cut = _is_cut(numbers, axis)
    if (
        numbers.sharding is None
        or axis is None
        or (is_cut and not is_in_place and any(scale.shape[axis] == 1 for scale in scales))
    ):
        (whole,) = make(declared, origin, {None: None})
        return tree.unflatten([place(x, leaf.sharding) for x, leaf in zip(whole, leaves, strict=True)])
    groups: dict[Span | None, _Spans] = {}  # devices, by the experts that they have
    shape = declared.shape
    places = numbers.sharding.addressable_devices_indices_map(shape)
    for device, index in places.items():
        spans: list[Span] = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
        experts = None if origin.expert_axis is None else spans[origin.expert_axis]
        groups.setdefault(experts, {})[device] = spans[axis] if is_cut else None
    parts: dict[Any, list[Array]] = {}
    for experts, members in groups.items():
        own = _own_experts(declared, origin, experts)
        for device, arrays in zip(members, make(*own, members), strict=True):
            parts[device] = [jax.device_put(x, device) for x in arrays]
    return tree.unflatten(
        [
            jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, list(arrays))
            for leaf, *arrays in zip(leaves, *(parts[device] for device in places), strict=True)
        ]
    )


def _is_cut(numbers: jax.ShapeDtypeStruct, axis: int | None) -> bool:
    """Whether devices, or the devices of a group, share out this axis."""
    if numbers.sharding is None or axis is None:
        return False
    return numbers.sharding.shard_shape(numbers.shape)[axis] < numbers.shape[axis]


def _own_experts(
    declared: jax.ShapeDtypeStruct | Quantised, origin: Origin, experts: Span | None
) -> tuple[jax.ShapeDtypeStruct | Quantised, Origin]:
    """The shape and the origin as if there were only these experts. A parameter without experts stays as it is."""
    axis = origin.expert_axis
    if axis is None or experts is None:
        return declared, origin
    first, last = experts

    def own(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:axis], last - first, *x.shape[axis + 1 :]), x.dtype)

    return jax.tree.map(own, declared), origin._replace(sources=origin.sources[first:last])


def _sent(declared: jax.ShapeDtypeStruct | Quantised, origin: Origin, reader: Reader, span: Span | None) -> list[Array]:
    """The leaves of a span of a parameter, or of all of it, made on the default device."""
    shape, parts = declared.shape, []
    for source in origin.sources:
        tensor = reader.read(source, source_slices(source, origin, shape, span))
        # The device transposes. A tensor that the file has transposed already is sent as it lies in memory.
        is_turned = origin.transposed and tensor.ndim > 1 and tensor.flags.f_contiguous
        sent = jnp.asarray(tensor.T).T if is_turned else jnp.asarray(tensor)
        if isinstance(declared, Quantised):
            part = list(quantise(sent, source.name, declared.values.dtype))
        else:
            part = [sent.astype(declared.dtype)]
        parts.append(jax.block_until_ready(part))  # else tensors that are still being sent pile up on the host
    return [
        _joined(leaf.shape, shape, origin, list(tensors), span)
        for leaf, *tensors in zip(jax.tree.leaves(declared), *parts, strict=True)
    ]


def _joined(
    shape: tuple[int, ...], whole: tuple[int, ...], origin: Origin, tensors: list[Array], span: Span | None
) -> Array:
    """A leaf of a parameter with the shape `whole`, of slices of tensors. Transposing here saves it in every step."""
    join, axis, local = origin.join_axis, origin.split_axis, list(shape)
    heads = (0, shape[join - 1])
    if span is not None and axis is not None:
        span = leaf_span(span, whole[axis], shape[axis])
        local[axis] = span[1] - span[0]
        heads = span if axis == join - 1 else heads
    parts = []
    for source, tensor in zip(origin.sources, tensors, strict=True):
        view = [*local[:join], -1, *local[join + 1 :]]
        first, last = heads_of(source, heads)
        if source.repeats > 1:
            view[join - 1] = last - first
        part = (tensor.T if origin.transposed else tensor).reshape(view)
        if source.repeats > 1:
            part = jnp.take(part, jnp.arange(*heads) // source.repeats - first, join - 1)
        parts.append(part)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, join)
