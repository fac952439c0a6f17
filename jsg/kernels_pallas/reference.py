"""Paged attention in plain `jnp`: the CPU implementation, and the reference in the tests of every kernel.

Both loops are an online softmax over blocks of keys, with trip counts from real lengths. So one program serves every
context length, and a short row takes little time:

    singles   for each row with one new token:  for each block of `SINGLE_KEY_BLOCK` keys:  one query
    tiles     for each query tile:              for each block of `TILE_KEY_BLOCK` keys:    QUERY_TILE queries,
                                                                                           or SHORT_TILE of a short one

Every matmul of the tile loop has one fixed shape, whatever the batch, the chunks or the context. So the result of a
query is always the same to the last bit. Deterministic mode sends all tokens through tiles that are not short.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas.inputs import AttentionInputs, Scoring
from jsg.kernels_pallas.tile import QUERY_TILE, SHORT_TILE
from jsg.window import Window

HEAD_CLUSTER = 4
SINGLE_KEY_BLOCK = 128
TILE_KEY_BLOCK = 64
MASKED = -1e30


class _Softmax(NamedTuple):
    """Running state of an online softmax: the largest score, the sum of exponentials, the weighted values."""

    largest: Float[Array, "*rows"]
    total: Float[Array, "*rows"]
    weighted: Float[Array, "*rows H"]


def paged_attention(
    queries: Float[Array, "T N H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
    """See `ops.paged_attention`. Computes in float32 and returns float32."""
    scoring = Scoring(scale, window, softcap)
    sinks = None if sinks is None else sinks.astype(jnp.float32)
    kv_heads = keys.shape[2]
    grouped = queries.astype(jnp.float32).reshape(len(queries), kv_heads, -1, queries.shape[-1])
    out = jnp.zeros_like(grouped)
    if inputs.tile_rows.shape[0]:
        for size, first, end in (
            (SHORT_TILE, 0, inputs.num_short_tiles),
            (QUERY_TILE, inputs.num_short_tiles, inputs.num_tiles),
        ):
            out = _attend_tiles(out, grouped, keys, values, inputs, scoring, sinks, size, first, end)
    if inputs.single_rows.shape[0]:
        out = _attend_singles(out, grouped, keys, values, inputs, scoring, sinks)
    return out.reshape(queries.shape)


def _attend_singles(
    out: Float[Array, "T K G H"],
    queries: Float[Array, "T K G H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    inputs: AttentionInputs,
    scoring: Scoring,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T K G H"]:
    """Writes attention of the leading one-token rows into `out`, one row after another.

    `HEAD_CLUSTER` heads are computed at a time: the queries of a cluster stand block-diagonally in one matrix, so a
    block of keys is multiplied as it lies in memory. The zeros cost less than transposing the keys (measured: 12 ms
    against 19 ms for 8 rows of 256 keys, 12 layers of 12/4 heads).
    """
    _, kv_heads, _, head_dim = queries.shape
    cluster = HEAD_CLUSTER if kv_heads % HEAD_CLUSTER == 0 else 1
    block = min(SINGLE_KEY_BLOCK, inputs.page_table.shape[1] * keys.shape[1])

    def one_row(index: Int[Array, ""], out: Float[Array, "T K G H"]) -> Float[Array, "T K G H"]:
        row, kv_len = inputs.single_rows[index], inputs.single_kv_lens[index]
        query = _block_diagonal(queries[index].reshape(kv_heads // cluster, cluster, -1, head_dim))

        def one_block(index: Int[Array, ""], state: _Softmax) -> _Softmax:
            positions = index * block + jnp.arange(block)
            slots = _slots(inputs.page_table, row, positions, kv_len, keys.shape[1])
            key, value = (_rows_of(pool, slots).reshape(block, len(query), -1) for pool in (keys, values))
            seen = _seen(positions, kv_len - 1, scoring.window)
            scores = jnp.where(seen, _scores("cnd,scd->cns", query, key, scoring), MASKED)
            return _accumulate(state, scores, seen, "cns,scd->cnd", value)

        first = _first_block(scoring.window, kv_len - 1, block)
        state = lax.fori_loop(first, _blocks(kv_len, block), one_block, _empty_softmax(query))
        done = _diagonal(_normalised(state, sinks), cluster, head_dim).reshape(out.shape[1:])
        return lax.dynamic_update_index_in_dim(out, done, index, axis=0)

    return lax.fori_loop(0, jnp.sum(inputs.single_kv_lens > 0), one_row, out)


def _block_diagonal(query: Float[Array, "C J G H"]) -> Float[Array, "C JG JH"]:
    """The queries of a cluster's J key-value heads, each in the columns of its own head, zeros elsewhere."""
    clusters, heads, group, head_dim = query.shape
    spread = query[:, :, :, None, :] * jnp.eye(heads)[None, :, None, :, None]
    return spread.reshape(clusters, heads * group, heads * head_dim)


def _diagonal(weighted: Float[Array, "C JG JH"], heads: int, head_dim: int) -> Float[Array, "C J G H"]:
    """The parts of the result for all pairs of heads in which query and value belong to the same head."""
    blocks = weighted.reshape(len(weighted), heads, -1, heads, head_dim)
    return jnp.einsum("cjgjh->cjgh", blocks)


def _attend_tiles(
    out: Float[Array, "T K G H"],
    queries: Float[Array, "T K G H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    inputs: AttentionInputs,
    scoring: Scoring,
    sinks: Float[Array, " N"] | None,
    size: int,
    first_tile: Int[Array, ""] | int,
    end_tile: Int[Array, ""] | int,
) -> Float[Array, "T K G H"]:
    """Writes attention of some query tiles, of at most `size` tokens each, into `out`, one after another."""
    num_tokens = len(queries)
    padded_queries = jnp.pad(queries, ((0, size), (0, 0), (0, 0), (0, 0)))
    padded_out = jnp.pad(out, ((0, size), (0, 0), (0, 0), (0, 0)))
    offsets = jnp.arange(size)

    def one_tile(index: Int[Array, ""], out: Float[Array, "Tpad K G H"]) -> Float[Array, "Tpad K G H"]:
        start, length = inputs.tile_starts[index], inputs.tile_lens[index]
        last = inputs.tile_positions[index] + length
        query_positions = inputs.tile_positions[index] + offsets
        query = lax.dynamic_slice_in_dim(padded_queries, start, size).transpose(1, 2, 0, 3)  # [K, G, q, H]

        def one_block(index_of_block: Int[Array, ""], state: _Softmax) -> _Softmax:
            positions = index_of_block * TILE_KEY_BLOCK + jnp.arange(TILE_KEY_BLOCK)
            slots = _slots(inputs.page_table, inputs.tile_rows[index], positions, last, keys.shape[1])
            seen = _seen(positions, query_positions[:, None], scoring.window)
            scores = _scores("kgqh,skh->kgqs", query, _rows_of(keys, slots), scoring)
            return _accumulate(state, jnp.where(seen, scores, MASKED), seen, "kgqs,skh->kgqh", _rows_of(values, slots))

        first = _first_block(scoring.window, inputs.tile_positions[index], TILE_KEY_BLOCK)
        state = lax.fori_loop(first, _blocks(last, TILE_KEY_BLOCK), one_block, _empty_softmax(query))
        done = jnp.where(
            (offsets < length)[:, None, None, None],
            _normalised(state, sinks).transpose(2, 0, 1, 3),
            lax.dynamic_slice_in_dim(out, start, size),
        )
        return lax.dynamic_update_slice_in_dim(out, done, start, axis=0)

    return lax.fori_loop(first_tile, end_tile, one_tile, padded_out)[:num_tokens]


def _slots(
    page_table: Int[Array, "R C"],
    row: Int[Array, ""],
    positions: Int[Array, " S"],
    kv_len: Int[Array, ""],
    page_size: int,
) -> Int[Array, " S"]:
    """The KV slot of each position of a row, or the dump past its end, where stale pages may hold another row's NaN."""
    column = jnp.minimum(positions // page_size, page_table.shape[1] - 1)
    return jnp.where(positions < kv_len, page_table[row, column] * page_size + positions % page_size, 0)


def _rows_of(pool: Float[Array, "P page_size K H"], slots: Int[Array, "*slots"]) -> Float[Array, "*slots K H"]:
    flat = pool.reshape(-1, *pool.shape[2:])
    return flat.at[slots].get(mode="promise_in_bounds").astype(jnp.float32)


def _seen(keys: Int[Array, " S"], queries: Int[Array, "*q"], window: Window | None) -> Bool[Array, "*rows"]:
    """Whether each query position sees each key position."""
    seen = keys <= queries
    return seen if window is None else seen & (keys >= window.first(queries))


def _first_block(window: Window | None, query: Int[Array, ""], block: int) -> Int[Array, ""] | int:
    """The first block of which a query sees a key."""
    return 0 if window is None else jnp.maximum(window.first(query), 0) // block


def _scores(subscripts: str, query: Array, key: Array, scoring: Scoring) -> Array:
    scores = jnp.einsum(subscripts, query, key, preferred_element_type=jnp.float32) * scoring.scale
    return scores if scoring.softcap is None else scoring.softcap * jnp.tanh(scores / scoring.softcap)


def _empty_softmax(query: Float[Array, "*rows H"]) -> _Softmax:
    rows = query.shape[:-1]
    return _Softmax(jnp.full(rows, MASKED), jnp.zeros(rows), jnp.zeros(query.shape))


def _accumulate(state: _Softmax, scores: Array, seen: Array, subscripts: str, value: Array) -> _Softmax:
    largest = jnp.maximum(state.largest, jnp.max(scores, axis=-1))
    shrink = jnp.exp(state.largest - largest)
    weights = jnp.where(seen, jnp.exp(scores - largest[..., None]), 0.0)
    weighted = jnp.einsum(subscripts, weights, value, preferred_element_type=jnp.float32)
    return _Softmax(
        largest=largest,
        total=state.total * shrink + jnp.sum(weights, axis=-1),
        weighted=state.weighted * shrink[..., None] + weighted,
    )


def _normalised(state: _Softmax, sinks: Float[Array, " N"] | None) -> Array:
    """The weighted mean of the values. A sink is one more score of each row of its head, with a value of zero."""
    if sinks is not None:
        shape = state.largest.shape
        each = sinks.reshape(*shape[:2], *[1] * (len(shape) - 2))
        largest = jnp.maximum(state.largest, each)
        shrink = jnp.exp(state.largest - largest)
        total = state.total * shrink + jnp.exp(each - largest)
        state = _Softmax(largest, total, state.weighted * shrink[..., None])
    return state.weighted / jnp.maximum(state.total, 1e-30)[..., None]


def _blocks(length: Int[Array, ""], block: int) -> Int[Array, ""]:
    return (length + block - 1) // block
