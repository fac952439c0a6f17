"""Attention on a TPU, in Pallas' Mosaic lowering. Letters: `jsg/models/inputs.py`.

One kernel for single tokens, short tiles and long tiles, which differ in the rows of a matmul. It ran in TPU interpret
mode and was compiled for TPU v5e, v6e, v5p and v7x. No TPU has run it, so its speed is unknown.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.inputs import AttentionInputs, LayerCache, Scoring
from jsg.kernels_pallas.tile import QUERY_TILE
from jsg.kernels_pallas.tpu_write import LANES, granule
from jsg.window import Window

KEY_BLOCK = 512
"""Keys that are multiplied at a time, twice as many of one or two heads for a single token. With 256, tiles take a
quarter more instructions (compiled for v6e)."""
NUM_BUFFERS = 2
"""Blocks of keys in vector memory: one is computed on while the next is fetched."""
TOGETHER = 128
"""Rows whose softmax is computed together: of a single token those of several heads, of a tile those of one."""
PAGE_SIZE = 64
"""The default. Each page is a copy of its own, so smaller ones take more instructions, and larger ones share less."""
VMEM_BYTES = 2**25
"""What the kernel may take of vector memory: a quarter of that of v5e and v6e, half of that of v7x."""
MASKED = -1e30
SUBLANES = 8
LOG2_E = math.log2(math.e)


class Tiles(NamedTuple):
    """Consecutive tokens of one request each, as `AttentionInputs.tile_rows` and so on. Real ones come first."""

    rows: Int[Array, " n"]
    positions: Int[Array, " n"]
    lens: Int[Array, " n"]
    num: Int[Array, " 1"]


class _Call(NamedTuple):
    """What is static in a call of the kernel.

    Attributes:
        size: Tokens of a tile.
        group: Query heads of a key-value head, whose rows of each token are neighbours.
        block: Keys that are fetched and multiplied at a time, whole pages.
        scoring: See `Scoring`.
        has_sinks: Whether there are sinks.
    """

    size: int
    group: int
    block: int
    scoring: Scoring
    has_sinks: bool


def paged_attention(
    queries: Float[Array, "T N H"],
    cache: LayerCache,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
) -> Float[Array, "T N H"]:
    """See `ops.paged_attention`. Accumulates in float32 and returns the queries' dtype.

    The singles of a step are one launch, and its tiles another one.

    Raises:
        NotImplementedError: The kernel cannot do this shape or type; the message names it.
    """
    if len(cache) != 1 or cache[0].ndim != 5:
        raise NotImplementedError("the TPU kernel wants the keys of a page side by side, one head after another")
    (pool,), scoring = cache, Scoring(scale, window, softcap)
    _check(queries, pool)
    attend = functools.partial(_attend, pool=pool, table=inputs.page_table, scoring=scoring, sinks=sinks)
    out = jnp.zeros_like(queries)
    if num := len(inputs.single_rows):
        is_single = inputs.single_kv_lens > 0
        ones = is_single.astype(jnp.int32)
        tiles = Tiles(inputs.single_rows, inputs.single_kv_lens - 1, ones, jnp.sum(ones)[None])
        found = attend(queries[:num, None], tiles)[:, 0]
        out = out.at[:num].set(jnp.where(is_single[:, None, None], found, 0))
    if len(inputs.tile_rows):
        parts = inputs.tile_rows, inputs.tile_positions, inputs.tile_lens
        tiles = Tiles(*parts, jnp.asarray(inputs.num_tiles, jnp.int32).reshape(1))
        padded = jnp.pad(queries, ((0, QUERY_TILE), (0, 0), (0, 0)))
        cut = jax.vmap(lambda start: lax.dynamic_slice_in_dim(padded, start, QUERY_TILE))(inputs.tile_starts)
        found = attend(cut, tiles)
        out = _joined(out, found, inputs)
    return out


def _joined(
    out: Float[Array, "T N H"], found: Float[Array, "Q size N H"], inputs: AttentionInputs
) -> Float[Array, "T N H"]:
    """`out` with the tokens of tiles."""
    index = jnp.arange(len(out))[:, None] - inputs.tile_starts  # [T, Q]
    is_of_tile = (index >= 0) & (index < inputs.tile_lens) & (jnp.arange(len(found)) < inputs.num_tiles)
    place = jnp.sum(jnp.where(is_of_tile, index + jnp.arange(len(found)) * found.shape[1], 0), axis=1)
    of_tiles = found.reshape(-1, *found.shape[2:])[place]
    return jnp.where(jnp.any(is_of_tile, axis=1)[:, None, None], of_tiles, out)


def _attend(
    queries: Float[Array, "n size N H"],
    tiles: Tiles,
    *,
    pool: Float[Array, "P K parts page_size width"],
    table: Int[Array, "R C"],
    scoring: Scoring,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "n size N H"]:
    """Attention of tiles of one size. Rows of tiles that are not real, or shorter, are anything."""
    num, size, heads, head_dim = queries.shape
    _, kv_heads, parts, page_size, width = pool.shape
    group = heads // kv_heads
    at_a_time = min(num, max(1, SUBLANES // size))
    padding, rows = -num % at_a_time, -(-size * group // SUBLANES) * SUBLANES
    keys = KEY_BLOCK if size > 1 or kv_heads > 2 else 2 * KEY_BLOCK
    call = _Call(size, group, max(page_size, keys // page_size * page_size), scoring, sinks is not None)
    dtype = queries.dtype if pool.dtype.itemsize == 1 else jnp.promote_types(queries.dtype, pool.dtype)
    by_head = queries.astype(dtype).reshape(num, size, kv_heads, group, head_dim).swapaxes(1, 2)
    by_head = by_head.reshape(num, kv_heads, size * group, head_dim)
    by_head = jnp.pad(by_head, ((0, padding), (0, 0), (0, rows - size * group), (0, width - head_dim)))
    scalars = [jnp.pad(each, (0, padding)) for each in tiles[:3]]
    of_rows = [] if sinks is None else [_sinks_of_rows(sinks, kv_heads, size, rows)]
    spec = pl.BlockSpec((at_a_time, *by_head.shape[1:]), lambda i, *_: (i, 0, 0, 0))
    out = pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(len(by_head) // at_a_time,),
            in_specs=[
                *[pl.BlockSpec(memory_space=pl.ANY)] * 2,
                spec,
                *[pl.BlockSpec(memory_space=pltpu.VMEM)] * len(of_rows),
            ],
            out_specs=spec,
            scratch_shapes=[
                pltpu.VMEM((NUM_BUFFERS, kv_heads, parts, call.block, width), pool.dtype),
                pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
                *[pltpu.VMEM((kv_heads * rows, LANES), jnp.float32)] * 2,
                pltpu.VMEM((kv_heads * rows, width), jnp.float32),
                pltpu.SMEM((4,), jnp.int32),
                pltpu.SMEM((2, table.shape[1]), jnp.int32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(by_head.shape, queries.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        name=f"attention_of_{size}",
    )(*scalars, tiles.num, table, pool, by_head, *of_rows)
    out = out[:num, :, : size * group, width - head_dim :].reshape(num, kv_heads, size, group, head_dim)
    return out.swapaxes(1, 2).reshape(queries.shape)


def _sinks_of_rows(sinks: Float[Array, " N"], kv_heads: int, size: int, rows: int) -> Float[Array, "K·rows lanes"]:
    """The sink of each row of a tile's matmuls, on the scale of powers of two, in all lanes."""
    each = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, 1, -1), (1, size, 1)).reshape(kv_heads, -1)
    each = jnp.pad(each, ((0, 0), (0, rows - each.shape[1]))).reshape(-1, 1) * LOG2_E
    return jnp.broadcast_to(each, (len(each), LANES))


def _kernel(
    rows_ref: Any,
    positions_ref: Any,
    lens_ref: Any,
    count_ref: Any,
    table_ref: Any,
    pool_ref: Any,
    queries_ref: Any,
    *refs: Any,
    call: _Call,
) -> None:
    """Attention of some tiles, `[tiles, K, rows, width]`: rows are the tokens and the query heads of a key-value head.

    The programs run in order. Each goes over its tiles, and for each tile over blocks of keys. The pages of a block,
    and only those that a token of the tile sees, are copied from the pool one by one. While a block is computed on, the
    next one is fetched, which may be the first one of the next tile or of the next program: `fetches_ref` holds the
    tile and the block of the next fetch, the number of fetches, and that of blocks computed. The row of the page table
    that a fetch needs is read while the pages of the tile before are fetched. What a buffer held before stays where no
    page is copied, so values of zero weight are finite there, and scores are masked.
    """
    sinks_ref, (out_ref, buffers_ref, semaphores, *softmax, fetches_ref, pages_ref, page_reads) = (
        (refs[0], refs[1:]) if call.has_sinks else (None, refs)
    )
    window, block = call.scoring.window, call.block
    at_a_time, page_size, num_buffers = len(queries_ref), pool_ref.shape[3], len(buffers_ref)
    pages_of_block, first_tile, count = block // page_size, pl.program_id(0) * at_a_time, count_ref[0]

    def first_key(tile: Any) -> Any:
        return jnp.int32(0) if window is None else jnp.maximum(window.first(positions_ref[tile]), 0)

    def end_key(tile: Any) -> Any:
        return positions_ref[tile] + lens_ref[tile]

    def for_pages(tile: Any, index: Any, for_all: Callable[[], None], for_one: Callable[[Any], None]) -> None:
        """`for_all` if the tile sees keys in every page of a block, else `for_one` with the place of each such page."""
        before = index * pages_of_block
        end = jnp.minimum(lax.div(end_key(tile) + page_size - 1, page_size) - before, pages_of_block)
        first = jnp.maximum(lax.div(first_key(tile), page_size) - before, 0)
        is_whole = end - first == pages_of_block
        pl.when(is_whole)(for_all)
        pl.when(~is_whole)(lambda: lax.fori_loop(first, end, lambda i, _: for_one(i), None))

    def copy(page: Any, i: Any, slot: Any) -> Any:
        place = pl.ds(i * page_size, page_size)
        return pltpu.make_async_copy(pool_ref.at[page], buffers_ref.at[slot, :, :, place], semaphores.at[slot])

    def read_row(tile: Any) -> Any:
        slot = lax.rem(tile, 2)
        return pltpu.make_async_copy(table_ref.at[rows_ref[tile]], pages_ref.at[slot], page_reads.at[slot])

    def fetch_next() -> None:
        tile, index, number = fetches_ref[0], fetches_ref[1], fetches_ref[2]

        @pl.when(tile < count)
        def _() -> None:
            slot, place = lax.rem(number, num_buffers), lax.rem(tile, 2)

            @pl.when(index == lax.div(first_key(tile), block))
            def _() -> None:
                read_row(tile).wait()
                pl.when(tile + 1 < count)(lambda: read_row(tile + 1).start())

            def start(i: Any) -> None:
                copy(pages_ref[place, index * pages_of_block + i], i, slot).start()

            def start_all() -> None:
                for i in range(pages_of_block):
                    start(i)

            for_pages(tile, index, start_all, start)
            is_last, next_tile = (index + 1) * block >= end_key(tile), jnp.minimum(tile + 1, count - 1)
            fetches_ref[0] = jnp.where(is_last, tile + 1, tile)
            fetches_ref[1] = jnp.where(is_last, lax.div(first_key(next_tile), block), index + 1)
            fetches_ref[2] = number + 1

    @pl.when(first_tile == 0)
    def _() -> None:
        buffers_ref[...] = jnp.zeros_like(buffers_ref)
        fetches_ref[0], fetches_ref[1], fetches_ref[2], fetches_ref[3] = 0, lax.div(first_key(0), block), 0, 0
        pl.when(count > 0)(lambda: read_row(0).start())
        for _ in range(num_buffers - 1):
            fetch_next()

    def one_tile(place: Any, _: None) -> None:
        tile = first_tile + place
        for ref, value in zip(softmax, (MASKED, 0, 0), strict=True):
            ref[...] = jnp.full_like(ref, value)

        def one_block(index: Any, _: None) -> None:
            fetch_next()
            slot = lax.rem(fetches_ref[3], num_buffers)
            whole = pltpu.make_async_copy(buffers_ref.at[slot], buffers_ref.at[slot], semaphores.at[slot])
            for_pages(tile, index, whole.wait, lambda i: copy(0, i, slot).wait())
            _attend_block(
                queries_ref.at[place], buffers_ref.at[slot], softmax, positions_ref[tile], index * block, call
            )
            fetches_ref[3] += 1

        lax.fori_loop(lax.div(first_key(tile), block), lax.div(end_key(tile) + block - 1, block), one_block, None)
        _, total_ref, weighted_ref = softmax
        if sinks_ref is not None:
            _rescale(softmax, slice(None), sinks_ref[...])
            total_ref[...] += jnp.exp2(sinks_ref[...] - softmax[0][...])
        out = weighted_ref[...] / _lanes(total_ref[...], weighted_ref.shape[1])
        out_ref[place] = out.reshape(out_ref.shape[1:]).astype(out_ref.dtype)

    lax.fori_loop(0, jnp.clip(count - first_tile, 0, at_a_time), one_tile, None)


def _attend_block(
    queries_ref: Any, block_ref: Any, softmax: Sequence[Any], position: Any, first_key: Any, call: _Call
) -> None:
    """Adds a block of keys to the softmax of a tile whose first token is at `position`.

    The scores of some heads are multiplied before the softmax of those before them, so that the matrix unit has work
    meanwhile: it takes 3 316 bundles in place of 4 420 for 64 tokens of 32/8 heads (v6e).
    """
    kv_heads, rows, _ = queries_ref.shape
    scale, window, softcap = call.scoring.scale, call.scoring.window, call.scoring.softcap
    num = next(num for num in range(kv_heads, 0, -1) if kv_heads % num == 0 and (num == 1 or num * rows <= TOGETHER))
    token = lax.broadcasted_iota(jnp.int32, (rows, 1), 0) // call.group if call.size > 1 else jnp.zeros((rows, 1), int)
    positions = position + jnp.concatenate([token] * num)
    keys = first_key + lax.broadcasted_iota(jnp.int32, (num * rows, call.block), 1)
    seen = keys <= positions
    if window is not None:
        seen &= keys >= window.first(positions)

    def products(first: int) -> Any:
        heads = range(first, first + num)
        return jnp.concatenate([_dot(queries_ref[head], block_ref[head, 0], 1) for head in heads])

    ahead = products(0)
    for first in range(0, kv_heads, num):
        scores, ahead = ahead, products(first + num) if first + num < kv_heads else ahead
        if softcap is None:
            scores *= scale * LOG2_E
        else:
            scores = jnp.tanh(scores * (scale / softcap)) * (softcap * LOG2_E)
        scores = jnp.where(seen, scores, MASKED)
        at = pl.ds(first * rows, num * rows)
        largest_ref, total_ref, weighted_ref = softmax
        _rescale(softmax, at, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp2(scores - _lanes(largest_ref[at], call.block))
        total_ref[at] += jnp.sum(weights, axis=1, keepdims=True)
        weights = jnp.split(weights.astype(queries_ref.dtype), num)
        added = [_dot(each, block_ref[first + i, -1], 0) for i, each in enumerate(weights)]
        weighted_ref[at] += jnp.concatenate(added)


def _rescale(softmax: Sequence[Any], at: Any, scores: Any) -> None:
    """Lets sums be relative to the largest score, where there are new ones: [rows, 1], or in all lanes."""
    largest_ref, total_ref, weighted_ref = softmax
    largest = jnp.maximum(largest_ref[at], scores)
    shrink = jnp.exp2(largest_ref[at] - largest)
    largest_ref[at], total_ref[at] = largest, total_ref[at] * shrink
    weighted_ref[at] *= _lanes(shrink, weighted_ref.shape[1])


def _dot(left: Any, right: Any, axis: int) -> Any:
    """The product over the last axis and this one, in the type of the left side and summed in float32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dims = (((1,), (axis,)), ((), ()))
    return lax.dot_general(
        left, right.astype(left.dtype), dims, precision=precision, preferred_element_type=jnp.float32
    )


def _lanes(x: Any, width: int) -> Any:
    """`x`, whose lanes are all equal, with so many lanes."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def _check(queries: Float[Array, "T N H"], pool: Float[Array, "P K parts page_size width"]) -> None:
    """Raises NotImplementedError for all that the kernel cannot do."""
    page_size, size = pool.shape[3], granule(pool.dtype)
    if pool.shape[4] % LANES:
        raise NotImplementedError(f"the TPU kernel wants heads of a multiple of 64 numbers, but got {queries.shape[2]}")
    if queries.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"the TPU kernel wants float32 or bfloat16 queries, but got {queries.dtype}")
    if page_size % size:
        raise NotImplementedError(f"the TPU kernel wants pages of a multiple of {size} tokens, but got {page_size}")
