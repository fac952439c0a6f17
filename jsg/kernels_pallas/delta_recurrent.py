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
from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, ScanWeights, StateCache
from jsg.kernels_pallas.reference_convolution import last_inputs
from jsg.kernels_pallas.reference_delta import UNIT_EPS

NUM_WARPS = 8
"""So that a state of 128 x 128 numbers stays in registers: of four warps each thread would have 128 numbers."""
MAX_DIM = 128


class _Static(NamedTuple):
    """The constants of a call. Without `steps` it is a gated delta rule. `rows` are the values, padded.

    A row of the padding is the last value again, which it also writes again.
    """

    group: int
    keys: int
    values: int
    taps: int
    eps: float
    is_apart: bool
    steps: tuple[float, float] | None
    rows: int
    has_one_token: bool

    @property
    def values_here(self) -> Int[Array, " v"]:
        """The value of each row of a state."""
        rows = jnp.arange(self.rows)
        return rows if self.rows == self.values else jnp.minimum(rows, self.values - 1)


class _Refs(NamedTuple):
    """The arrays in device memory. The last three are written; those that hold states are the given ones.

    If no gates are apart, `decays` is `raw_gates`, and `gates` is `joint`. A selective scan has `skip` in place of
    `norm`, and in place of `gates` the bias of its convolution.
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
    weights: DeltaWeights | ScanWeights,
    cache: StateCache,
    pieces: Pieces,
    apart: GatesApart | None = None,
    *,
    has_one_token: bool,
    interpret: bool = False,
) -> tuple[Float[Array, "T N Dv"], StateCache]:
    """See `ops.gated_delta`. States are changed in place. With one token in each piece, token i is that of piece i.

    Raises:
        NotImplementedError: A query is no power of two of numbers, or a value of a gated delta rule; a state or another
            array is too large.
    """
    heads, values, keys = cache.states.shape[1:]
    rows = pl.next_power_of_2(values)
    is_padded = rows != values and isinstance(weights, DeltaWeights)
    if keys & (keys - 1) or is_padded or min(keys, values) < 16 or max(keys, rows) * rows > MAX_DIM**2:
        raise NotImplementedError(
            f"the Triton kernel takes queries of a power of two of numbers from 16 on, values of at most {MAX_DIM}, in "
            f"a gated delta rule likewise, and states of at most {MAX_DIM**2}"
        )
    check_addressable(cache.states)
    is_apart, steps = apart is not None, None
    sizes, out_type = (heads // joint.shape[1], keys, values, len(weights.taps)), jnp.dtype(joint.dtype)
    if isinstance(weights, ScanWeights):
        eps, steps, out_type = 0.0, weights.steps, jnp.dtype(jnp.float32)
        read = (joint, raw_gates, *weights[:5])
    else:
        eps = weights.eps
        read = (joint, raw_gates, *(apart or ()), *weights[:4])
    read = (*read, jnp.stack(pieces))  # one array: XLA copies each part of a step's numbers that a kernel is given
    static = _Static(*sizes, eps, is_apart, steps, rows, has_one_token)
    out = jax.ShapeDtypeStruct((len(joint), heads, values), out_type)
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
    taps, rate, bias, norm, *others = others[2 * static.is_apart :]
    gates, *others = (gates, *others) if static.steps is None else others
    pieces, _, _, out, inputs, states = others
    here = _Refs(joint, raw_gates, decays, gates, taps, rate, bias, norm, out, inputs, states)
    index, head = pl.program_id(0), pl.program_id(1)
    fields = (plgpu.load(pieces.at[jnp.int32(field), index]) for field in range(len(Pieces._fields)))
    start, length, source, target, position, is_known = fields
    key_head, member = head // static.group, head % static.group
    piece = _Piece(start, length, source, target, position, is_known, head, key_head, member)
    rows, columns = static.values_here, jnp.arange(static.keys)
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
        if static.steps is not None:
            total += plgpu.load(here.gates.at[piece.key_head, part]).astype(jnp.float32)
        for tap, past in enumerate((*before, x)):
            total += past * plgpu.load(here.taps.at[tap, piece.key_head, part]).astype(jnp.float32)
        parts.append(total * jax.nn.sigmoid(total))
        later.append((*before, x)[-(static.taps - 1) :])
    query, key, value = parts
    is_known = (offset == 0) & (piece.is_known > 0)
    raw = plgpu.load(here.raw_gates.at[token, piece.key_head, piece.member]).astype(jnp.float32)
    decay, step = _decay(static, here, piece, token)
    decayed = state * decay
    if static.steps is None:
        query *= lax.rsqrt(jnp.sum(query * query) + UNIT_EPS) * static.keys**-0.5
        key *= lax.rsqrt(jnp.sum(key * key) + UNIT_EPS)
        difference = (value - jnp.sum(decayed * key[None], axis=1)) * jax.nn.sigmoid(raw)
    else:
        difference = value * step
    state = jnp.where(is_known, state, decayed + difference[:, None] * key[None])
    made = jnp.sum(state * query[None], axis=1)
    rows = static.values_here
    if static.steps is not None:
        plgpu.store(here.out.at[token, piece.head, rows], made + plgpu.load(here.norm.at[piece.head]) * value)
        return tuple(later), state
    gates = channels[2] + (-2 * static.keys if static.is_apart else static.group * static.values)
    gate = plgpu.load(here.gates.at[token, piece.key_head, gates]).astype(jnp.float32)
    made *= lax.rsqrt(jnp.sum(made * made) / static.values + static.eps)
    gate = jax.nn.sigmoid(gate) if static.is_apart else gate * jax.nn.sigmoid(gate)
    made *= plgpu.load(here.norm.at[rows]).astype(jnp.float32) * gate
    plgpu.store(here.out.at[token, piece.head, rows], made.astype(here.out.dtype))
    return tuple(later), state


def _decay(static: _Static, here: _Refs, piece: _Piece, token: Int[Array, ""]) -> tuple[Float[Array, "..."], Any]:
    """What multiplies the state, a number or [1, Dk], and the step that it is of."""
    if static.is_apart:
        columns = jnp.arange(static.keys)
        place, own = (piece.member * static.keys + columns)[None], (piece.head, columns[None])
    else:
        place, own = piece.member + (static.group if static.steps is None else 0), (piece.head,)
    decay = plgpu.load(here.decays.at[token, piece.key_head, place]).astype(jnp.float32)
    decay += plgpu.load(here.decay_bias.at[own])
    soft = jnp.maximum(decay, 0) + jnp.log(1 + jnp.exp(-jnp.abs(decay)))
    if static.steps is not None:
        soft = jnp.minimum(jnp.maximum(soft, static.steps[0]), static.steps[1])
    return jnp.exp(-jnp.exp(plgpu.load(here.decay_rate.at[piece.head])) * soft), soft
