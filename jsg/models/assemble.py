"""One parameter of tensors of a checkpoint; of a parameter that devices share out, each device's slice by itself.

A device that holds a slice needs a slice of each tensor, and only that is read: so a host holds what its devices hold
and the tensors of one parameter more, however large the model is. See `Origin` for how tensors become a parameter.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jsg.models.layers import Origin, Source
from jsg.models.quantise import Quantised, quantise
from jsg.models.tensor_parallel import place

Span = tuple[int, int]
"""First index and the one after the last, along the axis that devices share out."""
Read = Callable[[Source, tuple[slice, ...]], Array]
"""What gives a slice of a tensor, in the axes that the file has."""


def assemble(declared: jax.ShapeDtypeStruct | Quantised, origin: Origin, read: Read) -> Array | Quantised:
    """The value of a parameter, on the default device or where its declaration says.

    Each tensor is rounded before the next is read. Where devices share out what a scale belongs to, none of them has
    all the numbers that decide it, so it is made whole first.

    A group of devices that has experts of its own takes their sources only.

    Args:
        declared: Shapes, types and shardings of the value.
        origin: The tensors it is made of.
        read: Reads them.
    """
    numbers, *scale = jax.tree.leaves(declared)
    axis = origin.split_axis
    if numbers.sharding is None:
        return _part(declared, origin, read, None)
    is_cut = axis is not None and numbers.sharding.shard_shape(numbers.shape)[axis] < numbers.shape[axis]
    if axis is None or (is_cut and any(each.shape[axis] == 1 for each in scale)):
        whole = _part(declared, origin, read, None)
        return jax.tree.map(lambda value, shape: place(value, shape.sharding), whole, declared)
    parts = []
    for device, index in numbers.sharding.addressable_devices_indices_map(numbers.shape).items():
        spans = [each.indices(size)[:2] for each, size in zip(index, numbers.shape, strict=True)]
        with jax.default_device(device):
            parts.append(_part(*_own_experts(declared, origin, spans), read, spans[axis] if is_cut else None))
    return jax.tree.map(
        lambda shape, *arrays: jax.make_array_from_single_device_arrays(shape.shape, shape.sharding, list(arrays)),
        declared,
        *parts,
    )


def _own_experts(
    declared: jax.ShapeDtypeStruct | Quantised, origin: Origin, spans: list[Span]
) -> tuple[jax.ShapeDtypeStruct | Quantised, Origin]:
    """The shape and the origin of the experts in the spans of a device, as if there were no others."""
    axis = origin.expert_axis
    if axis is None:
        return declared, origin
    first, last = spans[axis]

    def own(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:axis], last - first, *x.shape[axis + 1 :]), x.dtype)

    return jax.tree.map(own, declared), origin._replace(sources=origin.sources[first:last])


def _part(
    declared: jax.ShapeDtypeStruct | Quantised, origin: Origin, read: Read, span: Span | None
) -> Array | Quantised:
    """The indices `span` of a parameter, or all of it."""
    shape = jax.tree.leaves(declared)[0].shape
    tensors = (read(source, _slices(source, origin, shape, span)) for source in origin.sources)
    if not isinstance(declared, Quantised):
        return _joined(shape, origin, [tensor.astype(declared.dtype) for tensor in tensors], span)
    parts = [
        quantise(tensor, source.name, declared.values.dtype)
        for source, tensor in zip(origin.sources, tensors, strict=True)
    ]
    return Quantised(
        _joined(shape, origin, [part.values for part in parts], span),
        _joined(declared.scale.shape, origin, [part.scale for part in parts], span),
    )


def _slices(source: Source, origin: Origin, shape: tuple[int, ...], span: Span | None) -> tuple[slice, ...]:
    """What of the file's tensor makes the indices `span` of the parameter's shared axis: a slice of one of its axes."""
    axis, whole = origin.split_axis, (slice(None),) * len(source.shape)
    if span is None or axis is None:
        return whole
    if axis == origin.join_axis - 1:
        span = _heads(source, span)
    view = list(shape)  # how the tensor fills the parameter's axes
    view[origin.join_axis - 1] //= source.repeats
    view[origin.join_axis] = 1
    view[origin.join_axis] = math.prod(source.shape) // math.prod(view)
    sides = source.shape[::-1] if origin.transposed else source.shape
    side = next(i for i in range(len(sides)) if math.prod(sides[:i]) == math.prod(view[:axis]))
    width = sides[side] // view[axis]
    side = len(sides) - 1 - side if origin.transposed else side
    return (*whole[:side], slice(span[0] * width, span[1] * width), *whole[side + 1 :])


def _joined(shape: tuple[int, ...], origin: Origin, tensors: list[Array], span: Span | None) -> Array:
    """One array of the slices of its tensors. Transposing once here saves it at every step."""
    join, axis, local = origin.join_axis, origin.split_axis, list(shape)
    heads = (0, shape[join - 1])
    if span is not None and axis is not None:
        local[axis] = span[1] - span[0]
        heads = span if axis == join - 1 else heads
    parts = []
    for source, tensor in zip(origin.sources, tensors, strict=True):
        view = [*local[:join], -1, *local[join + 1 :]]
        first, last = _heads(source, heads)
        if source.repeats > 1:
            view[join - 1] = last - first
        part = (tensor.T if origin.transposed else tensor).reshape(view)
        if source.repeats > 1:
            part = jnp.take(part, jnp.arange(*heads) // source.repeats - first, join - 1)
        parts.append(part)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, join)


def _heads(source: Source, span: Span) -> Span:
    """Those of the source that stand in these places of the parameter."""
    return span[0] // source.repeats, -(-span[1] // source.repeats)
