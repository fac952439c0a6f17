"""Attention of chunks to their own keys by a kernel over keys side by side, and to all others by the Triton kernel.

    own keys    gathered out of the pages, then causal attention of each chunk to itself: "cudnn" or "mosaic"
    the rest    `ragged_paged_attention`: cached prefixes of these chunks, with which it joins the first result by
                log-sum-exp, short chunks, singles

A chunk attends to as many own keys as it has tokens, so what is gathered has room for all of a step. A prefix has no
bound but the context, so it stays in its pages.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas import ragged_paged_attention
from jsg.kernels_pallas.attention_block import Attended
from jsg.kernels_pallas.inputs import AttentionInputs, Chunks
from jsg.kernels_pallas.tuning import sizes_for

LEAST_CHUNK = 128
"""The least tokens of a chunk that is taken. A shorter one has too few own keys to gain from it."""
MOST_CHUNKS = 16
"""The most chunks of a step that are taken: for each of them cuDNN writes a log-sum-exp of every packed token."""
KEY_ALIGNMENT = 8
"""Keys of a chunk begin at a multiple of this: rows that are copied to shared memory together (TMA, swizzled)."""
KEYS_BEHIND = 128
"""Keys behind those of the last chunk, so that a whole block of keys can be read there."""
NOTHING = 2**31 - 1

OwnAttention = Callable[..., Attended]
"""(queries [T, N, H], keys [S, K, H], values, chunks, scale=…) → causal attention of each chunk to its own keys."""


def chosen(num_tokens: int) -> str | None:
    """What `tuning` chooses for chunks of a step of so many packed tokens on this card: "cudnn", "mosaic" or None."""
    entry = sizes_for("chunks", rows=num_tokens)
    return next((name for name in ("cudnn", "mosaic") if entry[f"by_{name}"]), None)


def taken_by(name: str | None, queries: Float[Array, "T N H"], how: Mapping[str, Any]) -> OwnAttention | None:
    """The kernel of this name, or None if it cannot do a case for which the Triton kernel needs no help.

    Args:
        name: "cudnn", "mosaic" or None.
        queries: The queries.
        how: See `ops.paged_attention`.
    """
    head_dim = queries.shape[-1]
    if name is None or queries.dtype.itemsize != 2 or how["window"] is not None or how["softcap"] is not None:
        return None
    if name == "mosaic":
        from jsg.kernels_pallas import mosaic_chunks

        is_taken = mosaic_chunks.is_for_this_card() and head_dim in mosaic_chunks.HEAD_DIMS
        return mosaic_chunks.attend if is_taken else None
    from jsg.kernels_pallas import cudnn_chunks

    return cudnn_chunks.attend if cudnn_chunks.is_here() and head_dim <= cudnn_chunks.MAX_HEAD_DIM else None


def list_chunks(inputs: AttentionInputs, num_tokens: int) -> Chunks | None:
    """The first chunks of a step that are long enough; None where there cannot be one."""
    if num_tokens < LEAST_CHUNK or not len(inputs.tile_rows):
        return None
    most = min(MOST_CHUNKS, num_tokens // LEAST_CHUNK + 1)  # two at least: for one, JAX does not tell cuDNN where it is
    rows, starts = inputs.tile_rows, inputs.tile_starts
    is_tile = jnp.arange(len(rows)) < inputs.num_tiles
    is_same = (rows[:, None] == rows[None, :]) & is_tile[None, :]
    lens = jnp.sum(jnp.where(is_same, inputs.tile_lens[None, :], 0), axis=1)
    is_first = starts == jnp.min(jnp.where(is_same, starts[None, :], NOTHING), axis=1)
    count = jnp.cumsum(is_tile & is_first & (lens >= LEAST_CHUNK))
    nth = jnp.sum(count[None, :] <= jnp.arange(most)[:, None], axis=1)
    tile = jnp.minimum(nth, len(rows) - 1)
    chunk_lens = jnp.where(nth < len(rows), lens[tile], 0)
    padded = -(-chunk_lens // KEY_ALIGNMENT) * KEY_ALIGNMENT
    return Chunks(rows[tile], starts[tile], chunk_lens, inputs.tile_positions[tile], jnp.cumsum(padded) - padded)


def paged_attention(
    queries: Float[Array, "T N H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    inputs: AttentionInputs,
    *,
    own: OwnAttention,
    scale: float,
    **how: Any,
) -> Attended:
    """`ragged_paged_attention`, with its other arguments. Here the last bits depend on how prompts are cut.

    Args:
        queries: See `ops.paged_attention`.
        keys: The pool of one layer.
        values: Likewise.
        inputs: They have chunks.
        own: Attention of chunks to their own keys.
        scale: Above zero.
        how: Sinks, and sizes of the Triton kernel and whether it is interpreted.

    Raises:
        NotImplementedError: One of both kernels cannot do this case.
    """
    assert inputs.chunks is not None
    slots = key_slots(inputs.chunks, inputs.page_table, keys.shape[1], len(queries))
    side_by_side = (
        pool.reshape(-1, *pool.shape[2:]).at[slots].get(mode="promise_in_bounds").astype(queries.dtype)
        for pool in (keys, values)
    )
    found = own(queries, *side_by_side, inputs.chunks, scale=scale)
    is_in, _ = within(inputs.chunks.starts, inputs.chunks.lens, len(queries))
    before = jnp.min(jnp.where(is_in, inputs.chunks.positions, NOTHING), axis=1)
    done = ragged_paged_attention.Own(*found, before)
    return ragged_paged_attention.ragged_paged_attention(queries, keys, values, inputs, own=done, scale=scale, **how)


def key_slots(chunks: Chunks, page_table: Int[Array, "R C"], page_size: int, num_tokens: int) -> Int[Array, " S"]:
    """The slot of each own key of the chunks, at their places; slot 0, which has zeros, between them."""
    is_in, at = within(chunks.places, chunks.lens, num_tokens + KEY_ALIGNMENT * len(chunks.lens) + KEYS_BEHIND)
    row, position = (jnp.sum(jnp.where(is_in, x, 0), axis=1) for x in (chunks.rows, chunks.positions + at))
    slots = page_table[row, position // page_size] * page_size + position % page_size
    return jnp.where(is_in.any(axis=1), slots, 0)


def within(
    firsts: Int[Array, " M"], lens: Int[Array, " M"], count: int
) -> tuple[Bool[Array, "count M"], Int[Array, "count M"]]:
    """Whether each of `count` indices is in each chunk, and how far behind its first one."""
    at = jnp.arange(count)[:, None] - firsts
    return (at >= 0) & (at < lens), at
