"""A selective scan on a CPU: one pass over each state for each token. See `ops.gated_delta`, with `ScanWeights`.

An item is a piece in one head, so no other item reads or writes its state. XLA computes the convolution. Arithmetic is
float32.
"""

import functools
from typing import NamedTuple

import jax
from jaxtyping import Array, Float
from llvmlite import ir

from jsg.kernels_pallas.inputs import Pieces, ScanWeights, StateCache
from jsg.kernels_pallas.native.calls import Buffer, Kernel, emit_handler
from jsg.kernels_pallas.native.delta import bring_states, clear_padding, integer, product
from jsg.kernels_pallas.native.emit import LANES, Function, Value
from jsg.kernels_pallas.native.library import registered
from jsg.kernels_pallas.native.tiles import load_number, load_panel
from jsg.kernels_pallas.reference_convolution import last_inputs
from jsg.kernels_pallas.reference_delta import convolved, gates

RANKS = (3, 2, 2, 1, *(1,) * len(Pieces._fields), 4, 3, 4)


class _Shape(NamedTuple):
    """What machine code is made for: heads of a group, and the widths of a query or key and of a value."""

    group: int
    keys: int
    values: int


def selective_scan(
    joint: Float[Array, "T K joint"],
    raw_steps: Float[Array, "T K G"],
    weights: ScanWeights,
    cache: StateCache,
    pieces: Pieces,
) -> tuple[Float[Array, "T N Dv"], StateCache]:
    """See `ops.gated_delta`.

    Raises:
        NotImplementedError: A query or value is no multiple of `LANES` numbers.
    """
    heads, values, keys = cache.states.shape[1:]
    if keys % LANES or values % LANES:
        raise NotImplementedError(f"the CPU's kernel takes queries and values of a multiple of {LANES} numbers")
    shape, mixed = _Shape(heads // joint.shape[1], keys, values), joint[..., : weights.taps.shape[2]]
    read = (convolved(mixed, weights, cache, pieces), *gates(raw_steps, weights), weights.skip, *pieces)
    shapes = [jax.ShapeDtypeStruct(size, "float32") for size in ((len(joint), heads, values), cache.states.shape)]
    name = registered("jsg_scan_" + "_".join(map(str, shape)), functools.partial(_emit, shape))
    out, states = jax.ffi.ffi_call(name, shapes, input_output_aliases={len(read): 1})(*read, cache.states)
    return out, StateCache(last_inputs(mixed, cache.inputs, pieces), states)


def _emit(shape: _Shape, module: ir.Module, name: str) -> None:
    def num_items(_: Function, buffers: list[Buffer]) -> Value:
        return buffers[5].sizes[0] * buffers[1].sizes[1]

    def prepare(function: Function, buffers: list[Buffer]) -> None:
        clear_padding("float32", function, buffers[5], buffers[-2])

    emit_handler(module, Kernel(name, RANKS, 2, num_items, functools.partial(_item, shape), prepare))


def _item(shape: _Shape, function: Function, buffers: list[Buffer], index: Value) -> None:
    """One piece in one head, token after token."""
    channels, decay, strength, skip = buffers[:4]
    (out, states), heads = buffers[-2:], decay.sizes[1]
    piece = index // heads
    head, fields = index - piece * heads, (integer(function, field, piece) for field in buffers[4:10])
    start, length, source, target, position, is_known = fields
    num_bytes, groups = 4 * shape.keys * shape.values, channels.sizes[1]
    width = 2 * shape.keys + shape.group * shape.values
    skipped = load_number(function, skip.data, head * 4)
    group = head // shape.group
    with function.when(function.constant(0) < length):
        is_fresh = function.both(position.equals(0), is_known.equals(0))
        old, state = (function.address(states.data, (slot * heads + head) * num_bytes) for slot in (source, target))
        bring_states(function, num_bytes, old, state, source.equals(target), is_fresh)
        with function.loop(length) as offset:
            token = start + offset
            here = function.address(channels.data, (token * groups + group) * (4 * width))
            query, key = (
                [load_panel(function, here, 4 * i) for i in range(first, first + shape.keys, LANES)]
                for first in (0, shape.keys)
            )
            values = function.address(here, (head - group * shape.group) * (4 * shape.values) + 8 * shape.keys)
            at = (token * heads + head) * 4
            is_read_only = function.both(offset.equals(0), is_known.equals(1))
            decays, share = (load_number(function, of.data, at) for of in (decay, strength))
            decays = function.spread(function.chosen(is_read_only, function.like(decays, 1.0), decays))
            share = function.chosen(is_read_only, function.like(share, 0.0), share)
            with function.loop(shape.values) as row:
                line, value = (
                    function.address(state, row * (4 * shape.keys)),
                    load_number(function, values, row * 4),
                )
                added = function.spread(value * share)
                numbers = [load_panel(function, line, 4 * i) * decays for i in range(0, shape.keys, LANES)]
                numbers = [function.fused(added, k, x) for k, x in zip(key, numbers, strict=True)]
                for i, x in enumerate(numbers):
                    function.store(x, line, i * LANES * 4)
                made = product(function, numbers, query) + skipped * value
                function.store(made, out.data, at * shape.values + row * 4)
