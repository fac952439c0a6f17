"""`paged_decode` in Triton's own language, called through jax-triton: the exit from Pallas' Triton lowering.

No program of jsg uses it. It shows that the kernel of `jsg/kernels_pallas/paged_decode.py` can leave Pallas with the
same signature, sizes, grid and launches; docs/packages/kernels_pallas.md says what was seen. It needs the environment
of `make test-long` that has jax-triton. With `TRITON_INTERPRET=1` Triton's interpreter runs it on a CPU, with NumPy.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl

from jsg.kernels_pallas.attention_block import (
    LOG2_E,
    LOWEST,
    Attended,
    check_supported,
    keys_in_block,
    matmul_dtype,
    padded_head_dim,
    padded_rows,
)
from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.kernels_pallas.paged_decode import Sizes, default_sizes, with_padding
from jsg.kernels_pallas.tile import MAX_POOL_ELEMENTS
from jsg.window import Window


def paged_decode(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: Window | None = None,
    softcap: float | None = None,
    sizes: Sizes | None = None,
    interpret: bool = False,
) -> Attended:
    """Does the same as `jsg.kernels_pallas.paged_decode.paged_decode`."""
    check_supported(keys)
    num_singles = min(len(inputs.single_rows), len(queries))
    singles = queries[:num_singles]
    sizes = sizes or default_sizes(singles, keys)
    block_k = keys_in_block(sizes.block_k, singles, keys)
    _, heads, head_dim = singles.shape
    kv_heads = keys.shape[2]
    last = inputs.single_kv_lens[:num_singles]
    first = jnp.zeros_like(last) if window is None else jnp.maximum(window.first(last - 1), 0)
    call = _interpreted if interpret else _compiled
    out, lse = call(
        decode_kernel,
        (kv_heads, sizes.splits, num_singles),
        (inputs.single_rows[:num_singles], first, last, inputs.page_table, singles, keys, values),
        [
            (
                (num_singles, sizes.splits, heads, head_dim),
                queries.dtype if sizes.splits == 1 else jnp.dtype(jnp.float32),
            ),
            ((num_singles, sizes.splits, heads), jnp.dtype(jnp.float32)),
        ],
        num_warps=sizes.num_warps,
        num_stages=sizes.num_stages,
        COLUMNS=inputs.page_table.shape[1],
        PAGE_SIZE=keys.shape[1],
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        SPLITS=sizes.splits,
        BLOCK_M=padded_rows(heads // kv_heads),
        BLOCK_K=block_k,
        BLOCK_H=padded_head_dim(head_dim),
        TO_SCORE=scale if softcap is None else scale / softcap,
        SOFTCAP=0.0 if softcap is None else softcap,
        LOWEST=LOWEST,
        LOG2_E=LOG2_E,
        IS_LARGE=keys.size > MAX_POOL_ELEMENTS,
        PRODUCT=_product_type(queries.dtype, keys.dtype, interpret),
    )
    if sizes.splits == 1:
        return with_padding(Attended(out[:, 0], lse[:, 0]), len(queries))
    out, lse = call(
        combine_kernel,
        (heads, num_singles),
        (out, lse, first, last),
        [(singles.shape, queries.dtype), ((num_singles, heads), jnp.dtype(jnp.float32))],
        num_warps=4,
        num_stages=1,
        HEADS=heads,
        HEAD_DIM=head_dim,
        SPLITS=sizes.splits,
        BLOCK_S=1 << (sizes.splits - 1).bit_length(),
        BLOCK_K=block_k,
        BLOCK_H=padded_head_dim(head_dim),
        LOWEST=LOWEST,
    )
    return with_padding(Attended(out, lse), len(queries))


@triton.jit
def decode_kernel(
    rows,
    firsts,
    lasts,
    page_table,
    queries,
    keys,
    values,
    out,
    lse,
    COLUMNS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    TO_SCORE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    LOWEST: tl.constexpr,
    LOG2_E: tl.constexpr,
    IS_LARGE: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """The query heads of one kv head of one token, over one split of the token's keys; grid (K, splits, B)."""
    kv_head, split, token = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    range_first, range_last = tl.load(firsts + token), tl.load(lasts + token)
    start = range_first // BLOCK_K * BLOCK_K
    length = ((range_last - start + SPLITS - 1) // SPLITS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    first = tl.maximum(start + split * length, range_first)
    last = tl.minimum(start + split * length + length, range_last)
    if (first < last) | (split == 0):
        head, dim, key = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K)
        is_head, is_dim = head < GROUP, dim < HEAD_DIM
        is_real = is_head[:, None] & is_dim[None, :]
        heads = KV_HEADS * GROUP
        mine = (token * heads + kv_head * GROUP + head[:, None]) * HEAD_DIM + dim[None, :]
        query = tl.load(queries + mine, mask=is_real, other=0.0)
        pages = page_table + tl.load(rows + token) * COLUMNS
        query = query.to(PRODUCT)
        to_base_2 = LOG2_E * (TO_SCORE if SOFTCAP == 0 else SOFTCAP)

        weighted = tl.zeros((BLOCK_M, BLOCK_H), tl.float32)
        largest = tl.full((BLOCK_M,), LOWEST, tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        begin, end = first // BLOCK_K, (last + BLOCK_K - 1) // BLOCK_K
        position = begin * BLOCK_K + key
        page = tl.load(pages + position // PAGE_SIZE, mask=(position >= first) & (position < last), other=0)
        for index in range(begin, end):
            position = index * BLOCK_K + key
            in_range = (position >= first) & (position < last)
            if IS_LARGE:
                page = page.to(tl.int64)
            slot = page * PAGE_SIZE + position % PAGE_SIZE
            where = (slot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dim[None, :]
            if HEAD_DIM == BLOCK_H:
                key_block, value_block = tl.load(keys + where), tl.load(values + where)
            else:
                key_block = tl.load(keys + where, mask=is_dim[None, :], other=0.0)
                value_block = tl.load(values + where, mask=is_dim[None, :], other=0.0)
            scores = tl.dot(query, tl.trans(key_block.to(PRODUCT)), input_precision="ieee")
            if SOFTCAP != 0:
                scores = 1 - 2 / (tl.exp(2 * TO_SCORE * scores) + 1)  # tanh, which the interpreter does not have
            scores = tl.where(in_range[None, :], scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, axis=1) * to_base_2)
            shrink = tl.exp2(largest - new_largest)
            weights = tl.exp2(scores * to_base_2 - new_largest[:, None])
            value_block = value_block.to(PRODUCT)
            if values.dtype.element_ty.primitive_bitwidth == 8:  # for copies of 16 bytes: see `attention_block.attend`
                value_block = tl.where(in_range[:, None], value_block, 0.0)
            found = tl.dot(weights.to(PRODUCT), value_block, input_precision="ieee")
            weighted = weighted * shrink[:, None] + found
            total = total * shrink + tl.sum(weights, axis=1)
            largest = new_largest
            # One iteration ahead, else the compiler cannot fetch keys ahead.
            position = (index + 1) * BLOCK_K + key
            page = tl.load(pages + position // PAGE_SIZE, mask=(position >= first) & (position < last), other=0)

        result = weighted / tl.where(total == 0, 1.0, total)[:, None]
        part = ((token * SPLITS + split) * heads + kv_head * GROUP) + head
        tl.store(out + part[:, None] * HEAD_DIM + dim[None, :], result.to(out.dtype.element_ty), mask=is_real)
        tl.store(lse + part, largest / LOG2_E + tl.log(total), mask=is_head)


@triton.jit
def combine_kernel(
    parts,
    part_lses,
    firsts,
    lasts,
    out,
    lse,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LOWEST: tl.constexpr,
):
    """One query head of one token, whose splits are joined by log-sum-exp; grid (N, B)."""
    head, token = tl.program_id(0), tl.program_id(1)
    split, dim = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_H)
    first, last = tl.load(firsts + token), tl.load(lasts + token)
    start = first // BLOCK_K * BLOCK_K
    length = ((last - start + SPLITS - 1) // SPLITS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    begin = tl.maximum(start + split * length, first)
    is_used = (begin < tl.minimum(start + split * length + length, last)) & (split < SPLITS)
    part = (token * SPLITS + split) * HEADS + head
    is_dim = dim < HEAD_DIM
    mask = is_used[:, None] & is_dim[None, :]
    outs = tl.load(parts + part[:, None] * HEAD_DIM + dim[None, :], mask=mask, other=0.0)
    lses = tl.load(part_lses + part, mask=is_used, other=float("-inf"))
    largest = tl.maximum(tl.max(lses, axis=0), LOWEST)
    weights = tl.exp(lses - largest)
    total = tl.sum(weights, axis=0)
    merged = tl.sum(weights[:, None] * outs, axis=0) / tl.where(total == 0, 1.0, total)
    mine = token * HEADS + head
    tl.store(out + mine * HEAD_DIM + dim, merged.to(out.dtype.element_ty), mask=is_dim)
    tl.store(lse + mine, largest + tl.log(total))


def _product_type(queries: jnp.dtype, pool: jnp.dtype, interpret: bool) -> tl.dtype:
    """The type of the numbers that are multiplied. The interpreter cannot multiply bfloat16."""
    product = matmul_dtype(queries, pool)
    return getattr(tl, "float32" if interpret and product == jnp.bfloat16 else product.name)


type Results = Sequence[tuple[tuple[int, ...], jnp.dtype]]
"""The shape and the type of each."""


def _compiled(
    kernel: Any, grid: tuple[int, ...], args: tuple[jax.Array, ...], results: Results, **options: Any
) -> list[jax.Array]:
    """The kernel in a program for a GPU."""
    import jax_triton

    out_type = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    return jax_triton.triton_call(
        *args, kernel=kernel, out_type=out_type, grid=grid, name=kernel.fn.__name__, **options
    )


def _interpreted(
    kernel: Any, grid: tuple[int, ...], args: tuple[jax.Array, ...], results: Results, **options: Any
) -> list[jax.Array]:
    """The kernel in Triton's interpreter, which takes the tensors of PyTorch or what looks like them."""
    del options["num_warps"], options["num_stages"]

    def run(*args: Any) -> list[np.ndarray]:
        found = [np.full(shape, math.nan, dtype) for shape, dtype in results]  # NaN where nothing is written
        with np.errstate(all="ignore"):
            kernel[grid](*map(HostTensor, (*map(np.ascontiguousarray, args), *found)), **options)
        return found

    return jax.pure_callback(run, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results], *args)


class HostTensor:
    """What Triton's interpreter asks of a tensor of PyTorch, by an array of NumPy."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.dtype = {"float8_e4m3fn": "fp8e4nv", "float8_e5m2": "fp8e5"}.get(array.dtype.name, array.dtype.name)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def copy_(self, other: "HostTensor") -> None:
        assert other.array is self.array

    def untyped_storage(self) -> "HostTensor":
        return self

    cpu = untyped_storage

    def new_empty(self, *args: Any, **kwargs: Any) -> "HostTensor":
        return self

    def _nothing(self, *args: Any) -> None:
        pass

    set_ = storage_offset = size = stride = _nothing
