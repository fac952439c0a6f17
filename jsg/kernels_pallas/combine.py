"""Joins attention to parts of a token's keys to attention to all of them, by log-sum-exp.

With parts i of outputs o_i and log-sum-exps l_i:  out = Σ o_i·exp(l_i) / Σ exp(l_i),  lse = log Σ exp(l_i).
A sink is a part more, whose output is zero.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.attention_block import LOWEST, Attended, Ref, padded_head_dim, whole_spec

ELEMENTS_PER_WARP = 1024


class Partials(NamedTuple):
    """Attention of each token to every split of a range of its keys.

    Attributes:
        out: Only defined for splits that have keys: see `split_range`.
        lse: Likewise.
        first: The first position of each token's range.
        last: The position after the last one; not more than `first` if the range is empty.
        block_k: The number that splits are multiples of.
    """

    out: Float[Array, "B splits N H"]
    lse: Float[Array, "B splits N"]
    first: Int[Array, " B"]
    last: Int[Array, " B"]
    block_k: int


def split_range(
    first: Int[Array, ""], last: Int[Array, ""], split: Int[Array, "*s"], splits: int, block_k: int
) -> tuple[Int[Array, "*s"], Int[Array, "*s"]]:
    """The begin and end of a split of the positions `first` to `last` - 1. An empty split ends before it begins.

    Splits begin at multiples of `block_k`, except for the first one, and all but the last have the same length.
    """
    start = lax.div(first, block_k) * block_k
    length = lax.div(lax.div(last - start + splits - 1, splits) + block_k - 1, block_k) * block_k
    begin = start + split * length
    return jnp.maximum(begin, first), jnp.minimum(begin + length, last)


def combine(
    part: Partials, dtype: jax.typing.DTypeLike, *, sinks: Float[Array, " N"] | None = None, interpret: bool
) -> Attended:
    """Attention of each token to all keys of its range: one launch.

    Args:
        part: Attention to the splits of the range.
        dtype: Type of the result.
        sinks: See `ops.paged_attention`.
        interpret: Run slowly on a CPU instead of compiling for a GPU.
    """
    rows, splits, heads, head_dim = part.out.shape
    num_warps = min(8, pl.next_power_of_2(pl.cdiv(padded_head_dim(head_dim) * splits, ELEMENTS_PER_WARP)))
    given = () if sinks is None else (sinks,)
    out, lse = pl.pallas_call(
        functools.partial(_combine_kernel, block_k=part.block_k),
        grid=(heads, rows),
        in_specs=[
            pl.BlockSpec((None, splits, None, head_dim), lambda n, b: (b, 0, n, 0)),
            pl.BlockSpec((None, splits, None), lambda n, b: (b, 0, n)),
            whole_spec(part.first),
            whole_spec(part.last),
            tuple(pl.BlockSpec((None,), lambda n, _: (n,)) for _ in given),
        ],
        out_specs=[
            pl.BlockSpec((None, None, head_dim), lambda n, b: (b, n, 0)),
            pl.BlockSpec((None, None), lambda n, b: (b, n)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((rows, heads, head_dim), dtype),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        interpret=interpret,
    )(part.out, part.lse, part.first, part.last, given)
    return Attended(out, lse)


def _combine_kernel(
    part: Ref, part_lse: Ref, first: Ref, last: Ref, sinks: tuple[Ref, ...], out: Ref, lse: Ref, *, block_k: int
) -> None:
    """One query head of one token.

    Grid: (N, B). A program reads the block `[splits, H]` of outputs and `[splits]` of log-sum-exps, both padded to
    powers of two and masked for splits without keys, and the one sink of its head if there are sinks. The bounds of
    all ranges are whole. A program owns the block `[H]` of the result and its one log-sum-exp.
    """
    token, (splits, head_dim) = pl.program_id(1), part.shape
    split, dim = jnp.arange(pl.next_power_of_2(splits)), jnp.arange(padded_head_dim(head_dim))
    begin, end = split_range(first[token], last[token], split, splits, block_k)
    is_used = begin < end
    is_real = is_used[:, None] & (dim[None, :] < head_dim)
    outs = plgpu.load(part.at[split[:, None], dim[None, :]], mask=is_real, other=0.0)
    lses = plgpu.load(part_lse.at[split], mask=is_used, other=-jnp.inf)

    largest = functools.reduce(jnp.maximum, [jnp.max(lses), LOWEST, *(sink[...] for sink in sinks)])
    weights = jnp.exp(lses - largest)
    total = sum((jnp.exp(sink[...] - largest) for sink in sinks), jnp.sum(weights))
    merged = jnp.sum(weights[:, None] * outs, axis=0) / jnp.where(total == 0, 1, total)
    plgpu.store(out.at[dim], merged.astype(out.dtype), mask=dim < head_dim)
    lse[...] = largest + jnp.log(total)
