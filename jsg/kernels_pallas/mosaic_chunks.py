"""Attention of chunks to their own keys on Hopper, by Pallas' Mosaic GPU lowering: one launch.

    warp groups 0 and 1    each multiplies 64 queries of one head with blocks of keys, and weights with blocks of values
    warp group 2           copies these blocks (TMA) into `num_stages` places of shared memory

While one warp group multiplies, the other computes its softmax: they take turns at the tensor cores. Registers of the
group that copies go to the others.

Warp groups that take turns, and one that copies: Shah et al., "FlashAttention-3" (2024).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib import cuda_versions  # JAX has no public name for it
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.attention_block import LOG2_E, LOWEST, Attended, Ref
from jsg.kernels_pallas.chunks import KEY_ALIGNMENT
from jsg.kernels_pallas.inputs import Chunks
from jsg.kernels_pallas.tuning import sizes_for, target_capability

ROWS = 64
"""Queries of a warp group, the rows of its matmul."""
PIECE = 2 * ROWS
"""Tokens of a program."""
HEAD_DIMS = (64, 128)
CAPABILITY = (9, 0)
"""Compute capability of the cards whose warp groups multiply in this way."""
COPY_REGISTERS, PRODUCT_REGISTERS = 40, 232
"""Registers of a thread that copies, and of one that multiplies."""


def is_for_this_card() -> bool:
    """Whether it is for the card of this trace. JAX refuses causal masks with the assembler of CUDA 12.8 to 12.9.0."""
    version = 0 if cuda_versions is None else cuda_versions.cuda_runtime_get_version()
    return target_capability() == CAPABILITY and not 12080 <= version < 12091


class Sizes(NamedTuple):
    """How keys are read. `tuning` has the sizes by packed tokens of the step.

    Attributes:
        block_k: Keys of a block, at most `KEYS_BEHIND`.
        num_stages: Blocks of keys, and of values, in shared memory.
    """

    block_k: int
    num_stages: int


class Pieces(NamedTuple):
    """The pieces of chunks, the last one of each first, because it sees the most keys.

    Attributes:
        starts: The first packed token; -1 if there is no such piece.
        offsets: Tokens of the chunk before it.
        places: The first key of its chunk.
    """

    starts: Int[Array, " I"]
    offsets: Int[Array, " I"]
    places: Int[Array, " I"]


def attend(
    queries: Float[Array, "T N H"],
    keys: Float[Array, "S K H"],
    values: Float[Array, "S K H"],
    chunks: Chunks,
    *,
    scale: float,
    sizes: Sizes | None = None,
    interpret: Any = False,
) -> Attended:
    """Causal attention of the tokens of each chunk to each other. What belongs to other tokens means nothing.

    Args:
        queries: Packed tokens, in bfloat16 or float16.
        keys: Of the same tokens and type. Those of other tokens are finite, or NaN in which nothing is seen.
        values: Likewise, finite.
        chunks: Each has at least `PIECE` tokens.
        scale: Multiplies queries · keys; above zero.
        sizes: How keys are read; None for the default.
        interpret: False to compile; else the parameters of Pallas' interpreter.

    Raises:
        NotImplementedError: It has no kernel for heads of this size or for this type.
    """
    num_tokens, heads, head_dim = queries.shape
    if head_dim not in HEAD_DIMS or queries.dtype.itemsize != 2:
        raise NotImplementedError(f"the Mosaic kernel has no heads of {head_dim} in {queries.dtype.name}")
    sizes = sizes or default_sizes(num_tokens)
    pieces = _cut(chunks, num_tokens)
    block = plgpu.SMEM((sizes.num_stages, sizes.block_k, head_dim), queries.dtype)
    whole_stages = functools.partial(plgpu.Barrier, num_barriers=sizes.num_stages)
    out, lse = plgpu.kernel(
        functools.partial(_kernel, scale=scale, sizes=sizes, group=heads // keys.shape[1], is_compiled=not interpret),
        out_type=(
            jax.ShapeDtypeStruct(queries.shape, queries.dtype),
            jax.ShapeDtypeStruct((num_tokens, heads), jnp.float32),
        ),
        grid=(heads, len(pieces.starts)),
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


def default_sizes(num_tokens: int) -> Sizes:
    """The best sizes on this device for a step of so many packed tokens."""
    chosen = sizes_for("chunks", rows=num_tokens)
    return Sizes(*(chosen[name] for name in Sizes._fields))


def _cut(chunks: Chunks, num_tokens: int) -> Pieces:
    """All pieces. The last one of a chunk is moved forward to end with it.

    Tokens of two pieces are then computed twice, with the same result: a block of which a token sees nothing does not
    change its softmax.
    """
    counts = pl.cdiv(chunks.lens, PIECE)
    ends = jnp.cumsum(counts)
    index = ends[-1] - 1 - jnp.arange(num_tokens // PIECE + len(chunks.lens))
    chunk = jnp.minimum(jnp.sum(ends[None, :] <= index[:, None], axis=1), len(ends) - 1)
    offset = jnp.minimum((index - ends[chunk] + counts[chunk]) * PIECE, chunks.lens[chunk] - PIECE)
    starts = jnp.where(index >= 0, chunks.starts[chunk] + offset, -1)
    return Pieces(*(x.astype(jnp.int32) for x in (starts, offset, chunks.places[chunk])))


class _Softmax(NamedTuple):
    """See `attention_block.Softmax`."""

    weighted: Float[Array, "M H"]
    largest: Float[Array, " M"]
    total: Float[Array, " M"]


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
    sizes: Sizes,
    group: int,
    is_compiled: bool,
) -> None:
    """One query head of one piece.

    Grid: (N, pieces); programs that run together read the same keys. Arrays are whole and in device memory. A warp
    group that multiplies owns `out` and `lse` of its 64 tokens. `own` has its queries, and in the end its results.
    A barrier of `is_here` is passed when a block was copied, one of `is_free` when both groups have multiplied it.
    """
    head, piece, warp_group = (lax.axis_index(name) for name in ("head", "piece", "warp_group"))
    start, offset = starts[piece], offsets[piece]
    num_blocks = lax.div(offset + PIECE + sizes.block_k - 1, sizes.block_k)

    @pl.when((warp_group == 2) & (start >= 0))
    def _() -> None:
        plgpu.set_max_registers(COPY_REGISTERS, action="decrease")
        kv_head, first = lax.div(head, group), pl.multiple_of(places[piece], KEY_ALIGNMENT)

        def wait(index: Int[Array, ""]) -> None:
            for free in is_free:
                plgpu.barrier_wait(free.at[lax.rem(index, sizes.num_stages)])

        def copy(index: Int[Array, ""]) -> None:
            place, rows = lax.rem(index, sizes.num_stages), pl.ds(first + index * sizes.block_k, sizes.block_k)
            for array, block, here, free in zip((keys, values), blocks, is_here, is_free, strict=True):
                pl.when(index >= sizes.num_stages)(functools.partial(plgpu.barrier_wait, free.at[place]))
                plgpu.copy_gmem_to_smem(array.at[rows, kv_head], block.at[place], here.at[place])

        pl.loop(0, num_blocks)(copy)
        pl.loop(jnp.maximum(num_blocks - sizes.num_stages, 0), num_blocks)(wait)

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

        def one_block(index: Int[Array, ""], state: _Softmax, *, is_masked: bool) -> _Softmax:
            place = lax.rem(index, sizes.num_stages)
            key, value = (block.at[place] for block in blocks)
            plgpu.barrier_wait(is_here[0].at[place])
            scores_MS = _scores(query, key, take_turn)
            plgpu.barrier_arrive(is_free[0].at[place])
            if is_masked:
                iota = functools.partial(
                    plgpu.broadcasted_iota, jnp.int32, (ROWS, sizes.block_k), layout=plgpu.Layout.WGMMA
                )
                is_seen = index * sizes.block_k + iota(1) <= seen + iota(0)
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
            return _Softmax(weighted, largest, total)

        pl.when(warp_group == 1)(take_turn)
        per_row = functools.partial(jnp.full, ROWS, dtype=jnp.float32)
        of_rows = functools.partial(plgpu.layout_cast, new_layout=plgpu.Layout.WGMMA.reduce(1))
        state = _Softmax(
            plgpu.layout_cast(jnp.zeros(query.shape, jnp.float32), plgpu.Layout.WGMMA),
            of_rows(per_row(LOWEST)),
            of_rows(per_row(0)),
        )
        num_whole = lax.div(seen, sizes.block_k)
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
