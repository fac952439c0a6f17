"""Attention of chunks to their own keys on Hopper, by Pallas' Mosaic GPU lowering: one launch.

    warp groups 0 and 1    each multiplies 64 queries of one head with blocks of keys, and weights with blocks of values
    warp group 2           copies these blocks (TMA) into `NUM_STAGES` places of shared memory

While one warp group multiplies, the other computes its softmax: they take turns at the tensor cores. Registers of the
group that copies go to the others.

Warp groups that take turns, and one that copies: Shah et al., "FlashAttention-3" (2024).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib import cuda_versions  # JAX has no public name for it
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.attention_block import LOG2_E, LOWEST, Attended, Ref, Softmax
from jsg.kernels_pallas.chunks import KEY_ALIGNMENT, KEYS_BEHIND
from jsg.kernels_pallas.inputs import Chunks
from jsg.kernels_pallas.tuning import target_capability

ROWS = 64
"""Queries of a warp group, the rows of its matmul."""
PIECE = 2 * ROWS
"""Tokens of a program."""
BLOCK_K, NUM_STAGES = KEYS_BEHIND, 2
"""Keys of a block, and blocks of keys, and of values, in shared memory. With heads of 128 neither shared memory nor
registers have room for more."""
HEAD_DIMS = (64, 128)
CAPABILITY = (9, 0)
"""Compute capability of the cards whose warp groups multiply in this way."""
COPY_REGISTERS, PRODUCT_REGISTERS = 40, 232
"""Registers of a thread that copies, and of one that multiplies."""


def is_for_this_card() -> bool:
    """Whether it is for the card of this trace. JAX refuses causal masks with the assembler of CUDA 12.8 to 12.9.0."""
    version = 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    return target_capability() == CAPABILITY and not 12080 <= version < 12091


def attend(
    queries: Float[Array, "T N H"],
    keys: Float[Array, "S K H"],
    values: Float[Array, "S K H"],
    chunks: Chunks,
    *,
    scale: float,
    interpret: Any = False,
) -> Attended:
    """Causal attention of the tokens of each chunk to each other. What belongs to other tokens means nothing.

    Args:
        queries: Packed tokens, in bfloat16 or float16.
        keys: Of the same tokens and type. Those of other tokens are finite, or NaN in which nothing is seen.
        values: Likewise, finite.
        chunks: Each has at least `PIECE` tokens.
        scale: Multiplies queries · keys; above zero.
        interpret: False to compile; else the parameters of Pallas' interpreter.

    Raises:
        NotImplementedError: It has no kernel for heads of this size or for this type.
    """
    num_tokens, heads, head_dim = queries.shape
    if head_dim not in HEAD_DIMS or queries.dtype.itemsize != 2:
        raise NotImplementedError(f"the Mosaic kernel has no heads of {head_dim} in {queries.dtype.name}")
    pieces = _cut(chunks, num_tokens)
    block = plgpu.SMEM((NUM_STAGES, BLOCK_K, head_dim), queries.dtype)
    whole_stages = functools.partial(plgpu.Barrier, num_barriers=NUM_STAGES)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, scale=scale, group=heads // keys.shape[1], is_compiled=not interpret),
        out_type=(
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct((num_tokens, heads), jnp.float32),
        ),
        grid=(heads, len(pieces[0])),
        grid_names=("head", "piece"),
        num_threads=3,
        thread_name="warp_group",
        scratch_types=(
            plgpu.SMEM((2, ROWS, head_dim), queries.dtype),
            (block, block),
            (whole_stages(), whole_stages()),
            (whole_stages(num_arrivals=2), whole_stages(num_arrivals=2)),
            plgpu.Barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="mosaic_chunks",
    )(*pieces, queries, keys, values)
    return Attended(out, lse)


def _cut(chunks: Chunks, num_tokens: int) -> list[Int[Array, " I"]]:
    """For each piece its first packed token, the tokens of its chunk before it, and the first key of its chunk.

    The last piece of a chunk stands first, because it sees the most keys. It is moved forward to end with the chunk, so
    some tokens are computed twice, with the same result: a block of which a token sees nothing does not change its
    softmax. What is no piece has -1 for a token.
    """
    counts = pl.cdiv(chunks.lens, PIECE)
    ends = jnp.cumsum(counts)
    index = ends[-1] - 1 - jnp.arange(num_tokens // PIECE + len(chunks.lens))
    chunk = jnp.minimum(jnp.sum(ends[None, :] <= index[:, None], axis=1), len(ends) - 1)
    offset = jnp.minimum((index - ends[chunk] + counts[chunk]) * PIECE, chunks.lens[chunk] - PIECE)
    starts = jnp.where(index >= 0, chunks.starts[chunk] + offset, -1)
    return [x.astype(jnp.int32) for x in (starts, offset, chunks.places[chunk])]


def _kernel(
    starts: Ref,
    offsets: Ref,
    places: Ref,
    queries: Ref,
    keys: Ref,
    values: Ref,
    out: Ref,
    lse: Ref,
    own: Ref,
    blocks: tuple[Ref, Ref],
    is_here: tuple[Ref, Ref],
    is_free: tuple[Ref, Ref],
    turn: Ref,
    *,
    scale: float,
    group: int,
    is_compiled: bool,
) -> None:
    """One query head of one piece.

    Grid: (N, pieces); programs that run together read the same keys. Arrays are whole and in device memory. A warp
    group that multiplies owns `out` and `lse` of its 64 tokens, and a row of `own`, which has their queries.
    A barrier of `is_here` is passed when a block was copied, one of `is_free` when both groups have multiplied it.
    """
    head, piece, warp_group = (lax.axis_index(name) for name in ("head", "piece", "warp_group"))
    start, offset = starts[piece], offsets[piece]
    num_blocks = lax.div(offset + PIECE + BLOCK_K - 1, BLOCK_K)

    @pl.when((warp_group == 2) & (start >= 0))
    def _() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        kv_head, first = lax.div(head, group), pl.multiple_of(places[piece], KEY_ALIGNMENT)

        def wait(index: Int[Array, ""]) -> None:
            for free in is_free:
                plgpu.barrier_wait(free.at[lax.rem(index, NUM_STAGES)])

        def copy(index: Int[Array, ""]) -> None:
            place, rows = lax.rem(index, NUM_STAGES), pl.ds(first + index * BLOCK_K, BLOCK_K)
            for array, block, here, free in zip((keys, values), blocks, is_here, is_free, strict=True):
                pl.when(index >= NUM_STAGES)(functools.partial(plgpu.barrier_wait, free.at[place]))
                plgpu.copy_gmem_to_smem(array.at[rows, kv_head], block.at[place], here.at[place])

        pl.loop(0, num_blocks)(copy)
        pl.loop(jnp.maximum(num_blocks - NUM_STAGES, 0), num_blocks)(wait)

    @pl.when((warp_group < 2) & (start >= 0))
    def _() -> None:
        plgpu.set_max_registers(PRODUCT_REGISTERS, action="increase")
        mine = pl.ds(start + warp_group * ROWS, ROWS)
        seen = offset + warp_group * ROWS  # keys that all tokens of the warp group see
        query = own.at[warp_group]
        query[...] = plgpu.load(queries.at[mine, head], layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.commit_smem()
        to_base_2 = scale * LOG2_E

        def take_turn() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def one_block(index: Int[Array, ""], state: Softmax, *, is_masked: bool) -> Softmax:
            place = lax.rem(index, NUM_STAGES)
            key, value = (block.at[place] for block in blocks)
            plgpu.barrier_wait(is_here[0].at[place])
            scores_MS = _scores(query, key, take_turn)
            plgpu.barrier_arrive(is_free[0].at[place])
            if is_masked:
                iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, (ROWS, BLOCK_K), layout=plgpu.Layout.WGMMA)
                is_seen = index * BLOCK_K + iota(1) <= seen + iota(0)
                scores_MS = jnp.where(is_seen, scores_MS, -jnp.inf)
            largest = jnp.maximum(state.largest, scores_MS.max(axis=1) * to_base_2)
            shrink = jnp.exp2(state.largest - largest)
            weights_MS = jnp.exp2(scores_MS * to_base_2 - lax.broadcast_in_dim(largest, scores_MS.shape, [0]))
            total = state.total * shrink + weights_MS.sum(axis=1)
            weighted = state.weighted * lax.broadcast_in_dim(shrink, state.weighted.shape, [0])
            weights = weights_MS.astype(query.dtype)
            weighted, largest, total, weights = lax.optimization_barrier((weighted, largest, total, weights))
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(is_here[1].at[place])
            plgpu.barrier_wait(turn)
            weighted = _add_product(weighted, weights, value, is_compiled=is_compiled)
            plgpu.barrier_arrive(is_free[1].at[place])
            return Softmax(weighted, largest, total)

        pl.when(warp_group == 1)(take_turn)
        per_row = functools.partial(jnp.full, ROWS, dtype=jnp.float32)
        of_rows = functools.partial(plgpu.layout_cast, new_layout=plgpu.Layout.WGMMA.reduce(1))
        state = Softmax(
            plgpu.layout_cast(jnp.zeros(query.shape, jnp.float32), plgpu.Layout.WGMMA),
            of_rows(per_row(LOWEST)),
            of_rows(per_row(0)),
        )
        num_whole = lax.div(seen, BLOCK_K)
        state = lax.fori_loop(0, num_whole, functools.partial(one_block, is_masked=False), state)
        state = lax.fori_loop(num_whole, num_blocks, functools.partial(one_block, is_masked=True), state)
        pl.when(warp_group == 0)(take_turn)

        found = state.weighted / lax.broadcast_in_dim(state.total, query.shape, [0])
        out.at[mine, head][...] = found.astype(query.dtype)
        lse.at[mine, head][...] = state.largest / LOG2_E + jnp.log(state.total)


def _scores(query: Ref, key: Ref, then: Any) -> Float[Array, "M S"]:
    """query · key, and what is done as soon as the product has begun."""

    def multiply(sums: Ref) -> Float[Array, "M S"]:
        plgpu.wgmma(sums, query, key.transpose((1, 0)))
        then()
        return sums[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((query.shape[0], key.shape[0]), jnp.float32))


def _add_product(
    sums: Float[Array, "M H"], weights: Float[Array, "M S"], value: Ref, *, is_compiled: bool
) -> Float[Array, "M H"]:
    """sums + weights · value. The interpreter does not know products of what is in registers."""
    if not is_compiled:
        product = jnp.dot(weights, value[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()
        return sums + product
    state: Any = plgpu.WGMMAAccumulatorRef.init(sums)
    return pl.run_state(lambda sums: plgpu.wgmma(sums, weights, value))(state)
