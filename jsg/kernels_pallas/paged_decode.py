"""Attention of rows that bring one token: flash decoding over pages, with long contexts split between programs.

    rows      kv heads   splits of a row's keys          partials, float32              result
    token 0 ─ head 0 ─┬─ keys [0, c)        ── program ─▶ out, lse ─┐
                      ├─ keys [c, 2c)       ── program ─▶ out, lse ─┼─ combine, one program a head ─▶ out, lse
                      └─ keys [2c, len)     ── program ─▶ out, lse ─┘

The length c of a split follows from the row's real length, so a step of short rows and a step of long rows run the same
executable. With one split there is one launch and nothing to combine. A single split may also join the result for the
keys before its range: see `cascade.py`.

Split-KV decoding: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference" (2023).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.attention_block import (
    Attended,
    Ref,
    Softmax,
    attend,
    check_supported,
    finish,
    joined,
    keys_in_block,
    load_query,
    load_sinks,
    padded_rows,
    parts_of_group,
    pool_spec,
    shared_bytes,
    store_rows,
    whole_spec,
)
from jsg.kernels_pallas.combine import Partials, combine, split_range
from jsg.kernels_pallas.inputs import AttentionInputs, Scoring
from jsg.kernels_pallas.tuning import attention_sizes, fitting
from jsg.window import Window


class Sizes(NamedTuple):
    """How the work is cut. `tuning` has the sizes by rows of the step.

    Attributes:
        splits: The most programs that share the keys of one row and kv head.
        block_k: Keys per iteration of a program, unless `keys_in_block` gives fewer; a split is a multiple of it.
        num_warps: Warps per program.
        num_stages: Iterations whose loads are in flight.
        block_m: The most query heads of a program.
    """

    splits: int
    block_k: int
    num_warps: int
    num_stages: int
    block_m: int = 128


class Ranges(NamedTuple):
    """The keys of its request that each packed token attends to: positions `first` to `last` - 1.

    Attributes:
        rows: Request row.
        first: The first position.
        last: The position after the last one; not more than `first` for a token that attends to none.
    """

    rows: Int[Array, " B"]
    first: Int[Array, " B"]
    last: Int[Array, " B"]


def paged_decode(
    queries: Float[Array, "T N H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    value_dim: int | None = None,
    sizes: Sizes | None = None,
    interpret: bool = False,
) -> Attended:
    """Attention of the leading one-token rows of a step; zeros for all other tokens.

    Args:
        queries: See `ops.paged_attention`, as for `scale`, `window`, `softcap` and `sinks`.
        keys: The pool of one layer.
        values: Likewise; not used with `value_dim`.
        inputs: Only the page table and the singles are used.
        scale: Above zero.
        window: See above.
        softcap: See above.
        sinks: See above.
        value_dim: See `ops.latent_attention`; None for values in an array of their own.
        sizes: How to cut the work; None for the best sizes on this device.
        interpret: Run slowly on a CPU instead of compiling for a GPU.

    Raises:
        NotImplementedError: See `attention_block.check_supported`.
    """
    num_singles = min(len(inputs.single_rows), len(queries))
    sizes = sizes or default_sizes(queries[:num_singles], keys, value_dim)
    last = inputs.single_kv_lens[:num_singles]
    first = jnp.zeros_like(last) if window is None else jnp.maximum(window.first(last - 1), 0)
    ranges = Ranges(inputs.single_rows[:num_singles], first, last)
    partials = attend_splits(
        queries[:num_singles],
        keys,
        values,
        inputs.page_table,
        ranges,
        Scoring(scale, softcap=softcap),
        sizes,
        sinks=sinks if sizes.splits == 1 else None,
        value_dim=value_dim,
        out_dtype=queries.dtype if sizes.splits == 1 else jnp.float32,
        interpret=interpret,
    )
    if sizes.splits == 1:
        attended = Attended(partials.out[:, 0], partials.lse[:, 0])
    else:
        attended = combine(partials, queries.dtype, sinks=sinks, interpret=interpret)
    return with_padding(attended, len(queries))


def default_sizes(
    queries: Float[Array, "B N H"], keys: Float[Array, "P page_size K H"], value_dim: int | None = None
) -> Sizes:
    """The best sizes on this device for the queries of a step."""
    rows = padded_rows(queries.shape[1] // keys.shape[2])
    return fitting(
        Sizes(**attention_sizes("paged_decode", keys.dtype, rows=len(queries), is_latent=value_dim is not None)),
        lambda sizes: shared_bytes(min(rows, sizes.block_m), sizes.block_k, sizes.num_stages, queries, keys, value_dim),
    )


def attend_splits(
    queries: Float[Array, "B N H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    page_table: Int[Array, "R C"],
    ranges: Ranges,
    scoring: Scoring,
    sizes: Sizes,
    *,
    prefix: Partials | None = None,
    sinks: Float[Array, " N"] | None = None,
    value_dim: int | None = None,
    out_dtype: jax.typing.DTypeLike,
    interpret: bool,
) -> Partials:
    """Attention of each token to every split of its range: one launch.

    Args:
        queries: The tokens' queries.
        keys: The pool of one layer.
        values: Likewise.
        page_table: Request row → pages.
        ranges: The keys that each token attends to.
        scoring: How queries and keys become scores.
        sizes: How to cut the work.
        prefix: Attention to the keys before each token's range, which is joined to the result of its only split.
        sinks: See `ops.paged_attention`. They are part of the result of the only split too.
        value_dim: See `paged_decode`.
        out_dtype: Type of the result.
        interpret: Run slowly on a CPU instead of compiling for a GPU.
    """
    check_supported(keys, value_dim)
    assert (prefix is None and sinks is None) or sizes.splits == 1, "they would be joined to every split"
    sizes = sizes._replace(block_k=keys_in_block(sizes.block_k, queries, keys, value_dim))
    pools = (keys, values) if value_dim is None else (keys,)
    rows, heads, head_dim = queries.shape
    value_dim = value_dim or head_dim
    parts = parts_of_group(heads // keys.shape[2], sizes.block_m)
    blocks = parts * keys.shape[2]
    group = heads // blocks
    head_block = (None, None, None, group, value_dim)
    known, known_specs = (), ()
    if prefix is not None:
        splits = prefix.out.shape[1]
        known = (
            prefix.out.reshape(rows, splits, blocks, group, value_dim),
            prefix.lse.reshape(rows, splits, blocks, group),
        )
        known_specs = (
            pl.BlockSpec((None, splits, None, group, value_dim), lambda k, s, b: (b, 0, k, 0, 0)),
            pl.BlockSpec((None, splits, None, group), lambda k, s, b: (b, 0, k, 0)),
        )
    given = () if sinks is None else (sinks.reshape(blocks, group),)
    out, lse = pl.pallas_call(
        functools.partial(_decode_kernel, scoring=scoring, sizes=sizes, prefix_block_k=prefix and prefix.block_k),
        grid=(blocks, sizes.splits, rows),
        in_specs=[
            *(whole_spec(array) for array in (*ranges, page_table)),
            pl.BlockSpec((None, None, group, head_dim), lambda k, s, b: (b, k, 0, 0)),
            tuple(pool_spec(pool, head_axis=0, parts=parts) for pool in pools),
            known_specs,
            tuple(pl.BlockSpec((None, group), lambda k, s, b: (k, 0)) for _ in given),
        ],
        out_specs=[
            pl.BlockSpec(head_block, lambda k, s, b: (b, s, k, 0, 0)),
            pl.BlockSpec(head_block[:-1], lambda k, s, b: (b, s, k, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, sizes.splits, blocks, group, value_dim), out_dtype),
            jax.ShapeDtypeStruct((rows, sizes.splits, blocks, group), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=sizes.num_warps, num_stages=sizes.num_stages),
        interpret=interpret,
    )(*ranges, page_table, queries.reshape(rows, blocks, group, head_dim), pools, known, given)
    shape = (rows, sizes.splits, heads)
    return Partials(out.reshape(*shape, value_dim), lse.reshape(shape), ranges.first, ranges.last, sizes.block_k)


def with_padding(attended: Attended, num_tokens: int) -> Attended:
    """The same with more tokens, which see nothing, up to `num_tokens`."""
    missing = num_tokens - len(attended.out)
    if not missing:
        return attended
    return Attended(
        jnp.pad(attended.out, ((0, missing), (0, 0), (0, 0))),
        jnp.pad(attended.lse, ((0, missing), (0, 0)), constant_values=-jnp.inf),
    )


def _decode_kernel(
    rows: Ref,
    firsts: Ref,
    lasts: Ref,
    page_table: Ref,
    queries: Ref,
    pools: tuple[Ref, ...],
    known: tuple[Ref, ...],
    sinks: tuple[Ref, ...],
    out: Ref,
    lse: Ref,
    *,
    scoring: Scoring,
    sizes: Sizes,
    prefix_block_k: int | None,
) -> None:
    """The query heads of one kv head of one token, or a part of them, over one split of the token's keys.

    Grid: (K · parts, splits, B); programs that run together read neighbouring heads of the same pages. Queries
    `[G, H]` are padded to a block of at least 16 rows in registers, and masked on load and store. Rows, ranges, page
    table and pool are whole. A program owns the block `[G, H]` of `out` and `[G]` of `lse` of its token, split and kv
    head. A program whose split has no keys writes nothing, except for the first split, which always writes.

    If attention to the keys before the range is given, a program reads its block `[splits, G, H]` of outputs and
    `[splits, G]` of log-sum-exps for its token and kv head, masked for splits without keys. If there are sinks, it
    reads the `[G]` of its kv head.
    """
    split, token = pl.program_id(1), pl.program_id(2)
    first, last = split_range(firsts[token], lasts[token], split, sizes.splits, sizes.block_k)

    @pl.when((first < last) | (split == 0))
    def _() -> None:
        group, value_dim = out.shape
        head = jnp.arange(padded_rows(group))
        is_head = head < group
        state = attend(
            load_query(queries, (head[:, None],), is_head, value_dim),
            pools,
            page_table,
            rows[token],
            first,
            last,
            scoring=scoring,
            block_k=sizes.block_k,
            value_dim=value_dim,
        )
        if prefix_block_k is not None:
            state = _joined_prefix(state, known[0], known[1], firsts[token], prefix_block_k)
        found, found_lse = finish(state, load_sinks(sinks, head, is_head))
        store_rows(out, (head[:, None],), is_head, found)
        plgpu.store(lse.at[head], found_lse, mask=is_head)


def _joined_prefix(state: Softmax, outs: Ref, lses: Ref, prefix_len: Int[Array, ""], block_k: int) -> Softmax:
    """The state joined with the first `prefix_len` keys. The references hold the results of their splits."""
    splits, group, head_dim = outs.shape
    rows, dims = state.weighted.shape
    head, dim = jnp.arange(rows), jnp.arange(dims)

    def join(split: Int[Array, ""], state: Softmax) -> Softmax:
        begin, end = split_range(jnp.int32(0), prefix_len, split, splits, block_k)
        is_real = (begin < end) & (head < group)
        block, is_block = (split, head[:, None], dim[None, :]), is_real[:, None] & (dim[None, :] < head_dim)
        out = plgpu.load(outs.at[block], mask=is_block, other=0.0)
        return joined(state, out, plgpu.load(lses.at[split, head], mask=is_real, other=-jnp.inf))

    num_splits = jnp.where(prefix_len > 0, jnp.int32(splits), jnp.int32(0))
    return lax.fori_loop(jnp.int32(0), num_splits, join, state)
