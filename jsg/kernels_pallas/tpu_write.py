"""The write into a pool for TPUs, in Pallas' Mosaic lowering. Letters: `jsg/models/inputs.py`.

XLA's own scatter reads and writes a tile of memory for each token and head, 16 in 2 500 bundles (compiled for v5e), and
copies the pool for more than some hundred tokens. Here a token takes 219 bundles, and so do 16 of a prompt.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import vmem_rotate
from jsg.kernels_pallas.inputs import HeadNorms, LayerCache
from jsg.kernels_pallas.reference_write import by_head, rotated, storable, to_pool_dtype
from jsg.kernels_pallas.tile import LANES

TOKEN_BLOCK = 256
"""Tokens of one program of the kernel, or fewer so that they take at most `BLOCK_BYTES` as float32."""
BLOCK_BYTES = 2**22
NUM_BUFFERS = 8
"""Granules in vector memory, of which half are on their way from the pool and half on their way back."""


def granule(dtype: jax.typing.DTypeLike) -> int:
    """The consecutive slots of a page that are read and written together: those of a tile of memory."""
    return 32 // jnp.dtype(dtype).itemsize


def rotate_and_write(
    qkv: Float[Array, "T K joint"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    slots: Int[Array, " T"],
    cache: LayerCache,
    norms: HeadNorms | None,
) -> tuple[Float[Array, "T N H"], LayerCache]:
    """See `ops.rotate_and_write`. XLA rotates heads that are not 128 wide.

    Raises:
        NotImplementedError: The kernel cannot write to such a pool; the message names the reason.
    """
    if len(cache) != 1:
        raise NotImplementedError("the TPU kernel wants the keys of a page side by side, one head after another")
    (pool,) = cache
    size, page_size, width = granule(pool.dtype), *pool.shape[3:]
    if page_size % size or width % LANES:
        raise NotImplementedError(
            f"the TPU kernel wants pages of a multiple of {size} tokens and heads of a multiple of 64 numbers, but got "
            f"pages of {page_size} and rows of {width}"
        )
    if cos.shape[1] == LANES // 2:  # Mosaic stores no longer rows with a stride
        queries, new = vmem_rotate.rotated(qkv, cos, sin, norms)
        return queries, (_write(pool, slots, to_pool_dtype(new, pool.dtype)),)
    queries, *new = rotated(qkv, cos, sin, norms)
    return queries, (_write(pool, slots, by_head(pool, *storable(slots, *new))),)


def _write(
    pool: Float[Array, "P K parts page_size width"], slots: Int[Array, " T"], new: Float[Array, "T K parts width"]
) -> Float[Array, "P K parts page_size width"]:
    """The pool with new tokens at their slots. Those of page 0 are not written.

    Grid: (blocks of tokens,), in order. A granule is consecutive slots of a page, for all heads, so that neighbours in
    a prompt share one. Each is copied from the pool, new rows are put in, and it is copied back. The tokens of a
    request are in order, so no granule is met twice in a block; a block waits for its writes.
    """
    size, page_size, (num, kv_heads, parts, width) = granule(pool.dtype), pool.shape[3], new.shape
    rows, block = kv_heads * parts * width // LANES, TOKEN_BLOCK
    while block > size and (4 * block * rows * LANES > BLOCK_BYTES or block >= 2 * num):
        block //= 2
    padded = jnp.pad(slots, (0, -num % block))
    firsts, lens = _runs(padded, block, page_size, size)
    flat = jnp.pad(new, ((0, len(padded) - num), (0, 0), (0, 0), (0, 0))).reshape(-1, LANES)
    return pl.pallas_call(
        functools.partial(_kernel, block=block, rows=rows, granule=size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(len(padded) // block,),
            in_specs=[pl.BlockSpec((block * rows, LANES), lambda i, *_: (i, 0)), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=[
                pltpu.VMEM(((block + 2 * size) * rows, LANES), jnp.float32),
                pltpu.VMEM((NUM_BUFFERS, kv_heads, parts, size, width), pool.dtype),
                *[pltpu.SemaphoreType.DMA((NUM_BUFFERS,))] * 2,
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        input_output_aliases={4: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        name="write_by_head",
    )(padded, firsts, lens, flat, pool)


def _runs(
    slots: Int[Array, " T"], block: int, page_size: int, size: int
) -> tuple[Int[Array, " T+1"], Int[Array, " T"]]:
    """For each token the first one from it on that begins a run, T for none, and the tokens to the end of its run.

    A run are neighbours in one granule and one block that are written.
    """
    token = jnp.arange(len(slots))
    granules = jnp.where(slots < page_size, 0, slots // size)
    begins = (granules != jnp.roll(granules, 1)) | (token % block == 0)
    following = lax.cummin(jnp.where(begins, token, len(slots)), reverse=True)
    firsts = lax.cummin(jnp.where(begins & (granules > 0), token, len(slots)), reverse=True)
    end = jnp.full(1, len(slots))
    return jnp.concatenate([firsts, end]), jnp.concatenate([following[1:], end]) - token


def _kernel(
    slots_ref: Any,
    firsts_ref: Any,
    lens_ref: Any,
    new_ref: Any,
    _: Any,
    pool_ref: Any,
    rows_ref: Any,
    buffers_ref: Any,
    reads: Any,
    writes: Any,
    *,
    block: int,
    rows: int,
    granule: int,
) -> None:
    """Writes a block of tokens. `rows_ref` has `rows` of 128 numbers for each, in float32: these have addresses."""
    num_buffers, kv_heads, parts, _, width = buffers_ref.shape
    page_size, start = pool_ref.shape[3], pl.program_id(0) * block
    end, margin = start + block, granule * rows
    rows_ref[pl.ds(margin, block * rows)] = new_ref[...].astype(jnp.float32)

    def place(token: Any) -> Any:
        slot = slots_ref[token]
        first = pl.multiple_of(lax.div(lax.rem(slot, page_size), granule) * granule, granule)
        return pool_ref.at[lax.div(slot, page_size), :, :, pl.ds(first, granule)]

    def read(token: Any, number: Any) -> tuple[Any, Any]:
        """Begins to read the granule of the run at a token, if it is in the block. Returns the next run."""
        slot = lax.rem(number, num_buffers)

        @pl.when(token < end)
        def _() -> None:
            @pl.when(number >= num_buffers)
            def _() -> None:
                pltpu.make_async_copy(buffers_ref.at[slot], place(token), writes.at[slot]).wait()

            pltpu.make_async_copy(place(token), buffers_ref.at[slot], reads.at[slot]).start()

        return jnp.where(token < end, firsts_ref[jnp.minimum(token + 1, end)], token), number + (token < end)

    def one_run(state: tuple[Any, Any, Any, Any]) -> tuple[Any, Any, Any, Any]:
        token, number, next_read, num_reads = state
        next_read, num_reads = read(next_read, num_reads)
        slot, first = lax.rem(number, num_buffers), lax.rem(slots_ref[token], granule)
        pltpu.make_async_copy(place(token), buffers_ref.at[slot], reads.at[slot]).wait()
        index = lax.broadcasted_iota(jnp.int32, (granule, 1), 0)
        is_new = (index >= first) & (index < first + lens_ref[token])
        base = margin + (token - start - first) * rows
        for i, (head, part, lane) in enumerate(
            itertools.product(range(kv_heads), range(parts), range(0, width, LANES))
        ):
            at, new = (slot, head, part, slice(None), pl.ds(lane, LANES)), rows_ref[pl.ds(base + i, granule, rows)]
            old = buffers_ref[at].astype(jnp.float32)
            buffers_ref[at] = jnp.where(is_new, new, old).astype(buffers_ref.dtype)
        pltpu.make_async_copy(buffers_ref.at[slot], place(token), writes.at[slot]).start()
        return firsts_ref[token + 1], number + 1, next_read, num_reads

    first = firsts_ref[start]
    ahead = first, jnp.int32(0)
    for _ in range(num_buffers // 2):
        ahead = read(*ahead)
    _, num_runs, *_ = lax.while_loop(lambda state: state[0] < end, one_run, (first, jnp.int32(0), *ahead))

    def wait(number: Any, _: None) -> None:
        slot = lax.rem(number, num_buffers)
        pltpu.make_async_copy(buffers_ref.at[slot], place(start), writes.at[slot]).wait()

    lax.fori_loop(jnp.maximum(num_runs - num_buffers, 0), num_runs, wait, None)
