"""Rotation of queries and keys and the write into the KV pool on a CPU, in one pass. See `ops.rotate_and_write`.

Arithmetic is float32.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int
from llvmlite import ir

from jsg.kernels_pallas.inputs import HeadNorms, LayerCache
from jsg.kernels_pallas.native.calls import Buffer, Kernel, emit_handler
from jsg.kernels_pallas.native.emit import INT32, LANES, Function, Value, Variable
from jsg.kernels_pallas.native.library import registered
from jsg.kernels_pallas.native.tiles import ITEM_BYTES, load_number, load_panel

TOKENS = 4
"""Tokens of an item: enough that a thread seldom asks for work, and few, so that eight tokens have two threads."""
KINDS = ("float32", "bfloat16")


class _Types(NamedTuple):
    """The types of a call's numbers, and how heads are normed.

    Attributes:
        joint: Of the joint projection.
        pool: Of keys and values in the pool.
        weight: Of the weights of norms; None if heads are not normed.
        is_late: Queries and keys are normed after rotation.
        norms_values: Values are normed too.
    """

    joint: str
    pool: str
    weight: str | None
    is_late: bool
    norms_values: bool


class _Call(NamedTuple):
    """The buffers of a call, in order. The pools that are written are those that are given."""

    joint: Buffer
    cos: Buffer
    sin: Buffer
    slots: Buffer
    keys: Buffer
    values: Buffer
    queries: Buffer
    new_keys: Buffer
    new_values: Buffer
    query_weight: Buffer | None = None
    key_weight: Buffer | None = None
    eps: Buffer | None = None


def rotate_and_write(
    qkv: Float[Array, "T K joint"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    slots: Int[Array, " T"],
    cache: LayerCache,
    norms: HeadNorms | None,
) -> tuple[Float[Array, "T N H"], LayerCache]:
    """See `ops.rotate_and_write`.

    Raises:
        NotImplementedError: Keys and values are in one array or have 8 bits, or half a head is no multiple of `LANES`.
    """
    half, weights = cos.shape[1], () if norms is None else (norms.query, norms.key)
    if len(cache) != 2 or half % LANES or any(str(x.dtype) not in KINDS for x in (qkv, *cache, *weights)):
        raise NotImplementedError(
            f"the CPU's kernel wants keys and values in arrays of their own, float32 or bfloat16, and halves of a head "
            f"of a multiple of {LANES} numbers"
        )
    types = _Types(
        joint=str(qkv.dtype),
        pool=str(cache[0].dtype),
        weight=None if norms is None else str(norms.query.dtype),
        is_late=norms is not None and norms.is_late,
        norms_values=norms is not None and norms.norms_values,
    )
    kind = f"_{'late' if types.is_late else 'normed'}_{types.weight}" if types.weight else ""
    kind += "_values" if types.norms_values else ""
    name = f"jsg_rotate{kind}_{types.joint}_{types.pool}"
    queries = (len(qkv), qkv.shape[1] * (qkv.shape[2] // (2 * half) - 2), 2 * half)
    shapes = [jax.ShapeDtypeStruct(queries, qkv.dtype), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache)]
    call = jax.ffi.ffi_call(
        registered(name, functools.partial(_emit, types)), shapes, input_output_aliases={4: 1, 5: 2}
    )
    eps = () if norms is None else (jnp.float32(norms.eps),)
    rotated, *written = call(qkv, cos, sin, slots, *cache, *weights, *eps)
    return rotated, cast(LayerCache, tuple(written))


def _emit(types: _Types, module: ir.Module, name: str) -> None:
    given = (3, 2, 2, 1, 4, 4, *((1, 1, 0) if types.weight else ()))

    def named(buffers: list[Buffer]) -> _Call:
        return _Call(*buffers[:6], *buffers[-3:], *buffers[6:-3])

    def num_items(_: Function, buffers: list[Buffer]) -> Value:
        return (buffers[0].sizes[0] + (TOKENS - 1)) // TOKENS

    def item(function: Function, buffers: list[Buffer], index: Value) -> None:
        call, first = named(buffers), index * TOKENS
        with function.loop(function.smaller(first + TOKENS, call.joint.sizes[0]), start=first) as token:
            slot = function.widened(function.load(INT32, call.slots.data, token * 4))
            with function.loop(call.joint.sizes[1]) as head:
                _emit_head(types, function, call, token, head, slot)

    emit_handler(module, Kernel(name, (*given, 3, 4, 4), 3, num_items, item))


def _emit_head(types: _Types, function: Function, call: _Call, token: Value, head: Value, slot: Value) -> None:
    """The query heads, the key and the value of a key-value head."""
    (_, kv_heads, width), head_dim = call.joint.sizes, call.cos.sizes[1] * 2
    joint_bytes, pool_bytes = ITEM_BYTES[types.joint], ITEM_BYTES[types.pool]
    group = width // head_dim - 2
    source = function.address(call.joint.data, (token * kv_heads + head) * width * joint_bytes)
    target = function.address(call.queries.data, (token * kv_heads + head) * group * head_dim * joint_bytes)
    with function.loop(group) as query:
        at = query * head_dim * joint_bytes
        turned = _Turned(types, function, call, token, function.address(source, at), call.query_weight)
        with function.loop(head_dim // 2, step=LANES) as dim:
            for half, numbers in enumerate(turned.at(dim)):
                function.store_as(types.joint, numbers, target, at + (head_dim // 2 * half + dim) * joint_bytes)
    key = function.address(source, group * head_dim * joint_bytes)
    value = function.address(key, head_dim * joint_bytes)
    is_finite, is_kept = _is_finite(types, function, value, head_dim), function.constant(0) < slot
    place = (slot * kv_heads + head) * head_dim
    turned = _Turned(types, function, call, token, key, call.key_weight)
    nothing, nan = function.zeros(), function.like(function.zeros(), float("nan"))
    with function.loop(head_dim // 2, step=LANES) as dim:
        for half, numbers in enumerate(turned.at(dim)):
            stored = function.chosen(is_kept, function.chosen(is_finite, numbers, nan), nothing)
            at = (place + head_dim // 2 * half + dim) * pool_bytes
            function.store_as(types.pool, stored, call.new_keys.data, at)
    factor = None
    if types.norms_values and call.eps is not None:
        read = functools.partial(function.floats, types.joint, value)
        factor = _factor(function, call.eps, head_dim, head_dim, lambda dim: (read(dim * joint_bytes),))
    with function.loop(head_dim, step=LANES) as dim:
        numbers = function.floats(types.joint, value, dim * joint_bytes)
        numbers = numbers if factor is None else function.rounded(types.joint, numbers * factor)
        stored = function.chosen(function.both(is_kept, is_finite), numbers, nothing)
        function.store_as(types.pool, stored, call.new_values.data, (place + dim) * pool_bytes)


def _is_finite(types: _Types, function: Function, value: Value, head_dim: Value) -> Value:
    """Whether all numbers of a value are finite: what is not finite does not differ from itself by zero."""
    differences = Variable(function, function.zeros())
    with function.loop(head_dim, step=LANES) as dim:
        numbers = function.floats(types.joint, value, dim * ITEM_BYTES[types.joint])
        differences.set(differences.get() + (numbers - numbers))
    return function.total(differences.get()).equals(0.0)


class _Turned:
    """Code that reads a head and turns it, and norms it before or after that if there are weights."""

    def __init__(
        self, types: _Types, function: Function, call: _Call, token: Value, source: Value, weight: Buffer | None
    ) -> None:
        self._types = types
        self._function = function
        self._half = call.cos.sizes[1]
        self._source = source
        self._angles = [function.address(x.data, token * self._half * 4) for x in (call.cos, call.sin)]
        self._weight = weight
        self._factor = None
        if weight is not None and call.eps is not None:
            self._factor = self._emit_factor(call.eps)

    def at(self, dim: Value) -> tuple[Value, Value]:
        """The numbers from `dim` on, and those half a head later."""
        if not self._types.is_late:
            return self._turned(dim, *(self._normed(at, self._read(at)) for at in (dim, self._half + dim)))
        first, second = self._late(dim)
        return self._normed(dim, first), self._normed(self._half + dim, second)

    def _late(self, dim: Value) -> tuple[Value, Value]:
        """What is normed late: turned, and rounded."""
        first, second = self._turned(dim, self._read(dim), self._read(self._half + dim))
        return self._function.rounded(self._types.joint, first), self._function.rounded(self._types.joint, second)

    def _turned(self, dim: Value, first: Value, second: Value) -> tuple[Value, Value]:
        cos, sin = (load_panel(self._function, angles, dim * 4) for angles in self._angles)
        return first * cos - second * sin, second * cos + first * sin

    def _read(self, dim: Value) -> Value:
        return self._function.floats(self._types.joint, self._source, dim * ITEM_BYTES[self._types.joint])

    def _normed(self, dim: Value, numbers: Value) -> Value:
        function, kind = self._function, self._types.weight
        if self._weight is None or self._factor is None or kind is None:
            return numbers
        normed = function.rounded(kind, numbers * self._factor)  # to the type of the weight too, as in training
        weight = function.floats(kind, self._weight.data, dim * ITEM_BYTES[kind])
        return function.rounded(self._types.joint, normed * weight)

    def _emit_factor(self, eps: Buffer) -> Value:
        if self._types.is_late:
            return _factor(self._function, eps, self._half * 2, self._half, self._late)
        return _factor(self._function, eps, self._half * 2, self._half * 2, lambda dim: (self._read(dim),))


def _factor(
    function: Function, eps: Buffer, head_dim: Value, end: Value, parts: Callable[[Value], tuple[Value, ...]]
) -> Value:
    """One over the root of the mean square of a head, whose numbers are the parts at each place up to an end."""
    squares = Variable(function, function.zeros())
    with function.loop(end, step=LANES) as dim:
        for numbers in parts(dim):
            squares.set(function.fused(numbers, numbers, squares.get()))
    mean = function.total(squares.get()) / function.as_float(head_dim)
    root = function.intrinsic("llvm.sqrt.f32", mean + load_number(function, eps.data, 0))
    return function.spread(function.like(root, 1.0) / root)
