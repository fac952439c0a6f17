"""A layer of the gated delta rule but for its projections as one Pallas-Triton launch. See `ops.gated_delta`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.attention_block import check_addressable, whole_spec
from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, StateCache
from jsg.kernels_pallas.reference_convolution import last_inputs
from jsg.kernels_pallas.reference_delta import UNIT_EPS

NUM_WARPS = 8
"""So that a state of 128 x 128 numbers stays in registers: of four warps each thread would have 128 numbers."""
MAX_DIM = 128


class _Static(NamedTuple):
    """The constants of a call."""

    group: int
    keys: int
    values: int
    taps: int
    eps: float
    most: float
    is_apart: bool
    has_one_token: bool


class _Refs(NamedTuple):
    """The arrays in device memory. The last three are written; those that hold states are the given ones.

    If no gates are apart, `decays` is `raw_gates`, and `gates` is `joint`.
    """

    joint: Any
    raw_gates: Any
    decays: Any
    gates: Any
    taps: Any
    decay_rate: Any
    decay_bias: Any
    norm: Any
    out: Any
    inputs: Any
    states: Any


class _Piece(NamedTuple):
    """The piece and the heads of a program."""

    start: Int[Array, ""]
    length: Int[Array, ""]
    source: Int[Array, ""]
    target: Int[Array, ""]
    position: Int[Array, ""]
    is_known: Int[Array, ""]
    head: Int[Array, ""]
    key_head: Int[Array, ""]
    member: Int[Array, ""]


def gated_delta(
    joint: Float[Array, "T K joint"],
    raw_gates: Float[Array, "T K gates"],
    weights: DeltaWeights,
    cache: StateCache,
    pieces: Pieces,
    apart: GatesApart | None = None,
    *,
    has_one_token: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "T N Dv"], StateCache]:
    """See `ops.gated_delta`. States are changed in place. With one token in each piece, token i is that of piece i.

    Raises:
        NotImplementedError: A query or value is no power of two of numbers, or too long; an array is too large.
    """
    check_supported(cache)
    heads, values, keys = cache.states.shape[1:]
    sizes, is_apart = (heads // joint.shape[1], keys, values, len(weights.taps)), apart is not None
    static = _Static(*sizes, weights.eps, weights.most, is_apart, has_one_token)
    read = (joint, raw_gates, *(apart or ()), *weights[:4], *pieces)
    out = jax.ShapeDtypeStruct((len(joint), heads, values), joint.dtype)
    written = [out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in cache)]
    out, *changed = pl.pallas_call(
        functools.partial(delta_kernel, static),
        grid=(len(pieces.lens), heads),
        in_specs=[whole_spec(x) for x in (*read, *cache)],
        out_specs=[whole_spec(x) for x in written],
        out_shape=written,
        input_output_aliases={len(read): 1, len(read) + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=NUM_WARPS, num_stages=1),
        interpret=interpret,
    )(*read, *cache)
    inputs, states = changed
    if not has_one_token:
        is_real = jnp.arange(len(out)) < jnp.sum(pieces.lens)
        out = jnp.where(is_real[:, None, None], out, 0)
        inputs = last_inputs(joint[..., : weights.taps.shape[2]], inputs, pieces)
    return out, StateCache(inputs, states)


def check_supported(cache: StateCache) -> None:
    """Raises NotImplementedError if the Triton kernels cannot do states of this shape."""
    if any(dim & (dim - 1) or not 16 <= dim <= MAX_DIM for dim in cache.states.shape[2:]):
        raise NotImplementedError(f"the Triton kernel takes queries and values of 16, 32, 64 or {MAX_DIM} numbers")
    check_addressable(cache.states)


def delta_kernel(static: _Static, *refs: jax.Ref) -> None:
    """One program: a piece in one value head, token after token.

    Grid: (pieces, N). Blocks: all arrays stay in device memory. The state, [Dv, Dk], and the inputs that the next token
    needs are in registers from the first token to the last.

    Owns: the state of its head in the target, and the outputs of its tokens. Programs of the heads that share a key
    head write the same inputs of queries and keys to the same columns. With one token that is a column which none of
    them reads, or one of another slot. With more tokens it could be one that another still has to read, so inputs are
    written by a later operation then.

    Masked: what stands before position 0, by `where`, because a slot may hold anything.
    """
    joint, raw_gates, *others = refs
    decays, gates = others[:2] if static.is_apart else (raw_gates, joint)
    taps, rate, bias, norm, *fields, _, _, out, inputs, states = others[2 * static.is_apart :]
    here = _Refs(joint, raw_gates, decays, gates, taps, rate, bias, norm, out, inputs, states)
    index, head = pl.program_id(0), pl.program_id(1)
    start, length, source, target, position, is_known = (_at(field, index) for field in fields)
    key_head, member = head // static.group, head % static.group
    piece = _Piece(start, length, source, target, position, is_known, head, key_head, member)
    rows, columns = jnp.arange(static.values), jnp.arange(static.keys)
    channels = (columns, static.keys + columns, 2 * static.keys + piece.member * static.values + rows)
    place = (head, rows[:, None], columns[None])
    is_begun = (piece.position > 0) | (piece.is_known > 0)
    state = jnp.where(is_begun, plgpu.load(here.states.at[(piece.source, *place)]), 0)
    window = tuple(
        tuple(_kept(static, here, piece, part, back) for back in range(static.taps - 1, 0, -1)) for part in channels
    )

    def one_token(offset: Int[Array, ""], carry: Any) -> Any:
        return _token(static, here, piece, channels, offset, *carry)

    first = window
    window, state = lax.fori_loop(jnp.int32(0), piece.length, one_token, (window, state))
    target = jnp.where(piece.length > 0, piece.target, 0)
    plgpu.store(here.states.at[(target, *place)], jnp.where(piece.length > 0, state, 0))
    if static.has_one_token:
        padding = jnp.broadcast_to(piece.length == 0, rows.shape)
        plgpu.store(here.out.at[index, head, rows], jnp.zeros(rows.shape, out.dtype), mask=padding)
        for part, before, last in zip(channels, first, window, strict=True):
            for back, x in enumerate((*reversed(last), before[0])):
                _keep(static, here, piece, part, target, back, x)


def _at(field: Any, index: Int[Array, ""]) -> Int[Array, ""]:
    """The number of this piece."""
    return plgpu.load(field.at[index])


def _kept(static: _Static, here: _Refs, piece: _Piece, part: Int[Array, " c"], back: int) -> Float[Array, " c"]:
    """The inputs of a position before the piece."""
    column = (piece.position - back + static.taps) % static.taps
    x = plgpu.load(here.inputs.at[piece.source, column, piece.key_head, part])
    return jnp.where(piece.position >= back, x.astype(jnp.float32), 0)


def _keep(
    static: _Static,
    here: _Refs,
    piece: _Piece,
    part: Int[Array, " c"],
    target: Int[Array, ""],
    back: int,
    x: Float[Array, " c"],
) -> None:
    """Writes the inputs of the only token (`back` is 0), or in a slot that lacks them those before it."""
    column = (piece.position - back + static.taps) % static.taps
    is_lacking = (back == 0) | (piece.target != piece.source) | (piece.position == 0)
    is_written = (piece.length > 0) & is_lacking
    mask = jnp.broadcast_to(is_written, part.shape)
    plgpu.store(here.inputs.at[target, column, piece.key_head, part], x.astype(here.inputs.dtype), mask=mask)


def _token(
    static: _Static,
    here: _Refs,
    piece: _Piece,
    channels: tuple[Int[Array, " k"], Int[Array, " k"], Int[Array, " v"]],
    offset: Int[Array, ""],
    window: Any,
    state: Float[Array, "v k"],
) -> tuple[Any, Float[Array, "v k"]]:
    """One token: its convolution, gates, update of the state, and output. Returns the inputs and the state after it."""
    token, parts, later = piece.start + offset, [], []
    for part, before in zip(channels, window, strict=True):
        x = plgpu.load(here.joint.at[token, piece.key_head, part]).astype(jnp.float32)
        total = jnp.zeros(part.shape, jnp.float32)
        for tap, past in enumerate((*before, x)):
            total += past * plgpu.load(here.taps.at[tap, piece.key_head, part]).astype(jnp.float32)
        parts.append(total * jax.nn.sigmoid(total))
        later.append((*before, x)[-(static.taps - 1) :])
    query, key, value = parts
    query *= lax.rsqrt(jnp.sum(query * query) + UNIT_EPS) * static.keys**-0.5
    key *= lax.rsqrt(jnp.sum(key * key) + UNIT_EPS)
    strength = plgpu.load(here.raw_gates.at[token, piece.key_head, piece.member]).astype(jnp.float32)
    decay = _decay(static, here, piece, token)
    is_known = (offset == 0) & (piece.is_known > 0)
    decayed = state * decay
    difference = (value - jnp.sum(decayed * key[None], axis=1)) * (static.most * jax.nn.sigmoid(strength))
    state = jnp.where(is_known, state, decayed + difference[:, None] * key[None])
    made = jnp.sum(state * query[None], axis=1)
    rows = jnp.arange(static.values)
    gates = channels[2] + (-2 * static.keys if static.is_apart else static.group * static.values)
    gate = plgpu.load(here.gates.at[token, piece.key_head, gates]).astype(jnp.float32)
    made *= lax.rsqrt(jnp.sum(made * made) / static.values + static.eps)
    gate = jax.nn.sigmoid(gate) if static.is_apart else gate * jax.nn.sigmoid(gate)
    made *= plgpu.load(here.norm.at[rows]).astype(jnp.float32) * gate
    plgpu.store(here.out.at[token, piece.head, rows], made.astype(here.out.dtype))
    return tuple(later), state


def _decay(static: _Static, here: _Refs, piece: _Piece, token: Int[Array, ""]) -> Float[Array, "..."]:
    """What multiplies the state: a number, or [1, Dk]."""
    if static.is_apart:
        columns = jnp.arange(static.keys)
        place, own = (piece.member * static.keys + columns)[None], (piece.head, columns[None])
    else:
        place, own = static.group + piece.member, (piece.head,)
    decay = plgpu.load(here.decays.at[token, piece.key_head, place]).astype(jnp.float32)
    decay += plgpu.load(here.decay_bias.at[own])
    soft = jnp.maximum(decay, 0) + jnp.log(1 + jnp.exp(-jnp.abs(decay)))
    return jnp.exp(-jnp.exp(plgpu.load(here.decay_rate.at[piece.head])) * soft)
