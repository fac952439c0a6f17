"""Attention of an extend step in one launch: chunks of prompts, and beside them rows that bring a single token.

    packed tokens   a   b   c │ d d d d d d d │ e e e │ padding       d and e: chunks of two prompts
    query tiles               │ d d d d │ d d d │ e e e │             from the host
    items           a   b   c │ e │ e e │ d │ d d │ d d │ d d │       here: tiles in parts of two, the last one first

One program computes an item for one kv head. A tile is as large as any kernel needs. A part of a tile has `block_q`
tokens, which fill a matmul together with the query heads of a kv head. A single is an item with a smaller matmul, and
its time is that of reading memory. A prompt without a cached prefix is the case in which positions begin at 0.

Keys in pages: Kwon et al., "Efficient memory management for large language model serving with PagedAttention" (2023).
The loop over them is `attention_block.attend`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas import attention_block
from jsg.kernels_pallas.attention_block import Attended, Ref, Softmax
from jsg.kernels_pallas.inputs import AttentionInputs, Scoring
from jsg.kernels_pallas.tile import QUERY_TILE
from jsg.kernels_pallas.tuning import attention_sizes, fitting
from jsg.window import Window


class Sizes(NamedTuple):
    """How the work is cut. `tuning` has the sizes by packed tokens of the step.

    Attributes:
        block_m: Rows of the query block of a part of a tile: tokens times query heads of one kv head.
        block_k: Keys per iteration: see `keys_in_block`.
        num_warps: Warps per program; twice as many for heads that are longer than `REGISTER_HEAD_DIM`.
        num_stages: Blocks of keys and values in shared memory: one in use, and the others being loaded.
    """

    block_m: int
    block_k: int
    num_warps: int
    num_stages: int


class Items(NamedTuple):
    """The work of the programs of one kv head. An item is consecutive packed tokens of one request.

    Attributes:
        rows: Request row.
        starts: The first packed token.
        lens: The number of tokens; 0 if there is no such item. Real items come first.
        positions: Position of the first token in its sequence.
        num_singles: The number of items that are singles, which come first.
        num_tokens: The number of packed tokens that are not padding, which come first.
    """

    rows: Int[Array, " I"]
    starts: Int[Array, " I"]
    lens: Int[Array, " I"]
    positions: Int[Array, " I"]
    num_singles: Int[Array, " 1"]
    num_tokens: Int[Array, " 1"]


class Own(NamedTuple):
    """Attention of some tokens to the keys of their own chunks, computed before.

    Attributes:
        out: Results; those of other tokens mean nothing.
        lse: See `Attended`.
        before: The number of keys before the chunk of each of these tokens; for others more than there are.
    """

    out: Float[Array, "T N H"]
    lse: Float[Array, "T N"]
    before: Int[Array, " T"]


class Block(NamedTuple):
    """The rows of a query block, each of which is one query head of the kv head of one packed token.

    Attributes:
        nth: The index of its token in the item.
        where: Index arrays into `[T, G]`.
        is_head: Whether a row is a head that exists.
    """

    nth: Int[Array, " M"]
    where: tuple[Int[Array, "M 1"], Int[Array, "M 1"]]
    is_head: Bool[Array, " M"]


def ragged_paged_attention(
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
    own: Own | None = None,
    interpret: bool = False,
) -> Attended:
    """Attention of the singles and the query tiles of a step, zeros for padding tokens: one launch.

    The result of a token in a tile depends only on its own request, and not on how the prompt is cut or on the rest of
    the step: blocks of keys begin at multiples of `block_k` for every tile, and a block of which a token sees nothing
    does not change its softmax. Deterministic mode needs this. A single is computed by other instructions.

    Args:
        queries: See `ops.paged_attention`, as for `scale`, `window`, `softcap` and `sinks`.
        keys: The pool of one layer.
        values: Likewise; not used with `value_dim`.
        inputs: They have room for at least one query tile and one single.
        scale: Above zero.
        window: See above.
        softcap: See above.
        sinks: See above.
        value_dim: See `ops.latent_attention`; None for values in an array of their own.
        sizes: How to cut the work; None for the best sizes on this device.
        own: What tokens of tiles have seen already, so that only the keys before that are read; None for nothing.
        interpret: Run slowly on a CPU instead of compiling for a GPU.

    Raises:
        NotImplementedError: See `attention_block.check_supported`.
    """
    attention_block.check_supported(keys, value_dim)
    num_tokens, heads, head_dim = queries.shape
    sizes = sizes or default_sizes(queries, keys, value_dim)
    parts = attention_block.parts_of_group(heads // keys.shape[2], sizes.block_m)
    blocks = parts * keys.shape[2]
    group = heads // blocks
    block_q = min(QUERY_TILE, max(1, sizes.block_m // pl.next_power_of_2(group)))
    items = list_items(inputs, block_q, num_tokens)
    of_head, of_out = (
        pl.BlockSpec((num_tokens, None, group, dim), lambda head, _: (0, head, 0, 0))
        for dim in (head_dim, value_dim or head_dim)
    )
    pools = (keys, values) if value_dim is None else (keys,)
    of_pools = tuple(attention_block.pool_spec(pool, head_axis=0, parts=parts) for pool in pools)
    whole = pl.BlockSpec()
    given = () if sinks is None else (sinks.reshape(blocks, group),)
    of_group = tuple(pl.BlockSpec((None, group), lambda head, _: (head, 0)) for _ in given)
    num_warps = sizes.num_warps if value_dim else attention_block.warps_for(sizes.num_warps, head_dim)
    block_k = attention_block.keys_in_block(sizes.block_k, queries, keys, value_dim)
    of_lse = pl.BlockSpec((num_tokens, None, group), lambda head, _: (0, head, 0))
    done, of_done = (), ()
    if own is not None:
        shape = (num_tokens, blocks, group)
        done, of_done = (
            (own.out.reshape(*shape, head_dim), own.lse.reshape(shape), own.before),
            (of_head, of_lse, whole),
        )
    out, lse = pl.pallas_call(
        functools.partial(_kernel, scoring=Scoring(scale, window, softcap), block_q=block_q, block_k=block_k),
        grid=(blocks, len(items.lens)),
        in_specs=[Items._make([whole] * len(Items._fields)), whole, of_head, of_pools, of_group, of_done],
        out_specs=[of_out, of_lse],
        out_shape=[
            jax.ShapeDtypeStruct((num_tokens, blocks, group, value_dim or head_dim), queries.dtype),
            jax.ShapeDtypeStruct((num_tokens, blocks, group), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=sizes.num_stages),
        interpret=interpret,
        name="ragged_paged_attention",
    )(items, inputs.page_table, queries.reshape(num_tokens, blocks, group, head_dim), pools, given, done)
    return Attended(out.reshape(num_tokens, heads, -1), lse.reshape(num_tokens, heads))


def default_sizes(
    queries: Float[Array, "T N H"], keys: Float[Array, "P page_size K H"], value_dim: int | None = None
) -> Sizes:
    """The best sizes on this device for the queries of a step."""
    kernel, is_latent = "ragged_paged_attention", value_dim is not None
    return fitting(
        Sizes(**attention_sizes(kernel, keys.dtype, rows=len(queries), is_latent=is_latent)),
        lambda sizes: attention_block.shared_bytes(
            sizes.block_m, sizes.block_k, sizes.num_stages, queries, keys, value_dim
        ),
    )


def list_items(inputs: AttentionInputs, block_q: int, num_tokens: int) -> Items:
    """The work of a step: singles, then parts of at most `block_q` tokens of query tiles, from the last to the first.

    The last part of a chunk sees the most keys. It starts early, so that a launch ends with short work and no
    multiprocessor waits for another. A request row brings one single, or one chunk of which all tiles but the last are
    full, so there is room for an item of each row and for all full parts. All layers of a model list the same items,
    and XLA computes them once.
    """
    num_items = pl.cdiv(num_tokens, block_q) + min(num_tokens, inputs.page_table.shape[0])
    num_singles = jnp.sum(inputs.single_kv_lens > 0)
    is_tile = jnp.arange(len(inputs.tile_lens)) < inputs.num_tiles
    tile_lens = jnp.where(is_tile, inputs.tile_lens, 0)
    parts = pl.cdiv(tile_lens, block_q)
    ends = jnp.cumsum(parts)

    index = jnp.arange(num_items)
    part = ends[-1] - 1 - (index - num_singles)
    tile = jnp.minimum(jnp.sum(ends[None, :] <= part[:, None], axis=1), len(ends) - 1)
    offset = (part - ends[tile] + parts[tile]) * block_q
    part_len = jnp.where(part >= 0, jnp.minimum(tile_lens[tile] - offset, block_q), 0)
    is_single = index < num_singles
    single = jnp.minimum(index, len(inputs.single_rows) - 1)
    return Items(
        rows=jnp.where(is_single, inputs.single_rows[single], inputs.tile_rows[tile]),
        starts=jnp.where(is_single, single, inputs.tile_starts[tile] + offset),
        lens=jnp.where(is_single, 1, part_len),
        positions=jnp.where(is_single, inputs.single_kv_lens[single] - 1, inputs.tile_positions[tile] + offset),
        num_singles=num_singles.reshape(1),
        num_tokens=(num_singles + jnp.sum(tile_lens)).reshape(1),
    )


def _kernel(
    items: Items,
    page_table: Ref,
    queries: Ref,
    pools: tuple[Ref, ...],
    sinks: tuple[Ref, ...],
    own: tuple[Ref, ...],
    out: Ref,
    lse: Ref,
    *,
    scoring: Scoring,
    block_q: int,
    block_k: int,
) -> None:
    """All query heads of one kv head, or a part of them, of one item: see `Items`, whose fields are references here.

    So are those of `own`, if it is given: see `Own`.

    Grid: (K · parts, items); programs that run together read neighbouring heads of the same pages. All arrays are
    whole, but queries, pool, results and sinks have one kv head. A program owns `out` and `lse` of the tokens of its
    item, and of the padding tokens among packed tokens item·block_q to item·block_q + block_q - 1, so padding needs
    no pass.
    Query blocks, `[block_q·G, H]` for a part of a tile and `[G, H]` for a single, are padded in registers, and masked
    on load and store. Tokens behind the end of an item are masked too.
    """
    item = pl.program_id(1)
    length, is_single = items.lens[item], item < items.num_singles[0]

    def attend(block_q: int) -> None:
        start, position = items.starts[item], items.positions[item]
        last = position + length
        if own:
            last = jnp.minimum(last, own[2][start])
        block = _block(start, block_q, queries)
        is_real = block.is_head & (block.nth < length)
        state = attention_block.attend(
            attention_block.load_query(queries, block.where, is_real, out.shape[-1]),
            pools,
            page_table,
            items.rows[item],
            0 if scoring.window is None else jnp.maximum(scoring.window.first(position), 0),
            last,
            scoring=scoring,
            block_k=block_k,
            value_dim=out.shape[-1],
            query_positions=None if block_q == 1 else position + block.nth,
        )
        if own:
            state = _joined(state, own, block, is_real & (last < position + length))
        sink = attention_block.load_sinks(sinks, block.where[1][:, 0], block.is_head)
        _store(out, lse, block, is_real, *attention_block.finish(state, sink))

    @pl.when(is_single)
    def _() -> None:
        attend(1)

    @pl.when(~is_single & (length > 0))
    def _() -> None:
        attend(block_q)

    @pl.when((item + 1) * block_q > items.num_tokens[0])
    def _() -> None:
        block = _block(item * block_q, block_q, queries)
        token = item * block_q + block.nth
        is_padding = block.is_head & (token >= items.num_tokens[0]) & (token < len(queries))
        zeros = jnp.zeros((len(token), attention_block.padded_head_dim(out.shape[-1])), jnp.float32)
        _store(out, lse, block, is_padding, zeros, jnp.full(token.shape, -jnp.inf, jnp.float32))


def _block(start: Int[Array, ""], block_q: int, queries: Ref) -> Block:
    """The query block of `block_q` packed tokens from `start` on; the heads of a token are consecutive rows."""
    _, group, _ = queries.shape
    padded_group = pl.next_power_of_2(group)
    row = jnp.arange(attention_block.padded_rows(block_q * padded_group))
    nth, head = lax.div(row, padded_group), lax.rem(row, padded_group)
    return Block(nth, ((start + nth)[:, None], head[:, None]), head < group)


def _joined(state: Softmax, own: tuple[Ref, ...], block: Block, is_own: Bool[Array, " M"]) -> Softmax:
    """The state joined with what rows of the block have seen already, if they have."""
    token, head = block.where
    (out,) = attention_block.load_query(own[0], block.where, is_own, own[0].shape[-1])
    lse = plgpu.load(own[1].at[token[:, 0], head[:, 0]], mask=is_own, other=-jnp.inf)
    return attention_block.joined(state, out, lse)


def _store(
    out: Ref,
    lse: Ref,
    block: Block,
    mask: Bool[Array, " M"],
    out_MH: Float[Array, "M H"],
    lse_M: Float[Array, " M"],
) -> None:
    token, head = block.where
    attention_block.store_rows(out, block.where, mask, out_MH)
    plgpu.store(lse.at[token[:, 0], head[:, 0]], lse_M, mask=mask)
