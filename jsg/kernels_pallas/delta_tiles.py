"""A layer of linear attention over tiles of tokens, in two launches of matmuls. See `ops.gated_delta`.

The tokens of a tile have unit queries Q and keys K, values V, strengths b, and decay from any one to a later one; S is
the state before the first:

    T = (I + tril(b K Kᵀ decay, -1))⁻¹        the first launch, for each tile and head
    N = T b (V - decay K S)                   the second, for each piece and head, tile after tile
    output = decay Q S + tril(Q Kᵀ decay) N
    S' = decay S + Kᵀ decay N

A selective scan has N = b V. If each number of a key has a decay, it is inside of the products of queries and keys.

T is found by substitution. Products of powers of the matrix are wrong by ten orders of magnitude where keys are alike.
Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (arXiv:2406.06484).
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas.attention_block import check_addressable, whole_spec
from jsg.kernels_pallas.delta_recurrent import MAX_DIM
from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, PieceTiles, ScanWeights, StateCache
from jsg.kernels_pallas.reference_convolution import last_inputs, owners
from jsg.kernels_pallas.reference_delta import UNIT_EPS, convolved, log_gates
from jsg.kernels_pallas.tile import QUERY_TILE
from jsg.kernels_pallas.tuning import sizes_for

PART = 64
"""The most numbers of a key that are multiplied at a time, so that no operand takes too many registers."""

NUM_PARTS = {"bfloat16": 1, "float16": 2, "float32": 3}
"""How many numbers of bfloat16 are a query, key or value in a model of this type."""


class _Static(NamedTuple):
    """The constants of a call. Each number of a key has a decay (`is_apart`), or a head has one.

    Without `has_delta` values are written as they are, and queries and keys keep their lengths. A number is multiplied
    as `num_parts` of bfloat16, one of a query, key or value as `num_mixed`.
    """

    group: int
    keys: int
    block_v: int
    num_mixed: int
    num_parts: int
    is_apart: bool
    has_delta: bool


def takes(joint: Float[Array, "T K joint"], cache: StateCache, weights: DeltaWeights | ScanWeights) -> bool:
    """Whether the kernels can do these sizes and this type. What they cannot do is what would spill registers."""
    (values, keys), is_scan = cache.states.shape[2:], isinstance(weights, ScanWeights)
    most = 2 * MAX_DIM if is_scan and joint.dtype == jnp.bfloat16 else MAX_DIM
    fits = values % 16 == 0 and keys & (keys - 1) == 0 and 16 <= keys <= most
    return fits and joint.dtype != jnp.float32


def gated_delta(
    joint: Float[Array, "T K joint"],
    raw_gates: Float[Array, "T K gates"],
    weights: DeltaWeights | ScanWeights,
    cache: StateCache,
    pieces: Pieces,
    tiles: PieceTiles,
    apart: GatesApart | None = None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T N Dv"], StateCache]:
    """See `ops.gated_delta`. States are changed in place.

    Raises:
        NotImplementedError: An array is too large.
    """
    check_addressable(cache.states)
    (_, heads, values, keys), (num_tokens, key_heads, _) = cache.states.shape, joint.shape
    sizes, has_delta = sizes_for("delta_tiles", rows=num_tokens), isinstance(weights, DeltaWeights)
    num_mixed = NUM_PARTS[joint.dtype.name]
    is_narrow = keys > MAX_DIM or (num_mixed > 1 and not (has_delta and apart is None))  # more would spill
    block_v = math.gcd(sizes["block_v"] // (1 + is_narrow), values)
    static = _Static(heads // key_heads, keys, block_v, num_mixed, max(num_mixed, 2), apart is not None, has_delta)
    call = functools.partial(pl.pallas_call, interpret=interpret)
    mixed, gate = jnp.split(joint, [weights.taps.shape[2]], axis=-1)
    piece, offset = owners(pieces, num_tokens)
    is_known = (offset == 0) & (pieces.is_known[piece] > 0)
    gates = log_gates(raw_gates, weights, apart)
    decay, strength = (jnp.where(is_known.reshape(-1, *[1] * (x.ndim - 1)), 0, x) for x in gates)
    made = jnp.stack(_parts(static.num_mixed, convolved(mixed, weights, cache, pieces), rounded=_rounded))
    read, num_tiles = (made, decay, strength, tiles.starts, tiles.lens), len(tiles.starts)
    shapes = [
        jax.ShapeDtypeStruct((static.num_parts, num_tokens, heads, (1 + has_delta) * QUERY_TILE), jnp.bfloat16),
        jax.ShapeDtypeStruct((3, num_tokens, heads), jnp.float32),
        jax.ShapeDtypeStruct((num_tiles, heads, *decay.shape[2:]), jnp.float32),
    ]
    if apart is not None:
        shapes.append(jax.ShapeDtypeStruct((static.num_parts, 3, num_tokens, heads, keys), jnp.bfloat16))
    prepared = call(
        functools.partial(delta_inverse_kernel, static),
        grid=(num_tiles, heads),
        in_specs=[whole_spec(x) for x in read],
        out_specs=[whole_spec(x) for x in shapes],
        out_shape=shapes,
        compiler_params=plgpu.CompilerParams(num_warps=sizes["inverse_warps"], num_stages=1),
    )(*read)
    read = (made, *prepared, *tiles, *pieces)
    squares = jax.ShapeDtypeStruct((values // block_v, num_tokens, heads), jnp.float32)
    out_type = joint.dtype if has_delta else jnp.float32
    written = [jax.ShapeDtypeStruct((num_tokens, heads, values), out_type), squares, cache.states]
    out, squares, states = call(
        functools.partial(delta_tiles_kernel, static),
        grid=(len(pieces.lens), heads, values // block_v),
        in_specs=[whole_spec(x) for x in (*read, cache.states)],
        out_specs=[whole_spec(x) for x in written],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in written],
        input_output_aliases={len(read): 2},
        compiler_params=plgpu.CompilerParams(num_warps=sizes["num_warps"], num_stages=sizes["num_stages"]),
    )(*read, cache.states)
    if isinstance(weights, ScanWeights):
        value = jnp.sum(made[..., 2 * keys :].astype(jnp.float32), axis=0).reshape(out.shape)
        out += weights.skip[:, None] * value
    else:
        factor = lax.rsqrt(sum(squares) / values + weights.eps)[..., None] * weights.norm.astype(jnp.float32)
        gate, activation = (gate, jax.nn.silu) if apart is None else (apart.output, jax.nn.sigmoid)
        out = out * factor * activation(gate.astype(jnp.float32)).reshape(out.shape)
    is_real = (jnp.arange(num_tokens) < jnp.sum(pieces.lens))[:, None, None]
    out = jnp.where(is_real, out, 0).astype(out_type)
    return out, StateCache(last_inputs(mixed, cache.inputs, pieces), states)


def delta_inverse_kernel(static: _Static, *refs: jax.Ref) -> None:
    """One program: what does not depend on the state, of a tile in one value head. T is found row after row.

    Results, the first and the last in parts (`_parts`): for each token how its output weighs what the tile writes, and
    behind it its row of T, each number times the strength of its token. Three factors: of what is known of its key in
    the state before, of what its query finds there, and of what it writes in the state after; without T that has the
    strength, as the weights have. The decay of the state. And if each number of a key has a decay, which is in no
    factor then: its query and key as they meet the state before, and its key as it is written.

    Grid: (tiles, N). Blocks: all arrays stay in device memory. Owns: what belongs to its tile, and nothing else.

    Masked: tokens past the last of the tile, by loads of zeros.
    """
    mixed, decays, strengths, starts, lens, rows, out, ends, *faded = refs
    tile, head = pl.program_id(0), pl.program_id(1)
    length = plgpu.load(lens.at[tile])

    @pl.when(length > 0)
    def _() -> None:
        row, start = jnp.arange(QUERY_TILE), plgpu.load(starts.at[tile])
        token, is_live, is_same = start + row, row < length, row[:, None] == row[None]
        is_later, is_before = row[:, None] > row[None], row[:, None] >= row[None]
        width = min(static.keys, 16 if static.is_apart else PART if static.num_mixed == 1 else PART // 2)
        count = jnp.int32(static.keys // width)
        ones, zeros = jnp.ones(QUERY_TILE, jnp.float32), jnp.zeros((QUERY_TILE, QUERY_TILE), jnp.float32)

        def load(ref: jax.Ref, *place: Any) -> Float[Array, "t n"]:
            return plgpu.load(ref.at[place], mask=is_live[:, None], other=0)

        def mixed_parts(columns: Int[Array, " n"]) -> list[Float[Array, "t n"]]:
            place = token[:, None], head // static.group, columns[None]
            return [load(mixed, part, *place) for part in range(static.num_mixed)]

        def store(ref: jax.Ref, before: tuple[int, ...], columns: Int[Array, " n"], x: Float[Array, "t n"]) -> None:
            for index, each in enumerate(_parts(static.num_parts, x)):
                place = (index, *before, token[:, None], head, columns[None])
                plgpu.store(ref.at[place], each, mask=is_live[:, None])

        def one_part(number: Int[Array, ""], sums: tuple[Any, ...]) -> tuple[Any, ...]:
            weights, matrix, *squares = sums
            part = number * width + jnp.arange(width)
            query, key = (mixed_parts(part + first) for first in (0, static.keys))
            wide = _whole(query), _whole(key)
            squares = [before + jnp.sum(x * x, axis=1) for before, x in zip(squares, wide, strict=True)]
            if not static.is_apart:
                weights += _dot(static, query, key, trans_b=True)
                matrix += _dot(static, key, key, trans_b=True) if static.has_delta else 0
                return weights, matrix, *squares
            decay = load(decays, token[:, None], head, part[None])
            weights += jnp.where(is_same, jnp.sum(wide[0] * wide[1], axis=1)[:, None], 0)
            add = functools.partial(_add_halves, static, (query, key), decay)
            levels = jnp.int32(QUERY_TILE.bit_length() - 1)
            return *lax.fori_loop(jnp.int32(0), levels, add, (weights, matrix)), *squares

        def keep(number: Int[Array, ""], none: None) -> None:
            part = number * width + jnp.arange(width)
            decay = load(decays, token[:, None], head, part[None])
            plgpu.store(ends.at[tile, head, part], jnp.exp(jnp.sum(decay, axis=0)))
            for which, first, sees in ((0, 0, is_before), (1, static.keys, is_before), (2, static.keys, ~is_before)):
                store(faded[0], (which,), part, _whole(mixed_parts(part + first)) * _fade(static, sees, decay))

        if static.is_apart:
            lax.fori_loop(jnp.int32(0), count, keep, None)
        sums = (zeros, zeros, ones * 0, ones * 0)
        weights, matrix, *squares = lax.fori_loop(jnp.int32(0), count, one_part, sums)
        strength = plgpu.load(strengths.at[token, head], mask=is_live, other=0)
        begin = until_end = query_unit = key_unit = ones
        if not static.is_apart:
            decay = plgpu.load(decays.at[token, head], mask=is_live, other=0)
            begin = jnp.exp(jnp.cumsum(decay))
            plgpu.store(ends.at[tile, head], jnp.exp(jnp.sum(decay)))
            since = jnp.where(is_later, decay[:, None], 0)  # summed from token to token: differences would cancel
            until_end, since = jnp.exp(jnp.sum(since, axis=0)), jnp.exp(jnp.cumsum(since, axis=0))
            weights, matrix = weights * since, matrix * since
        if static.has_delta:
            query_unit, key_unit = (lax.rsqrt(each + UNIT_EPS) for each in squares)
            query_unit *= static.keys**-0.5
        else:
            until_end, weights = until_end * strength, weights * strength[None]
        for index, numbers in enumerate((key_unit * begin, query_unit * begin, key_unit * until_end)):
            plgpu.store(out.at[index, token, head], numbers, mask=is_live)
        store(rows, (), row, jnp.where(is_before, weights * query_unit[:, None] * key_unit[None], 0))
        if not static.has_delta:
            return
        matrix = jnp.where(is_later, matrix * (key_unit * strength)[:, None] * key_unit[None], 0)

        def one_row(index: Int[Array, ""], solved: Float[Array, "t t"]) -> Float[Array, "t t"]:
            is_row = (row == index)[:, None]
            numbers = jnp.sum(jnp.where(is_row, matrix, 0), axis=0)
            return jnp.where(is_row, solved - jnp.sum(numbers[:, None] * solved, axis=0)[None], solved)

        solved = lax.fori_loop(jnp.int32(1), length, one_row, is_same.astype(jnp.float32))
        store(rows, (), QUERY_TILE + row, solved * strength[None])


def _add_halves(
    static: _Static,
    pair: tuple[list[Float[Array, "t part"]], list[Float[Array, "t part"]]],
    decay: Float[Array, "t part"],
    level: Int[Array, ""],
    sums: tuple[Float[Array, "t t"], Float[Array, "t t"]],
) -> tuple[Float[Array, "t t"], Float[Array, "t t"]]:
    """Products of queries and keys with the keys of earlier tokens, of which each number has a decay of its own.

    The tile is cut into runs of 2 ** level tokens, and the pairs are those of a run with the run before it, if that
    begins at an even place. All levels have each pair once. Both decay to the border between the runs: each exponent
    is a sum of decays, and none is above zero.
    """
    row = jnp.arange(QUERY_TILE)
    run = row >> level
    is_second, is_own = (run & 1 == 1)[:, None], run[:, None] == run[None]
    between = is_own & (is_second == (row[:, None] >= row[None]))
    fade, (weights, matrix) = _fade(static, between, decay), sums
    query, key = (_whole(x) * fade for x in pair)
    is_pair = is_second & (run[:, None] == run[None] + 1)
    weights += jnp.where(is_pair, _dot(static, query, key, trans_b=True), 0)
    return weights, matrix + jnp.where(is_pair, _dot(static, key, key, trans_b=True), 0)


def _fade(static: _Static, sees: Bool[Array, "t t"], decay: Float[Array, "t part"]) -> Float[Array, "t part"]:
    """The decay by all tokens that each token sees."""
    return jnp.exp(_dot(static, sees.astype(jnp.bfloat16), decay))


def delta_tiles_kernel(static: _Static, *refs: jax.Ref) -> None:
    """One program: a piece in `block_v` numbers of the values of a head, tile after tile.

    Grid: (pieces, N, Dv / block_v). Blocks: all arrays stay in device memory. The state, [block_v, Dk] in parts, is in
    registers from the first tile to the last.

    Owns: its rows of the state in the target, and its part of the outputs of its tokens and of the sums of their
    squares.

    Masked: tokens past the last of a tile, by loads of zeros, and the state before position 0, by `where`, because a
    slot may hold anything.
    """
    mixed, weights, factors, ends, *others = refs
    faded, others = others[: static.is_apart], others[static.is_apart :]
    starts, lens, firsts, *fields, _aliased, out, squares, states = others
    index, head, block = (pl.program_id(axis) for axis in range(3))
    _start, length, source, target, position, is_known = (plgpu.load(field.at[index]) for field in fields)
    key_head, member = head // static.group, head % static.group
    width = min(static.keys, PART)
    columns = [first + jnp.arange(width) for first in range(0, static.keys, width)]
    row, value = jnp.arange(QUERY_TILE), block * static.block_v + jnp.arange(static.block_v)

    def one_tile(number: Int[Array, ""], state: tuple[Float[Array, "v part"], ...]) -> tuple[Any, ...]:
        tile = plgpu.load(firsts.at[index]) + number
        start, count = plgpu.load(starts.at[tile]), plgpu.load(lens.at[tile])
        token, is_live = start + row, row < count

        def load(
            ref: jax.Ref, axis: Int[Array, ""], columns: Int[Array, " n"], *before: int
        ) -> list[Float[Array, "t n"]]:
            places = [(i, *before, token[:, None], axis, columns[None]) for i in range(len(ref))]
            return [plgpu.load(ref.at[place], mask=is_live[:, None], other=0) for place in places]

        def factor(which: int) -> Float[Array, "t 1"]:
            return plgpu.load(factors.at[which, token, head], mask=is_live, other=0)[:, None]

        def operand(which: int, part: Int[Array, " part"]) -> list[Float[Array, "t part"]]:
            """Queries, keys that meet the state, or keys that are written."""
            if static.is_apart:
                return load(faded[0], head, part, which)
            return load(mixed, key_head, min(which, 1) * static.keys + part)

        def product(which: int) -> Float[Array, "t v"]:
            pairs = zip(columns, state, strict=True)
            found = [_dot(static, operand(which, part), x, trans_b=True) for part, x in pairs]
            return functools.reduce(operator.add, found) * factor(1 - which)

        # each operand is loaded just before its product, because it would wait in registers
        made = product(0)
        new = load(mixed, key_head, 2 * static.keys + member * states.shape[2] + value)
        if static.has_delta:
            new = _dot(static, load(weights, head, QUERY_TILE + row), _whole(new) - product(1))
        made += _dot(static, load(weights, head, row), new)
        plgpu.store(out.at[token[:, None], head, value[None]], made.astype(out.dtype), mask=is_live[:, None])
        plgpu.store(squares.at[block, token, head], jnp.sum(made * made, axis=1), mask=is_live)
        new, after = _whole(new) * factor(2), []
        for part, x in zip(columns, state, strict=True):
            decay = plgpu.load(ends.at[(tile, head, part[None])[: ends.ndim]])
            after.append(x * decay + _dot(static, new, operand(2, part), trans_a=True))
        return tuple(after)

    @pl.when(length > 0)
    def _() -> None:
        is_begun = (position > 0) | (is_known > 0)
        places = [(head, value[:, None], part[None]) for part in columns]
        before = tuple(jnp.where(is_begun, plgpu.load(states.at[(source, *place)]), 0) for place in places)
        count = (length + QUERY_TILE - 1) // QUERY_TILE
        after = lax.fori_loop(jnp.int32(0), count, one_tile, before)
        for place, part in zip(places, after, strict=True):
            plgpu.store(states.at[(target, *place)], part)


type _Operand = Float[Array, "_ _"] | list[Float[Array, "_ _"]]
"""A matrix of float32, or its parts."""


def _dot(static: _Static, x: _Operand, y: _Operand, **transposed: bool) -> Float[Array, "m n"]:
    """A product of tensor cores, summed in float32. Of parts it leaves out those that are too small to matter."""
    x, y = (each if isinstance(each, list) else _parts(static.num_parts, each) for each in (x, y))
    pairs = itertools.product(enumerate(x), enumerate(y))
    products = [plgpu.dot(a, b, **transposed) for (i, a), (j, b) in pairs if i + j < static.num_parts]
    return functools.reduce(operator.add, products)


def _parts(
    count: int, x: Float[Array, "*shape"], *, rounded: Callable[[Array], Array] = lambda x: x
) -> list[Float[Array, "*shape"]]:
    """Numbers of bfloat16 that sum up to these, the largest first."""
    found = []
    for _ in range(count if x.dtype == jnp.float32 else 1):
        found.append(rounded(x).astype(jnp.bfloat16))
        x -= found[-1].astype(x.dtype)
    return found


def _rounded(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The same in bfloat16. XLA leaves out a rounding that is none by name, in kernels it does not."""
    return lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def _whole(x: _Operand) -> Float[Array, "_ _"]:
    """The numbers in float32."""
    return functools.reduce(operator.add, (each.astype(jnp.float32) for each in (x if isinstance(x, list) else [x])))
