"""Attention to all keys of a token from attention to parts of them, merged by log-sum-exp.

With parts i of outputs o_i and log-sum-exps l_i:  out = Σ o_i·exp(l_i) / Σ exp(l_i),  lse = log Σ exp(l_i).
"""

import functools
from collections.abc import Sequence
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
        out: Only defined for splits that a key is in: see `split_range`.
        lse: Likewise.
        first: The first position of each token's range.
        last: Behind its last position; not more than `first` where the range is empty.
        block_k: What splits are multiples of.
    """

    out: Float[Array, "B splits N H"]
    lse: Float[Array, "B splits N"]
    first: Int[Array, " B"]
    last: Int[Array, " B"]
    block_k: int


def split_range(
    first: Int[Array, ""], last: Int[Array, ""], split: Int[Array, "*s"], splits: int, block_k: int
) -> tuple[Int[Array, "*s"], Int[Array, "*s"]]:
    """Where a split of the positions `first` to `last` - 1 begins and ends; it ends before it begins if it has none.

    Splits begin at multiples of `block_k`, except for the first one, and all but the last are of one length.
    """
    start = lax.div(first, block_k) * block_k
    length = lax.div(lax.div(last - start + splits - 1, splits) + block_k - 1, block_k) * block_k
    begin = start + split * length
    return jnp.maximum(begin, first), jnp.minimum(begin + length, last)


def combine(parts: Sequence[Partials], dtype: jax.typing.DTypeLike, *, interpret: bool) -> Attended:
    """Attention of each token to all keys of all its ranges: one launch.

    Args:
        parts: Ranges of the same tokens that have no position in common.
        dtype: Of the result.
        interpret: Run on a CPU, slowly, in place of compiling for a GPU.
    """
    rows, _, heads, head_dim = parts[0].out.shape
    arrays, specs = [], []
    for part in parts:
        splits = part.out.shape[1]
        arrays += part[:4]
        specs += [
            pl.BlockSpec((None, splits, None, head_dim), lambda n, b: (b, 0, n, 0)),
            pl.BlockSpec((None, splits, None), lambda n, b: (b, 0, n)),
            whole_spec(part.first),
            whole_spec(part.last),
        ]
    elements = padded_head_dim(head_dim) * sum(part.out.shape[1] for part in parts)
    num_warps = min(8, pl.next_power_of_2(pl.cdiv(elements, ELEMENTS_PER_WARP)))
    out, lse = pl.pallas_call(
        functools.partial(_combine_kernel, blocks=[part.block_k for part in parts]),
        grid=(heads, rows),
        in_specs=specs,
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
    )(*arrays)
    return Attended(out, lse)


def _combine_kernel(*refs: Ref, blocks: Sequence[int]) -> None:
    """One query head of one token.

    Grid: (N, B). Per range the block `[splits, H]` of outputs and `[splits]` of log-sum-exps, both padded to powers of
    two and masked where no key is in a split; the bounds of all ranges are whole. A program owns the block `[H]` of the
    result and its one log-sum-exp.
    """
    *inputs, out, lse = refs
    token, (head_dim,) = pl.program_id(1), out.shape
    dim = jnp.arange(padded_head_dim(head_dim))
    parts, lses = [], []
    for i, block_k in enumerate(blocks):
        part, part_lse, first, last = inputs[4 * i : 4 * i + 4]
        splits = part.shape[0]
        split = jnp.arange(pl.next_power_of_2(splits))
        begin, end = split_range(first[token], last[token], split, splits, block_k)
        is_used = begin < end
        is_real = is_used[:, None] & (dim[None, :] < head_dim)
        parts.append(plgpu.load(part.at[split[:, None], dim[None, :]], mask=is_real, other=0.0))
        lses.append(plgpu.load(part_lse.at[split], mask=is_used, other=-jnp.inf))

    largest = functools.reduce(jnp.maximum, [jnp.max(x) for x in lses], LOWEST)
    weights = [jnp.exp(x - largest) for x in lses]
    total = sum(jnp.sum(x) for x in weights)
    merged = sum(jnp.sum(x[:, None] * part, axis=0) for x, part in zip(weights, parts, strict=True))
    merged = merged / jnp.where(total == 0, 1, total)
    plgpu.store(out.at[dim], merged.astype(out.dtype), mask=dim < head_dim)
    lse[...] = largest + jnp.log(total)
