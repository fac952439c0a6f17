"""Attention on a TPU by JAX's own ragged paged attention. Letters: `jsg/models/inputs.py`.

The kernel is the library's. This file makes its arguments and refuses what it cannot do. It ran in TPU interpret mode
and was compiled for TPU v4, v5e and v6e. No TPU has run it, so its speed is unknown.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jaxtyping import Array, Bool, Float

from jsg.kernels_pallas.inputs import AttentionInputs, LayerCache, Sequences
from jsg.window import Window

DECODE_QUERY_BLOCK = 2
"""Packed tokens in one program of the kernel in a step without tiles. Each is of another sequence, for whose keys the
kernel computes all of them. With 32/8 heads the loop over `KEY_BLOCK` keys has 1 771 bundles (v5e) and 1 816 (v6e);
with 8 tokens 2 428 and 2 339, with 32 5 258 and 4 448, with one 1 846 on v6e."""
EXTEND_QUERY_BLOCK = 128
"""Likewise in a step with tiles, where each block reads all keys of its sequence: the more, the fewer times."""
KEY_BLOCK = 512
"""Keys that are fetched at a time. With 8 key-value heads in bfloat16 and two buffers they take 4 MiB of vector memory.
The library's own choice for small pages, 128 pages, is more than a kernel may have (compiled for v5e)."""
MAX_PAGES_PER_BLOCK = 32
"""Each page is a copy of its own, and the code of the kernel has each copy."""
MIN_PAGE_SIZE = 64
"""The smallest page by default. With pages of 16 the copies of `KEY_BLOCK` keys take 450 bundles more (v6e)."""
VMEM_BYTES = 2**25
"""What the kernel may take of vector memory: `EXTEND_QUERY_BLOCK` tokens of 32 heads need more than the default."""
PAGE_TABLE_BYTES = 2**20 - 2**16
"""Room for the page table in a TPU's scalar memory of 1 MiB, which holds the whole table."""


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

    Grid: (blocks of heads, blocks of tokens), in order. A program goes over the sequences that have a
    token in its block, and for each over its keys, `KEY_BLOCK` at a time. They are fetched page by page into one of two
    buffers while the other is computed on. Page table and lengths lie in scalar memory, and the pool stays in HBM. Keys
    after a token, before its window and beyond the sequence are masked. A token of another sequence is not stored to.

    Unlike the other implementations it lowers masked scores instead of replacing them. So a key that is not finite
    reaches all tokens of its request in this step, also earlier ones.

    Raises:
        NotImplementedError: The kernel cannot do this shape or type; the message names it.
    """
    if sinks is not None:
        raise NotImplementedError("the TPU kernel knows no sinks and gives no log-sum-exp, to which one could be added")
    if window is not None and window.is_aligned:
        raise NotImplementedError("the TPU kernel knows windows that end with each token only")
    if len(cache) != 1:
        raise NotImplementedError("the TPU kernel wants the key and the value of a head side by side in one array")
    (pool,) = cache
    sequences = sequences_of(inputs) if inputs.sequences is None else inputs.sequences
    _check(queries, pool, sequences)
    page_size, columns = pool.shape[1], sequences.pages.shape[1]
    out = ragged_paged_attention(
        queries,
        pool,
        sequences.kv_lens,
        sequences.pages,
        sequences.starts,
        sequences.num_sequences,
        sm_scale=scale,
        sliding_window=window and window.length,
        soft_cap=softcap,
        num_kv_pages_per_block=min(KEY_BLOCK // page_size, MAX_PAGES_PER_BLOCK, columns),
        num_queries_per_block=min(EXTEND_QUERY_BLOCK if len(inputs.tile_rows) else DECODE_QUERY_BLOCK, len(queries)),
        vmem_limit_bytes=VMEM_BYTES,
    )
    is_real = jnp.arange(len(queries)) < sequences.num_tokens  # the kernel does not write the others
    return jnp.where(is_real[:, None, None], out, 0)


def sequences_of(inputs: AttentionInputs) -> Sequences:
    """The sequences of a step: the singles, and then the tiles, of which those of one row are one sequence.

    A tile as a sequence would read fewer keys, but each sequence needs a row of the page table in scalar memory, which
    has no room for one per tile. A step without tokens has one sequence of one token, which reads the dump page,
    because the kernel starts its first copy before it checks whether there is work.
    """
    ends = jnp.concatenate([jnp.arange(1, len(inputs.single_rows) + 1), inputs.tile_starts + inputs.tile_lens])
    kv_lens = jnp.concatenate([inputs.single_kv_lens, inputs.tile_positions + inputs.tile_lens])
    rows = jnp.concatenate([inputs.single_rows, inputs.tile_rows])
    is_real, is_first = _pieces(inputs)
    largest = min(len(rows), len(inputs.page_table))
    index = jnp.where(is_real, jnp.cumsum(is_first) - 1, largest)  # of the sequence that each piece belongs to
    ones = jnp.ones(largest, jnp.int32)
    last = jax.lax.cummax(ones.at[index].max(ends, mode="drop"))
    return Sequences(
        pages=inputs.page_table[jnp.zeros_like(ones).at[index].set(rows, mode="drop")],
        kv_lens=ones.at[index].max(kv_lens, mode="drop"),
        starts=jnp.concatenate([jnp.zeros(1, jnp.int32), last]),
        num_sequences=jnp.maximum(jnp.sum(is_first, dtype=jnp.int32), 1)[None],
        num_tokens=jnp.max(jnp.where(is_real, ends, 0)),
    )


def _pieces(inputs: AttentionInputs) -> tuple[Bool[Array, " pieces"], Bool[Array, " pieces"]]:
    """Which singles and tiles are real, and which of them begin a sequence. The tiles of a row are neighbours."""
    is_single = inputs.single_kv_lens > 0
    is_tile = jnp.arange(len(inputs.tile_rows)) < inputs.num_tiles
    follows = jnp.diff(inputs.tile_rows, prepend=-1) == 0
    return jnp.concatenate([is_single, is_tile]), jnp.concatenate([is_single, is_tile & ~follows])


def smallest_page_size(num_rows: int, context_len: int) -> int:
    """The smallest page, a power of two, with which a page table of this size fits into scalar memory."""
    page_size = MIN_PAGE_SIZE
    while _table_bytes(num_rows, -(-context_len // page_size)) > PAGE_TABLE_BYTES:
        page_size *= 2
    return page_size


def _table_bytes(num_rows: int, columns: int) -> int:
    """The bytes of an int32 array in scalar memory, which is padded to tiles of 8 × 128."""
    return 4 * (-(-num_rows // 8) * 8) * (-(-columns // 128) * 128)


def _check(queries: Float[Array, "T N H"], pool: Float[Array, "P page_size heads H"], sequences: Sequences) -> None:
    """Raises NotImplementedError for all that the library refuses, some of it only when the kernel is compiled."""
    _, page_size, heads, head_dim = pool.shape
    if head_dim != 128:
        raise NotImplementedError(f"the TPU kernel wants a head_dim of 128, but got {head_dim}")
    if queries.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"the TPU kernel wants float32 or bfloat16 queries, but got {queries.dtype}")
    if page_size > KEY_BLOCK:
        raise NotImplementedError(f"the TPU kernel wants pages of at most {KEY_BLOCK} tokens, but got {page_size}")
    packing = 4 // pool.dtype.itemsize  # numbers in one 32-bit word
    words = heads // packing
    if heads % packing or (words not in (1, 2, 4) and words % 8):
        raise NotImplementedError(
            f"the TPU kernel wants keys and values to fill 1, 2, 4 or a multiple of 8 words, but got {heads} of "
            f"{pool.dtype}"
        )
    if _table_bytes(*sequences.pages.shape) > PAGE_TABLE_BYTES:
        raise NotImplementedError(
            f"the TPU kernel wants the page table in scalar memory, but got {sequences.pages.shape}; larger pages or a "
            "shorter context make it smaller"
        )
