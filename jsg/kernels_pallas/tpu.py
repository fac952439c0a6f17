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
from jsg.kernels_pallas.tile import LANES, QUERY_TILE, SHORT_TILE
from jsg.kernels_pallas.tpu_write import granule
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
BUFFER_BYTES = 2**23
"""What blocks of keys and values may take together; of many heads a block has fewer keys."""
VMEM_BYTES = 2**25
"""What the kernel may take of vector memory: a quarter of that of v5e and v6e, half of that of v7x. A quarter of it is
for what the compiler keeps there."""
MASKED = -1e30
SUBLANES = 8
LOG2_E = math.log2(math.e)


class Tiles(NamedTuple):
    """Tiles from `first` to `end`, each of consecutive tokens of one request, as `AttentionInputs` has them."""

    rows: Int[Array, " n"]
    positions: Int[Array, " n"]
    starts: Int[Array, " n"]
    lens: Int[Array, " n"]
    first: Int[Array, ""] | int
    end: Int[Array, ""] | int


class _Call(NamedTuple):
    """What is static in a call of the kernel.

    Attributes:
        size: Tokens of a tile at most.
        rows: Rows of a key-value head in the matmuls of a tile: its query heads, of each the tokens.
        block: Keys that are fetched and multiplied at a time, whole pages.
        scoring: See `Scoring`.
        has_sinks: Whether there are sinks.
        writes_padding: Whether it writes zeros for padding.
    """

    size: int
    rows: int
    block: int
    scoring: Scoring
    has_sinks: bool
    writes_padding: bool


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

    The tiles, the short tiles and the singles of a step are a launch each. That of tiles writes zeros for padding.

    Raises:
        NotImplementedError: The kernel cannot do this shape or type; the message names it.
    """
    if len(cache) != 1 or cache[0].ndim != 5:
        raise NotImplementedError("the TPU kernel wants the keys of a page side by side, one head after another")
    (pool,), out = cache, None
    _check(queries, pool)
    tiles, launches = (inputs.tile_rows, inputs.tile_positions, inputs.tile_starts, inputs.tile_lens), []
    if len(inputs.tile_rows):
        ends = 0, inputs.num_short_tiles, inputs.num_tiles
        launches = [(QUERY_TILE, Tiles(*tiles, *ends[1:])), (SHORT_TILE, Tiles(*tiles, *ends[:2]))]
    if num := len(inputs.single_rows):
        lens = (inputs.single_kv_lens > 0).astype(jnp.int32)
        singles = Tiles(inputs.single_rows, inputs.single_kv_lens - 1, jnp.arange(num), lens, 0, jnp.sum(lens))
        launches.append((1, singles))
    for size, each in launches:
        arrays = out, queries, pool, inputs.page_table, inputs.num_tokens
        out = _attend(*arrays, each, size, scoring=Scoring(scale, window, softcap), sinks=sinks)
    if out is None:
        return jnp.zeros_like(queries)
    # Singles alone leave padding as it is: loops that write it make the kernel's others longer.
    return out if launches[0][0] > 1 else jnp.where((jnp.arange(len(out)) < inputs.num_tokens)[:, None, None], out, 0)


def _attend(
    out: Float[Array, "T N H"] | None,
    queries: Float[Array, "T N H"],
    pool: Float[Array, "P K parts page_size width"],
    table: Int[Array, "R C"],
    num_tokens: Int[Array, ""],
    tiles: Tiles,
    size: int,
    *,
    scoring: Scoring,
    sinks: Float[Array, " N"] | None,
) -> Float[Array, "T N H"]:
    """`out` with attention of tiles of at most `size` tokens. Without it, tiles leave zeros past `num_tokens`."""
    (_, heads, head_dim), (_, kv_heads, parts, page_size, width) = queries.shape, pool.shape
    group, num_keys = heads // kv_heads, KEY_BLOCK if size > 1 or kv_heads > 2 else 2 * KEY_BLOCK
    num_keys = min(num_keys, BUFFER_BYTES // (NUM_BUFFERS * kv_heads * parts * width * pool.dtype.itemsize))
    rows = -(-size * group // SUBLANES) * SUBLANES
    block = max(page_size, num_keys // page_size * page_size)
    call = _Call(size, rows, block, scoring, sinks is not None, out is None and size > 1)
    padded = -(-(heads + rows - size * group) // SUBLANES) * SUBLANES
    dtype = queries.dtype if pool.dtype.itemsize == 1 else jnp.promote_types(queries.dtype, pool.dtype)
    ends = jnp.stack([jnp.asarray(end, jnp.int32) for end in (*tiles[4:], num_tokens)])
    of_rows = []
    if sinks is not None:
        of_heads = jnp.repeat(sinks.astype(jnp.float32).reshape(kv_heads, -1) * LOG2_E, size, axis=1)
        of_heads = jnp.pad(of_heads, ((0, 0), (0, rows - size * group))).reshape(-1, 1)
        of_rows = [jnp.broadcast_to(of_heads, (kv_heads * rows, LANES))]
    before = [] if out is None else [out]
    hbm, tokens = pl.BlockSpec(memory_space=pl.ANY), pltpu.VMEM((2, size, heads, head_dim), queries.dtype)
    scratch = [
        pltpu.VMEM((NUM_BUFFERS, kv_heads, parts, call.block, width), pool.dtype),
        pltpu.SemaphoreType.DMA((NUM_BUFFERS,)),
        pltpu.SMEM((2, table.shape[1]), jnp.int32),
        *[tokens] * 2,
        *[pltpu.SemaphoreType.DMA((2,))] * 3,
        pltpu.VMEM((width // LANES, size * padded, LANES), jnp.float32),
        pltpu.VMEM((kv_heads, rows, width), dtype),
        *[pltpu.VMEM((kv_heads * rows, LANES), jnp.float32)] * 2,
        pltpu.VMEM((kv_heads * rows, width), jnp.float32),
        pltpu.SMEM((4,), jnp.int32),
    ]
    in_vmem = sum(math.prod(each.shape) * each.dtype.itemsize for each in scratch if each.memory_space == pltpu.VMEM)
    if in_vmem > VMEM_BYTES * 3 // 4:
        raise NotImplementedError(f"the TPU kernel has {VMEM_BYTES * 3 // 4} bytes for heads and pages, not {in_vmem}")
    return pl.pallas_call(
        functools.partial(_kernel, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(1,),
            in_specs=[*[hbm] * 3, *[pl.BlockSpec(memory_space=pltpu.VMEM)] * len(of_rows), *[hbm] * len(before)],
            out_specs=hbm,
            scratch_shapes=scratch,
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        input_output_aliases={8 + len(of_rows): 0} if before else {},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True),
        name=f"attention_of_{size}",
    )(*tiles[:4], ends, table, pool, queries, *of_rows, *before)


def _kernel(
    rows_ref: Any,
    positions_ref: Any,
    starts_ref: Any,
    lens_ref: Any,
    ends_ref: Any,
    table_ref: Any,
    pool_ref: Any,
    queries_ref: Any,
    *refs: Any,
    call: _Call,
) -> None:
    """Attention of some tiles, one after another, and for each tile over blocks of keys, by one program.

    The pages of a block, and only those that a token of the tile sees, are copied from the pool one by one. While a
    block is computed on, the next one is fetched, which may be the first one of the next tile: `fetches_ref` holds the
    tile and the block of the next fetch, the number of fetches, and that of blocks computed. What a buffer held before
    stays where no page is copied, so values of zero weight are finite there, and scores are masked. The queries of the
    next tile, and its row of the page table, are read meanwhile, and the results of a tile are written during the next.
    """
    sinks_ref = refs[0] if call.has_sinks else None
    out_ref, buffers_ref, semaphores, pages_ref, read_ref, written_ref, page_reads, reads, writes = refs[-15:-6]
    tokens_ref, heads_ref, *softmax, fetches_ref = refs[-6:]
    window, block, (first_tile, count) = call.scoring.window, call.block, (ends_ref[0], ends_ref[1])
    page_size, num_buffers, pages_of_block = pool_ref.shape[3], len(buffers_ref), block // pool_ref.shape[3]

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

    def page_read(tile: Any) -> Any:
        slot = lax.rem(tile, 2)
        return pltpu.make_async_copy(table_ref.at[rows_ref[tile]], pages_ref.at[slot], page_reads.at[slot])

    def for_tokens(tile: Any, do: Callable[[Any, int], None]) -> None:
        """`do` for parts of a tile, whose lengths are powers of two: the first token in it, and the length."""
        for size in (1 << bit for bit in range(call.size.bit_length())):
            first = lens_ref[tile] & ~(2 * size - 1)
            pl.when((lens_ref[tile] & size) > 0)(functools.partial(do, first, size))

    def query_read(tile: Any, first: Any, size: int) -> Any:
        slot = lax.rem(tile, 2)
        source = queries_ref.at[pl.ds(starts_ref[tile] + first, size)]
        return pltpu.make_async_copy(source, read_ref.at[slot, pl.ds(first, size)], reads.at[slot])

    def out_write(tile: Any, first: Any, size: int) -> Any:
        slot = lax.rem(tile, 2)
        target = out_ref.at[pl.ds(starts_ref[tile] + first, size)]
        return pltpu.make_async_copy(written_ref.at[slot, pl.ds(first, size)], target, writes.at[slot])

    def padding_write(index: Any) -> Any:
        """The end of all tokens in parts. The first one may begin before padding: its tokens are written later."""
        size = min(call.size, len(out_ref))
        part = pl.ds(jnp.maximum(len(out_ref) - (index + 1) * size, 0), size)
        return pltpu.make_async_copy(written_ref.at[0, pl.ds(0, size)], out_ref.at[part], writes.at[0])

    def fetch_next() -> None:
        tile, index, number = fetches_ref[0], fetches_ref[1], fetches_ref[2]

        @pl.when(tile < count)
        def _() -> None:
            slot, place = lax.rem(number, num_buffers), lax.rem(tile, 2)

            @pl.when(index == lax.div(first_key(tile), block))
            def _() -> None:
                page_read(tile).wait()
                pl.when(tile + 1 < count)(lambda: page_read(tile + 1).start())

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

    def one_block(tile: Any, index: Any) -> None:
        fetch_next()
        slot = lax.rem(fetches_ref[3], num_buffers)
        whole = pltpu.make_async_copy(buffers_ref.at[slot], buffers_ref.at[slot], semaphores.at[slot])
        for_pages(tile, index, whole.wait, lambda i: copy(0, i, slot).wait())
        _attend_block(heads_ref, buffers_ref.at[slot], softmax, positions_ref[tile], index * block, call)
        fetches_ref[3] += 1

    def one_tile(tile: Any, _: None) -> None:
        for_tokens(tile, lambda *part: query_read(tile, *part).wait())
        pl.when(tile + 1 < count)(lambda: for_tokens(tile + 1, lambda *part: query_read(tile + 1, *part).start()))
        _split_heads(read_ref.at[lax.rem(tile, 2)], tokens_ref, heads_ref)
        for ref, value in zip(softmax, (MASKED, 0, 0), strict=True):
            ref[...] = jnp.full_like(ref, value)
        first, end = lax.div(first_key(tile), block), lax.div(end_key(tile) + block - 1, block)
        lax.fori_loop(first, end, lambda index, _: one_block(tile, index), None)
        if sinks_ref is not None:
            _rescale(softmax, slice(None), sinks_ref[...])
            softmax[1][...] += jnp.exp2(sinks_ref[...] - softmax[0][...])
        pl.when(tile - 2 >= first_tile)(lambda: for_tokens(tile - 2, lambda *part: out_write(tile - 2, *part).wait()))
        _join_heads(softmax, tokens_ref, written_ref.at[lax.rem(tile, 2)], len(heads_ref))
        for_tokens(tile, lambda *part: out_write(tile, *part).start())

    if call.writes_padding:
        num_parts = lax.div(len(out_ref) - ends_ref[2] + call.size - 1, call.size)
        written_ref[...] = jnp.zeros_like(written_ref)
        lax.fori_loop(0, num_parts, lambda i, _: padding_write(i).start(), None)
        lax.fori_loop(0, num_parts, lambda i, _: padding_write(i).wait(), None)

    @pl.when(first_tile < count)
    def _() -> None:
        buffers_ref[...] = jnp.zeros_like(buffers_ref)
        read_ref[...] = jnp.zeros_like(read_ref)
        fetches_ref[0], fetches_ref[1] = first_tile, lax.div(first_key(first_tile), block)
        fetches_ref[2], fetches_ref[3] = 0, 0
        page_read(first_tile).start()
        for_tokens(first_tile, lambda *part: query_read(first_tile, *part).start())
        for _ in range(num_buffers - 1):
            fetch_next()

    lax.fori_loop(first_tile, count, one_tile, None)
    for tile in (count - 2, count - 1):
        pl.when(tile >= first_tile)(lambda tile=tile: for_tokens(tile, lambda *part: out_write(tile, *part).wait()))


def _rows_of_heads(heads: int, kv_heads: int, rows: int, size: int, padded: int) -> list[tuple[int, Any, Any]]:
    """Which rows of a tile's matmuls are which of its tokens: key-value head, rows of it, rows of tokens.

    Tokens have `padded` rows each, first those of their heads. In matmuls the query heads of a single token are
    neighbours, and so are the tokens of each query head of a tile. Rows of matmuls that are padding belong to the next
    head, which comes later, or to none.
    """
    group = heads // kv_heads
    if size == 1:
        return [(head, pl.ds(0, rows), pl.ds(head * group, rows)) for head in range(kv_heads)]
    each = [(head, i) for head in range(kv_heads) for i in range(group)]
    return [(head, pl.ds(i * size, size), pl.ds(head * group + i, size, padded)) for head, i in each]


def _split_heads(read_ref: Any, tokens_ref: Any, heads_ref: Any) -> None:
    """Puts queries `[size, N, H]` where matmuls want them, `[K, rows, width]`. Beyond H there are zeros."""
    (size, heads, head_dim), (kv_heads, rows, width) = read_ref.shape, heads_ref.shape
    padded, queries = tokens_ref.shape[1] // size, read_ref[...].astype(jnp.float32)
    if padded > heads:
        queries = jnp.concatenate([queries, jnp.zeros((size, padded - heads, head_dim), jnp.float32)], axis=1)
    queries = queries.reshape(size * padded, head_dim)
    if width > head_dim:
        queries = jnp.concatenate([queries, jnp.zeros_like(queries)], axis=1)
    for i in range(width // LANES):
        tokens_ref[i] = queries[:, i * LANES : (i + 1) * LANES]
        for head, at, of in _rows_of_heads(heads, kv_heads, rows, size, padded):
            heads_ref[head, at, pl.ds(i * LANES, LANES)] = tokens_ref[i, of].astype(heads_ref.dtype)


def _join_heads(softmax: Sequence[Any], tokens_ref: Any, written_ref: Any, kv_heads: int) -> None:
    """Puts the weighted means of values `[K·rows, width]` where they are written from, `[size, N, H]`."""
    _, total_ref, weighted_ref = softmax
    (size, heads, head_dim), width = written_ref.shape, weighted_ref.shape[1]
    rows, padded = len(weighted_ref) // kv_heads, tokens_ref.shape[1] // size
    for head, at, of in _rows_of_heads(heads, kv_heads, rows, size, padded):
        at = pl.ds(head * rows + at.start, at.size)
        means = weighted_ref[at] / _lanes(total_ref[at], width)
        for i in range(width // LANES):
            tokens_ref[i, of] = means[:, i * LANES : (i + 1) * LANES]
    means = jnp.concatenate([tokens_ref[i] for i in range(width // LANES)], axis=1)[:, width - head_dim :]
    written_ref[...] = means.reshape(size, padded, head_dim)[:, :heads].astype(written_ref.dtype)


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
    token = lax.broadcasted_iota(jnp.int32, (rows, 1), 0) & (call.size - 1)
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
