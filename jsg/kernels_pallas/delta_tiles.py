"""A layer of the gated delta rule over tiles of tokens, in two launches of matmuls. See `ops.gated_delta`.

The tokens of a tile have unit queries Q and keys K, values V, strengths b, and decay from any one to a later one; S is
the state before the first:

    T = (I + tril(b K Kᵀ decay, -1))⁻¹        the first launch, for each tile and head
    N = T b (V - decay K S)                   the second, for each piece and head, tile after tile
    output = decay Q S + tril(Q Kᵀ decay) N
    S' = decay S + Kᵀ decay N

T is found by substitution. Products of powers of the matrix are wrong by ten orders of magnitude where keys are alike.
Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv:2406.06484).
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.attention_block import check_addressable, whole_spec
from jsg.kernels_pallas.delta_recurrent import MAX_DIM
from jsg.kernels_pallas.inputs import DeltaWeights, Pieces, PieceTiles, StateCache
from jsg.kernels_pallas.reference_convolution import last_inputs, owners
from jsg.kernels_pallas.reference_delta import UNIT_EPS, convolved, log_gates
from jsg.kernels_pallas.tile import QUERY_TILE
from jsg.kernels_pallas.tuning import sizes_for

PART = 64
"""The most numbers of a key that are multiplied at a time, so that no operand takes too many registers."""


class _Static(NamedTuple):
    """The constants of a call."""

    group: int
    keys: int
    block_v: int


def takes(joint: Float[Array, "T K joint"], cache: StateCache) -> bool:
    """Whether the kernels can do these sizes and this type: tensor cores are not exact enough for float32."""
    widths = cache.states.shape[2:]
    return joint.dtype != jnp.float32 and all(width & (width - 1) == 0 and 16 <= width <= MAX_DIM for width in widths)


def gated_delta(
    joint: Float[Array, "T K joint"],
    raw_gates: Float[Array, "T K gates"],
    weights: DeltaWeights,
    cache: StateCache,
    pieces: Pieces,
    tiles: PieceTiles,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T N Dv"], StateCache]:
    """See `ops.gated_delta`. States are changed in place.

    Raises:
        NotImplementedError: An array is too large.
    """
    check_addressable(cache.states)
    (_, heads, values, keys), (num_tokens, key_heads, _) = cache.states.shape, joint.shape
    sizes = sizes_for("delta_tiles", rows=num_tokens)
    static = _Static(heads // key_heads, keys, min(sizes["block_v"], values))
    call = functools.partial(pl.pallas_call, interpret=interpret)
    mixed, gate = jnp.split(joint, [weights.taps.shape[2]], axis=-1)
    piece, offset = owners(pieces, num_tokens)
    is_known = ((offset == 0) & (pieces.is_known[piece] > 0))[:, None]
    decay, strength = (jnp.where(is_known, 0, x) for x in log_gates(raw_gates, weights))
    made = convolved(mixed, weights, cache, pieces).astype(joint.dtype)
    read = (made, decay, strength, tiles.starts, tiles.lens)
    dims = (num_tokens, heads, 2 * QUERY_TILE), (4, num_tokens, heads)
    shapes = [jax.ShapeDtypeStruct(each, jnp.float32) for each in dims]
    prepared = call(
        functools.partial(delta_inverse_kernel, static),
        grid=(len(tiles.starts), heads),
        in_specs=[whole_spec(x) for x in read],
        out_specs=[whole_spec(x) for x in shapes],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=sizes["inverse_warps"], num_stages=1),
    )(*read)
    read = (made, *prepared, *tiles, *pieces)
    squares = jax.ShapeDtypeStruct((values // static.block_v, num_tokens, heads), jnp.float32)
    written = [jax.ShapeDtypeStruct((num_tokens, heads, values), joint.dtype), squares, cache.states]
    out, squares, states = call(
        functools.partial(delta_tiles_kernel, static),
        grid=(len(pieces.lens), heads, values // static.block_v),
        in_specs=[whole_spec(x) for x in (*read, cache.states)],
        out_specs=[whole_spec(x) for x in written],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written],
        input_output_aliases={len(read): 2},
        compiler_params=plgpu.CompilerParams(num_warps=sizes["num_warps"], num_stages=sizes["num_stages"]),
    )(*read, cache.states)
    factor = lax.rsqrt(sum(squares) / values + weights.eps)[..., None] * weights.norm.astype(jnp.float32)
    gate = jax.nn.silu(gate.astype(jnp.float32)).reshape(out.shape)
    is_real = (jnp.arange(num_tokens) < jnp.sum(pieces.lens))[:, None, None]
    out = jnp.where(is_real, out * factor * gate, 0).astype(joint.dtype)
    return out, StateCache(last_inputs(mixed, cache.inputs, pieces), states)


def delta_inverse_kernel(static: _Static, *refs: jax.Ref) -> None:
    """One program: what does not depend on the state, of a tile in one value head. T is found row after row.

    Results: for each token its row of T, each number times the strength of its token, and behind it how its output
    weighs what the tile writes. And four factors: of what is known of its key in the state before, of what its query
    finds there, of what it writes in the state after, and the decay from before the tile on.

    Grid: (tiles, N). Blocks: all arrays stay in device memory. Owns: the rows of its tokens, and no others.

    Masked: tokens past the last of the tile, by loads of zeros.
    """
    mixed, decays, strengths, starts, lens, rows, out = refs
    tile, head = pl.program_id(0), pl.program_id(1)
    length = plgpu.load(lens.at[tile])

    @pl.when(length > 0)
    def _() -> None:
        row, column, key_head = jnp.arange(QUERY_TILE), jnp.arange(static.keys), head // static.group
        token, is_live = plgpu.load(starts.at[tile]) + row, row < length
        query, key = (
            plgpu.load(mixed.at[token[:, None], key_head, part[None]], mask=is_live[:, None], other=0)
            for part in (column, static.keys + column)
        )
        decay, strength = (plgpu.load(x.at[token, head], mask=is_live, other=0) for x in (decays, strengths))
        is_later, begin = row[:, None] > row[None], jnp.exp(jnp.cumsum(decay))
        since = jnp.where(is_later, decay[:, None], 0)  # summed from token to token: differences of sums would cancel
        until_end, since = jnp.exp(jnp.sum(since, axis=0)), jnp.exp(jnp.cumsum(since, axis=0))
        query_unit, key_unit = _unit(query) * static.keys**-0.5, _unit(key)
        factors = key_unit * begin, query_unit * begin, key_unit * until_end, begin
        for index, numbers in enumerate(factors):
            plgpu.store(out.at[index, token, head], numbers, mask=is_live)
        weights = _dot(query, key, trans_b=True) * query_unit[:, None] * key_unit[None]
        weights = jnp.where(row[:, None] >= row[None], weights * since, 0)
        plgpu.store(rows.at[token[:, None], head, QUERY_TILE + row[None]], weights, mask=is_live[:, None])
        matrix = _dot(key, key, trans_b=True) * (key_unit * strength)[:, None] * key_unit[None]
        matrix = jnp.where(is_later, matrix * since, 0)

        def one_row(index: Int[Array, ""], solved: Float[Array, "t t"]) -> Float[Array, "t t"]:
            is_row = (row == index)[:, None]
            numbers = jnp.sum(jnp.where(is_row, matrix, 0), axis=0)
            return jnp.where(is_row, solved - jnp.sum(numbers[:, None] * solved, axis=0)[None], solved)

        solved = (row[:, None] == row[None]).astype(jnp.float32)
        solved = lax.fori_loop(jnp.int32(1), length, one_row, solved) * strength[None]
        plgpu.store(rows.at[token[:, None], head, row[None]], solved, mask=is_live[:, None])


def delta_tiles_kernel(static: _Static, *refs: jax.Ref) -> None:
    """One program: a piece in `block_v` numbers of the values of a head, tile after tile.

    Grid: (pieces, N, Dv / block_v). Blocks: all arrays stay in device memory. The state, [block_v, Dk] in parts, is in
    registers from the first tile to the last.

    Owns: its rows of the state in the target, and its part of the outputs of its tokens and of the sums of their
    squares.

    Masked: tokens past the last of a tile, by loads of zeros, and the state before position 0, by `where`, because a
    slot may hold anything.
    """
    mixed, weights, factors, starts, lens, firsts, *fields, _aliased, out, squares, states = refs
    index, head, block = (pl.program_id(axis) for axis in range(3))
    _start, length, source, target, position, is_known = (plgpu.load(field.at[index]) for field in fields)
    key_head, member = head // static.group, head % static.group
    row, width = jnp.arange(QUERY_TILE), min(static.keys, PART)
    parts = [first + jnp.arange(width) for first in range(0, static.keys, width)]
    value = block * static.block_v + jnp.arange(static.block_v)

    def one_tile(number: Int[Array, ""], state: tuple[Float[Array, "v part"], ...]) -> tuple[Any, ...]:
        tile = plgpu.load(firsts.at[index]) + number
        start, count = plgpu.load(starts.at[tile]), plgpu.load(lens.at[tile])
        token, is_live = start + row, row < count

        def rows(ref: jax.Ref, axis: Int[Array, ""], columns: Int[Array, " n"]) -> Float[Array, "t n"]:
            return plgpu.load(ref.at[token[:, None], axis, columns[None]], mask=is_live[:, None], other=0)

        def product(left: Sequence[Float[Array, "t part"]]) -> Float[Array, "t v"]:
            products = [_dot(x, part, trans_b=True) for x, part in zip(left, state, strict=True)]
            return functools.reduce(operator.add, products)

        # each operand is loaded just before its product, because it would wait in registers
        known, found, left = (plgpu.load(factors.at[i, token, head], mask=is_live, other=0)[:, None] for i in range(3))
        made = product([rows(mixed, key_head, part) for part in parts]) * found
        key = [rows(mixed, key_head, static.keys + part) for part in parts]
        given = rows(mixed, key_head, 2 * static.keys + member * states.shape[2] + value).astype(jnp.float32)
        given -= product(key) * known
        new = _dot(rows(weights, head, row), given)
        made += _dot(rows(weights, head, QUERY_TILE + row), new)
        plgpu.store(out.at[token[:, None], head, value[None]], made.astype(out.dtype), mask=is_live[:, None])
        plgpu.store(squares.at[block, token, head], jnp.sum(made * made, axis=1), mask=is_live)
        decay, new = plgpu.load(factors.at[jnp.int32(3), start + count - 1, head]), new * left
        return tuple(part * decay + _dot(new, x, trans_a=True) for x, part in zip(key, state, strict=True))

    @pl.when(length > 0)
    def _() -> None:
        is_begun = (position > 0) | (is_known > 0)
        places = [(head, value[:, None], part[None]) for part in parts]
        before = tuple(jnp.where(is_begun, plgpu.load(states.at[(source, *place)]), 0) for place in places)
        count = (length + QUERY_TILE - 1) // QUERY_TILE
        after = lax.fori_loop(jnp.int32(0), count, one_tile, before)
        for place, part in zip(places, after, strict=True):
            plgpu.store(states.at[(target, *place)], part)


def _unit(x: Float[Array, "t k"]) -> Float[Array, " t"]:
    """What makes each row a unit vector."""
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=1) + UNIT_EPS)


def _dot(x: Float[Array, "a b"], y: Float[Array, "c d"], **transposed: bool) -> Float[Array, "m n"]:
    """A product, summed in float32.

    Tensor cores take the first 11 bits of float32 (tf32). Where one operand is in bfloat16, as queries and keys of a
    model are, the other is cut into two numbers of this type, 16 bits in all.
    """
    if x.dtype != y.dtype and jnp.bfloat16 in (x.dtype, y.dtype):
        products = [plgpu.dot(a, b, **transposed) for a in _parts(x) for b in _parts(y)]
        return products[0] + products[1]
    dtype = jnp.promote_types(x.dtype, y.dtype)
    return plgpu.dot(x.astype(dtype), y.astype(dtype), allow_tf32=True, **transposed)


def _parts(x: Float[Array, "a b"]) -> tuple[Float[Array, "a b"], ...]:
    """Numbers of bfloat16 that sum up to these."""
    if x.dtype == jnp.bfloat16:
        return (x,)
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(x.dtype)).astype(jnp.bfloat16)
