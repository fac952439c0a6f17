"""The code that the attention kernels share: an online softmax over the pages of one request, in a Pallas kernel.

Triton needs sizes that are powers of two and matmuls of at least 16 rows. So a query block is `[M, H]` with both padded
(`padded_rows`, `padded_head_dim`). The results of padding rows are not stored, and padding dimensions are zeros.

The online softmax is that of Milakov and Gimelshein (2018) and Dao et al. (FlashAttention, 2022), in base 2.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas.inputs import Scoring
from jsg.kernels_pallas.tile import MAX_POOL_ELEMENTS
from jsg.kernels_pallas.tuning import stages_in_memory
from jsg.window import Window

MIN_ROWS = 16
MAX_HEAD_DIM = 512
"""The most numbers of a key, or of those that are its value too if there are others."""
MAX_OTHER_DIM = 256
"""The most numbers of a key that are not its value, if others are."""
LOWEST = -1e30
KEY_BYTES = 256
"""The bytes of a key that block sizes are chosen for: 128 dimensions of bfloat16."""
LATENT_BYTES = 2048
"""Those of a key whose first numbers are its value, rounded up to a power of two: 512 and 64 of bfloat16."""
REGISTER_HEAD_DIM = 128
"""The dimensions of a head that the number of warps is chosen for."""
LANE_BYTES = 16
"""Bytes of shared memory for each row through which warps find its largest score and its sum."""
LOG2_E = math.log2(math.e)

Ref = Any
"""A Pallas reference to an array in the device's memory. Pallas has no type for the arguments of a kernel."""


class Attended(NamedTuple):
    """Attention with its log-sum-exp, by which results over different keys can be joined.

    Attributes:
        out: In the queries' dtype; zeros for a token that sees nothing.
        lse: Natural logarithm of the sum of exponentials of a token's scores, its sink among them; -inf if there is
            none.
    """

    out: Float[Array, "T N H"]
    lse: Float[Array, "T N"]


class Softmax(NamedTuple):
    """State of an online softmax over some keys, in base 2.

    Attributes:
        weighted: The sum of the values, each times two to the power of its score minus `largest`.
        largest: The largest score; `LOWEST` if no key was seen.
        total: The sum of those powers; 0 if no key was seen.
    """

    weighted: Float[Array, "M H"]
    largest: Float[Array, " M"]
    total: Float[Array, " M"]


class _Carry(NamedTuple):
    """The state that one block of keys hands to the next.

    The pages of a block are loaded one iteration ahead. If they were loaded in the same iteration, the compiler could
    not fetch keys ahead: with three stages it would keep one block in shared memory and wait for it.
    """

    state: Softmax
    page: Int[Array, " S"]


def padded_rows(rows: int) -> int:
    """The number of rows that a query block of `rows` rows gets: a power of two, at least 16."""
    return max(MIN_ROWS, pl.next_power_of_2(rows))


def padded_head_dim(head_dim: int) -> int:
    """The number of dimensions that a block of heads gets: a power of two. 80 and 96 become 128."""
    return pl.next_power_of_2(head_dim)


def columns_of(head_dim: int, value_dim: int | None) -> tuple[tuple[int, int], ...]:
    """The blocks in which a key is read, each as its first column and its width.

    There are two if a key has its value within it, for then its width is no power of two: its value, and the others.
    """
    return ((0, head_dim),) if value_dim in (None, head_dim) else ((0, value_dim), (value_dim, head_dim - value_dim))


def check_supported(keys: Float[Array, "P page_size K H"], value_dim: int | None = None) -> None:
    """Raises NotImplementedError if the kernels cannot read a pool of this shape."""
    widths = [width for _, width in columns_of(keys.shape[3], value_dim)]
    most = (MAX_HEAD_DIM, MAX_OTHER_DIM)[: len(widths)]
    if any(width % 16 or width > limit for width, limit in zip(widths, most, strict=True)):
        wanted, found = (" + ".join(map(str, each)) for each in (most, widths))
        raise NotImplementedError(
            f"the Triton attention kernels want a head_dim that is a multiple of 16 and at most {wanted}, "
            f"but got {found}; the implementation 'reference' takes any"
        )
    check_addressable(keys)


def check_addressable(pool: Float[Array, "P page_size K H"]) -> None:
    """Raises NotImplementedError if the kernels' integers cannot hold an offset into a pool of this shape."""
    if pool.size > MAX_POOL_ELEMENTS and pool.size * pool.dtype.itemsize <= 2 * MAX_POOL_ELEMENTS:
        raise NotImplementedError(
            f"the Triton kernels address {MAX_POOL_ELEMENTS} numbers of a pool of {pool.dtype.name}, but got "
            f"{pool.size}; the implementation 'reference' takes any"
        )


def keys_in_block(
    block_k: int,
    queries: Float[Array, "T N H"],
    keys: Float[Array, "P page_size K H"],
    value_dim: int | None = None,
) -> int:
    """`block_k`, or fewer if a key has more than `KEY_BYTES`, so that the blocks in flight fit in shared memory."""
    num_bytes = padded_head_dim(keys.shape[3]) * max(queries.dtype.itemsize, keys.dtype.itemsize)
    most = KEY_BYTES if value_dim is None else LATENT_BYTES
    return max(MIN_ROWS, block_k * most // max(num_bytes, most))


def parts_of_group(group: int, most: int) -> int:
    """Into how many equal parts the query heads of a kv head are divided, each of at most `most`."""
    return next(parts for parts in range(pl.cdiv(group, most), group + 1) if group % parts == 0)


def shared_bytes(
    rows: int,
    block_k: int,
    num_stages: int,
    queries: Float[Array, "T N H"],
    keys: Float[Array, "P page_size K H"],
    value_dim: int | None = None,
) -> int:
    """The bytes of shared memory that a program of `attend` takes, or somewhat more.

    Its query block, the blocks of keys and values in flight, one of them in the type of the matmul if that is another,
    the weights between the two matmuls, and what warps tell each other.
    """
    head_dim = sum(padded_head_dim(width) for _, width in columns_of(keys.shape[3], value_dim))
    product, stored = matmul_dtype(queries.dtype, keys.dtype).itemsize, keys.dtype.itemsize
    block = keys_in_block(block_k, queries, keys, value_dim)
    in_flight = (2 if value_dim is None else 1) * stages_in_memory(num_stages, rows) * block * head_dim * stored
    converted = block * head_dim * product if stored < product else 0
    return rows * head_dim * product + in_flight + converted + rows * block * product + rows * LANE_BYTES


def warps_for(num_warps: int, head_dim: int) -> int:
    """The warps of a program of many rows: `num_warps`, or twice as many if sums of heads would not fit in registers.

    Of four times as many each would have too few registers, compiled for an H200 with heads of 512.
    """
    return num_warps * (2 if padded_head_dim(head_dim) > REGISTER_HEAD_DIM else 1)


def pool_spec(pool: Float[Array, "P page_size K H"], head_axis: int, parts: int = 1) -> pl.BlockSpec:
    """One kv head of the whole pool in device memory.

    It is that of the program's index on `head_axis`, on which `parts` programs have the query heads of a kv head.
    """
    pages, page_size, _, head_dim = pool.shape
    return pl.BlockSpec(
        (pages, page_size, None, head_dim), lambda *program: (0, 0, lax.div(program[head_axis], parts), 0)
    )


def load_query(
    queries: Ref, rows: tuple[Int[Array, "M 1"], ...], is_row: Bool[Array, " M"], value_dim: int
) -> tuple[Float[Array, "M _"], ...]:
    """Rows of `[*rows, H]` in the blocks of `columns_of`; what does not exist is zeros."""
    found = []
    for first, width in columns_of(queries.shape[-1], value_dim):
        dim = jnp.arange(padded_head_dim(width))[None, :]
        found.append(plgpu.load(queries.at[(*rows, first + dim)], mask=is_row[:, None] & (dim < width), other=0.0))
    return tuple(found)


def store_rows(
    out: Ref, rows: tuple[Int[Array, "M 1"], ...], is_row: Bool[Array, " M"], found: Float[Array, "M H"]
) -> None:
    """Writes rows of `[*rows, H]` that exist, without their padding."""
    dim = jnp.arange(found.shape[1])[None, :]
    plgpu.store(out.at[(*rows, dim)], found.astype(out.dtype), mask=is_row[:, None] & (dim < out.shape[-1]))


def load_sinks(sinks: Sequence[Ref], head: Int[Array, " M"], is_head: Bool[Array, " M"]) -> Float[Array, " M"] | None:
    """The sink of each row of a query block, `[G]` being those of the kv head; None if there are no sinks."""
    return plgpu.load(sinks[0].at[head], mask=is_head, other=-jnp.inf) if sinks else None


def whole_spec(array: Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """A whole array in device memory."""
    return pl.BlockSpec(array.shape, lambda *_: (0,) * array.ndim)


def attend(
    query: tuple[Float[Array, "M _"], ...],
    pools: Sequence[Ref],
    page_table: Ref,
    row: Int[Array, ""],
    first: Int[Array, ""] | int,
    last: Int[Array, ""],
    *,
    scoring: Scoring,
    block_k: int,
    value_dim: int,
    query_positions: Int[Array, " M"] | None = None,
) -> Softmax:
    """Softmax attention of a block of queries to positions `first` to `last` - 1 of one request. For use in kernels.

    It goes over blocks of `block_k` positions that begin at multiples of it, so the same keys are summed together
    whatever `first` and `last` are. Positions outside of the range are masked and read from page 0, the dump, which is
    always zeros, so no stale page-table entry is used. The contents of pages are not masked otherwise: values are
    finite, and a key that is NaN reaches only the tokens that see it, because scores are masked after the matmul.

    Args:
        query: M rows of requests that share these keys: see `load_query`.
        pools: Keys `[P, page_size, H]` of one kv head, and their values unless these are the first numbers of keys.
        page_table: `[R, C]`, whole.
        row: The request row whose pages are read.
        first: The first position that any query sees.
        last: The position after the last one that any query sees.
        scoring: Scale, window and soft-cap. The window counts only together with `query_positions`.
        block_k: Keys per iteration; a power of two, at least 16.
        value_dim: The numbers of a value.
        query_positions: The last position that each row sees, for causal attention. With None all rows see the range.
    """
    keys, page_size = pools[0], pools[0].shape[1]
    product, columns = matmul_dtype(query[0].dtype, keys.dtype), columns_of(keys.shape[2], value_dim)
    query, rows = tuple(part.astype(product) for part in query), len(query[0])
    to_base_2 = LOG2_E * (scoring.scale if scoring.softcap is None else scoring.softcap)

    def positions_of(index: Int[Array, ""]) -> tuple[Int[Array, " S"], Bool[Array, " S"]]:
        position = index * block_k + jnp.arange(block_k)
        return position, (position >= first) & (position < last)

    def pages_of(index: Int[Array, ""]) -> Int[Array, " S"]:
        position, in_range = positions_of(index)
        return plgpu.load(page_table.at[row, lax.div(position, page_size)], mask=in_range, other=0)

    def one_block(index: Int[Array, ""], carry: _Carry) -> _Carry:
        state, page = carry
        position, in_range = positions_of(index)
        where = page[:, None], lax.rem(position, page_size)[:, None]
        key = [_load(keys, where, *column, product) for column in columns]

        dots = [plgpu.dot(*pair, trans_b=True, allow_tf32=False) for pair in zip(query, key, strict=True)]
        scores_MS = functools.reduce(operator.add, dots)
        if scoring.softcap is not None:
            scores_MS = jnp.tanh(scores_MS * (scoring.scale / scoring.softcap))
        seen_MS = in_range[None, :]
        if query_positions is not None:
            seen_MS &= _is_visible(position[None, :], query_positions[:, None], scoring.window)
        scores_MS = jnp.where(seen_MS, scores_MS, -jnp.inf)

        largest = jnp.maximum(state.largest, jnp.max(scores_MS, axis=1) * to_base_2)
        shrink = jnp.exp2(state.largest - largest)
        weights_MS = jnp.exp2(scores_MS * to_base_2 - largest[:, None])
        value = key[0] if len(pools) == 1 else _load(pools[1], where, *columns[0], product)
        if keys.dtype.itemsize == 1:
            # The values are zero already, but without this the compiler copies 8 bytes at a time and transposes the
            # block byte by byte.
            value = jnp.where(in_range[:, None], value, 0)
        weighted = plgpu.dot(weights_MS.astype(value.dtype), value, allow_tf32=False)
        state = Softmax(
            weighted=state.weighted * shrink[:, None] + weighted,
            largest=largest,
            total=state.total * shrink + jnp.sum(weights_MS, axis=1),
        )
        return _Carry(state, pages_of(index + 1))

    begin, end = lax.div(jnp.int32(first), block_k), lax.div(last + block_k - 1, block_k)
    empty = Softmax(
        jnp.zeros(query[0].shape, jnp.float32), jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32)
    )
    return lax.fori_loop(begin, end, one_block, _Carry(empty, pages_of(begin))).state


def finish(state: Softmax, sinks: Float[Array, " M"] | None = None) -> tuple[Float[Array, "M H"], Float[Array, " M"]]:
    """Attention and its log-sum-exp from the state after the last key; zeros and -inf if no key was seen.

    A sink is one more score of a row, with a value of zero. It must be given once, where all keys were seen.
    """
    if sinks is not None:
        state = joined(state, jnp.zeros_like(state.weighted), sinks)
    out = state.weighted / jnp.where(state.total == 0, 1, state.total)[:, None]
    return out, state.largest / LOG2_E + jnp.log(state.total)


def joined(state: Softmax, out: Float[Array, "M H"], lse: Float[Array, " M"]) -> Softmax:
    """The state joined with other keys, of which `finish` gave `out` and `lse`; -inf for rows that saw none of them."""
    score = lse * LOG2_E
    largest = jnp.maximum(state.largest, score)
    shrink, weight = jnp.exp2(state.largest - largest), jnp.exp2(score - largest)
    return Softmax(
        weighted=state.weighted * shrink[:, None] + out * weight[:, None],
        largest=largest,
        total=state.total * shrink + weight,
    )


def matmul_dtype(queries: jnp.dtype, pool: jnp.dtype) -> jnp.dtype:
    """The input type of both matmuls, whose sums are float32 in any case.

    8-bit floats are exact in float16, and one instruction converts two of them; to bfloat16 it would be four. A
    bfloat16 query beyond 65504 then gives NaN.
    """
    if pool.itemsize == 1:
        return jnp.dtype(jnp.float16 if queries.itemsize == 2 else jnp.float32)
    return jnp.promote_types(queries, pool)


def _is_visible(key: Int[Array, "1 S"], query: Int[Array, "M 1"], window: Window | None) -> Bool[Array, "M S"]:
    is_visible = key <= query
    return is_visible if window is None else is_visible & (key >= window.first(query))


def _load(
    pool: Ref, row: tuple[Int[Array, "S 1"], Int[Array, "S 1"]], first: int, width: int, dtype: jnp.dtype
) -> Float[Array, "S H"]:
    """Columns of rows of a pool in `dtype`. Padding, which lies in the memory of what comes next, is zeros."""
    dim = jnp.arange(padded_head_dim(width))[None, :]
    where = (*row, first + dim)
    if width == dim.size:
        return pool[where].astype(dtype)
    is_real = dim < width
    rows = plgpu.load(pool.at[where], mask=is_real)  # no `other`: 8-bit floats cannot be lowered with one
    return jnp.where(is_real, rows.astype(dtype), 0)
