"""Attention of rows that bring one token, in which a prefix that a group of rows shares is read once per group tile.

    launch    programs                         attend to                        whose keys they load
    prefix    group tile × kv head × split     the keys that its members share  once for up to 16 requests
    rest      token × kv head                  the keys behind those            its own: `paged_decode` in one split

A program of the rest joins the result of the first launch for its token, by log-sum-exp, which is exact. A token in no
group has an empty prefix and all its keys in the rest, so one executable serves every step. If nothing is shared, the
programs of the first launch return at once.

Cascade attention: Ye et al., "Cascade inference" (FlashInfer, 2024); Juravsky et al., "Hydragen" (2024).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import paged_decode
from jsg.kernels_pallas.attention_block import (
    REGISTER_HEAD_DIM,
    Attended,
    Ref,
    attend,
    check_supported,
    finish,
    keys_in_block,
    load_query,
    padded_head_dim,
    padded_rows,
    pool_spec,
    shared_bytes,
    store_rows,
    warps_for,
    whole_spec,
)
from jsg.kernels_pallas.combine import Partials, split_range
from jsg.kernels_pallas.inputs import AttentionInputs, PrefixGroups, Scoring
from jsg.kernels_pallas.tile import GROUP_TILE
from jsg.kernels_pallas.tuning import attention_sizes, fitting
from jsg.window import Window

MAX_COLUMN_BYTES = 256
"""The most rows of a query block times the bytes of a number: 128 rows of bfloat16, 64 of float32, and half as many of
heads that are longer than `REGISTER_HEAD_DIM`. The accumulators of more would not fit in the registers."""


class Sizes(NamedTuple):
    """How the prefix pass is cut. `tuning` has the sizes by group tiles of the step.

    Attributes:
        splits: The most programs that share the keys of one group tile and kv head.
        block_k: Keys per iteration of a program, unless `keys_in_block` gives fewer; a split is a multiple of it.
        num_warps: Warps of a program whose query block has 64 rows or less. One with 128 rows has twice as many, and
            so has one of heads that are longer than `REGISTER_HEAD_DIM`.
        num_stages: Iterations whose loads are in flight.
        rest: Sizes of the rest, which always has one split.
    """

    splits: int
    block_k: int
    num_warps: int
    num_stages: int
    rest: paged_decode.Sizes


def cascade(
    queries: Float[Array, "T N H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    sizes: Sizes | None = None,
    interpret: bool = False,
) -> Attended:
    """The result of `paged_decode`, with shared prefixes read once per group tile.

    Args:
        queries: See `ops.paged_attention`, as for `scale`, `window`, `softcap` and `sinks`.
        keys: The pool of one layer.
        values: Likewise.
        inputs: Only the page table, the singles and the groups are used.
        scale: Above zero.
        window: With a window, groups are ignored, because their members may see different parts of the prefix.
        softcap: See above.
        sinks: See above.
        sizes: How to cut the work; None for the best sizes on this device.
        interpret: Run slowly on a CPU instead of compiling for a GPU.

    Raises:
        NotImplementedError: See `attention_block.check_supported`.
    """
    if inputs.groups is None or window is not None:
        return paged_decode.paged_decode(
            queries,
            keys,
            values,
            inputs,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            sizes=sizes.rest if sizes else None,
            interpret=interpret,
        )
    num_singles = min(len(inputs.single_rows), len(queries))
    sizes = sizes or default_sizes(len(inputs.groups.lens), queries[:num_singles], keys)
    single_queries, scoring = queries[:num_singles], Scoring(scale, softcap=softcap)
    shared_lens = inputs.groups.shared_lens[:num_singles]
    ranges = paged_decode.Ranges(inputs.single_rows[:num_singles], shared_lens, inputs.single_kv_lens[:num_singles])
    prefix = _attend_prefixes(
        single_queries, keys, values, inputs.page_table, inputs.groups, shared_lens, scoring, sizes, interpret=interpret
    )
    rest = paged_decode.attend_splits(
        single_queries,
        keys,
        values,
        inputs.page_table,
        ranges,
        scoring,
        sizes.rest._replace(splits=1),
        prefix=prefix,
        sinks=sinks,
        out_dtype=queries.dtype,
        interpret=interpret,
    )
    return paged_decode.with_padding(Attended(rest.out[:, 0], rest.lse[:, 0]), len(queries))


def default_sizes(num_tiles: int, queries: Float[Array, "B N H"], keys: Float[Array, "P page_size K H"]) -> Sizes:
    """The best sizes on this device for the queries of a step."""
    rows = rows_of(queries, keys)
    return fitting(
        Sizes(**attention_sizes("cascade", keys.dtype, rows=num_tiles), rest=paged_decode.default_sizes(queries, keys)),
        lambda sizes: shared_bytes(rows, sizes.block_k, sizes.num_stages, queries, keys),
    )


def _attend_prefixes(
    queries: Float[Array, "B N H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    page_table: Int[Array, "R C"],
    groups: PrefixGroups,
    shared_lens: Int[Array, " B"],
    scoring: Scoring,
    sizes: Sizes,
    *,
    interpret: bool,
) -> Partials:
    """Attention of each group's members to every split of their shared prefix: one launch."""
    check_supported(keys)
    sizes = sizes._replace(block_k=keys_in_block(sizes.block_k, queries, keys))
    tokens, heads, head_dim = queries.shape
    kv_heads, num_tiles = keys.shape[2], len(groups.lens)
    group = heads // kv_heads
    members = members_per_program(group, queries.dtype.itemsize, head_dim)
    out, lse = pl.pallas_call(
        functools.partial(_prefix_kernel, members_per_program=members, scoring=scoring, sizes=sizes),
        grid=(kv_heads, sizes.splits, num_tiles * (GROUP_TILE // members)),
        in_specs=[
            *(whole_spec(array) for array in (groups.rows, groups.lens, groups.members, page_table)),
            pl.BlockSpec((tokens, None, group, head_dim), lambda k, s, t: (0, k, 0, 0)),
            (pool_spec(keys, head_axis=0), pool_spec(values, head_axis=0)),
        ],
        out_specs=[
            pl.BlockSpec((tokens, None, None, group, head_dim), lambda k, s, t: (0, s, k, 0, 0)),
            pl.BlockSpec((tokens, None, None, group), lambda k, s, t: (0, s, k, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((tokens, sizes.splits, kv_heads, group, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((tokens, sizes.splits, kv_heads, group), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(
            num_warps=warps_for(sizes.num_warps * max(1, rows_of(queries, keys) // 64), head_dim),
            num_stages=sizes.num_stages,
        ),
        interpret=interpret,
    )(
        groups.rows,
        groups.lens,
        groups.members,
        page_table,
        queries.reshape(tokens, kv_heads, group, head_dim),
        (keys, values),
    )
    shape = (tokens, sizes.splits, heads)
    return Partials(
        out.reshape(*shape, head_dim), lse.reshape(shape), jnp.zeros_like(shared_lens), shared_lens, sizes.block_k
    )


def members_per_program(group: int, itemsize: int, head_dim: int) -> int:
    """The number of requests of a group tile in one program, each with the `group` query heads of one kv head."""
    column_bytes = MAX_COLUMN_BYTES * REGISTER_HEAD_DIM // max(REGISTER_HEAD_DIM, padded_head_dim(head_dim))
    return max(1, min(GROUP_TILE, column_bytes // itemsize // pl.next_power_of_2(group)))


def rows_of(queries: Float[Array, "B N H"], keys: Float[Array, "P page_size K H"]) -> int:
    """Rows of a query block."""
    group = queries.shape[1] // keys.shape[2]
    return padded_rows(members_per_program(group, queries.dtype.itemsize, keys.shape[3]) * pl.next_power_of_2(group))


def _prefix_kernel(
    tile_rows: Ref,
    tile_lens: Ref,
    tile_members: Ref,
    page_table: Ref,
    queries: Ref,
    pools: tuple[Ref, ...],
    out: Ref,
    lse: Ref,
    *,
    members_per_program: int,
    scoring: Scoring,
    sizes: Sizes,
) -> None:
    """The query heads of one kv head of some members of a group tile, over one split of the shared prefix.

    Grid: (K, splits, U · programs per tile). A tile has several programs if its members have so many query heads that
    16 members do not fit in a query block. Row m · Gpad + g of the block is query head g of member m, with Gpad the
    next power of two of G. Rows of no member and dimensions beyond H are masked on load and store. All arrays are
    whole, except for the kv head. A program owns the rows `[G, H]` of `out` and `[G]` of `lse` of its members, split
    and kv head, which it scatters. A program without members, or whose split has no keys, writes nothing.
    """
    num_tokens, group, head_dim = queries.shape
    programs_per_tile = GROUP_TILE // members_per_program
    split, program = pl.program_id(1), pl.program_id(2)
    tile = lax.div(program, programs_per_tile)
    first_member = lax.rem(program, programs_per_tile) * members_per_program
    first, last = split_range(jnp.int32(0), tile_lens[tile], split, sizes.splits, sizes.block_k)

    @pl.when((first < last) & (tile_members[tile, first_member] >= 0))
    def _() -> None:
        padded_group = pl.next_power_of_2(group)
        row = jnp.arange(padded_rows(members_per_program * padded_group))
        member, head = lax.div(row, padded_group), lax.rem(row, padded_group)
        is_row = (member < members_per_program) & (head < group)
        token = plgpu.load(tile_members.at[tile, first_member + member], mask=is_row, other=-1)
        is_row &= token >= 0
        token = jnp.where(is_row, token, num_tokens)  # interpret mode writes masked rows back, so they need a place
        block = token[:, None], head[:, None]
        state = attend(
            load_query(queries, block, is_row, head_dim),
            pools,
            page_table,
            tile_rows[tile],
            first,
            last,
            scoring=scoring,
            block_k=sizes.block_k,
            value_dim=head_dim,
        )
        found, found_lse = finish(state)
        store_rows(out, block, is_row, found)
        plgpu.store(lse.at[token, head], found_lse, mask=is_row)
