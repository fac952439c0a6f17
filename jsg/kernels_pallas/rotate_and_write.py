"""Head norms, rotation and the write into the KV pool as one Pallas-Triton launch. Letters: `jsg/models/inputs.py`.

All work between the joint projection and attention is elementwise in a token and a key-value head, so it is one pass:
the projection is read once, queries are written once, and key and value go from registers to their slots.

    joint projection of one (token, key-value head), G+2 rows of H:

        query 0 | query 1 | ... | query G-1 | key | value
        '----- norm, rotate, or reversed ----'     |
                     |                  |          |
                  queries          keys[slot]  values[slot]
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jsg.kernels_pallas.attention_block import check_addressable, whole_spec
from jsg.kernels_pallas.inputs import HeadNorms, LayerCache
from jsg.kernels_pallas.reference_write import to_pool_dtype
from jsg.kernels_pallas.tuning import sizes_for

MAX_HEAD_DIM = 512


class Sizes(NamedTuple):
    """How the work is cut. `tuning` has the sizes by packed tokens of the step.

    Attributes:
        block_elements: Numbers of one padded head in a program.
        heads_per_warp: A program has one warp for so many query heads, and at least two warps.
    """

    block_elements: int
    heads_per_warp: int


class _Static(NamedTuple):
    """The constants of one call."""

    num_tokens: int
    group: int
    head_dim: int
    page_size: int
    block_tokens: int
    norm_eps: float
    is_late: bool
    norms_values: bool


class _Block(NamedTuple):
    """The tokens of a program: their indices in the step, and which of them exist."""

    tokens: Int[Array, " t"]
    is_token: Bool[Array, " t"]


def rotate_and_write(
    qkv: Float[Array, "T K joint"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    slots: Int[Array, " T"],
    cache: LayerCache,
    norms: HeadNorms | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], LayerCache]:
    """See `ops.rotate_and_write`. It writes the pool in place: the results are aliases of its arrays.

    Args:
        qkv: See `ops.rotate_and_write`; so are the other arrays.
        cos: float32.
        sin: float32.
        slots: Distinct, but for slot 0, which may stand there any number of times.
        cache: Keys and values, in any float type.
        norms: Weights in the dtype of `qkv`, or in float32.
        interpret: Run in Pallas' interpret mode.

    Raises:
        NotImplementedError: Keys and values are in one array, heads are too long, norm weights have another dtype, or a
            pool is too large to address.
    """
    sizes = Sizes(**sizes_for("rotate_and_write", rows=len(qkv)))
    static = _static(qkv, cos, cache, norms, sizes)
    num_tokens, kv_heads, _ = qkv.shape
    heads = qkv.reshape(num_tokens, kv_heads, static.group + 2, static.head_dim)
    queries = jax.ShapeDtypeStruct((num_tokens, kv_heads, static.group, static.head_dim), qkv.dtype)
    weights = () if norms is None else (norms.query, norms.key)
    read = (heads, cos, sin, slots, *weights)
    rotated, *pools = pl.pallas_call(
        functools.partial(rotate_and_write_kernel, static),
        grid=(pl.cdiv(num_tokens, static.block_tokens), kv_heads),
        in_specs=[_head_of(heads, 1), *(whole_spec(x) for x in read[1:]), *(_head_of(pool, 2) for pool in cache)],
        out_specs=[_head_of(queries, 1), *(_head_of(pool, 2) for pool in cache)],
        out_shape=[queries, *(jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in cache)],
        input_output_aliases={len(read): 1, len(read) + 1: 2},
        compiler_params=plgpu.CompilerParams(num_warps=_num_warps(static.group, sizes), num_stages=1),
        interpret=interpret,
    )(*read, *cache)
    return rotated.reshape(num_tokens, -1, static.head_dim), tuple(pools)


def _static(
    qkv: Float[Array, "T K joint"],
    cos: Float[Array, "T half"],
    cache: LayerCache,
    norms: HeadNorms | None,
    sizes: Sizes,
) -> _Static:
    """The constants of a call. Raises NotImplementedError if the kernel cannot do it."""
    head_dim = 2 * cos.shape[1]
    group = qkv.shape[2] // head_dim - 2
    if len(cache) != 2:
        raise NotImplementedError("the Triton kernel wants keys and values in arrays of their own")
    if norms is not None and {norms.query.dtype, norms.key.dtype} not in ({qkv.dtype}, {jnp.dtype(jnp.float32)}):
        raise NotImplementedError(f"the Triton kernel wants norm weights of the type float32 or {qkv.dtype}")
    if head_dim > MAX_HEAD_DIM:
        raise NotImplementedError(f"the Triton kernel has heads of at most {MAX_HEAD_DIM} numbers, but got {head_dim}")
    check_addressable(cache[0])
    block_tokens = sizes.block_elements // pl.next_power_of_2(head_dim)
    switches = (0.0, False, False) if norms is None else norms[2:]
    return _Static(len(qkv), group, head_dim, cache[0].shape[1], block_tokens, *switches)


def _num_warps(group: int, sizes: Sizes) -> int:
    return max(2, min(pl.next_power_of_2(group) // sizes.heads_per_warp, 16))


def rotate_and_write_kernel(static: _Static, *refs: jax.Ref) -> None:
    """One program: `block_tokens` tokens of one key-value head.

    Grid: (token blocks, K). Blocks: the arrays stay in device memory, and those with heads have only the program's:
    joint projection [T, G+2, H], cosine and sine [T, H/2], slots [T], weights [H] if there are norms, pools
    [P, page_size, H], queries [T, G, H]. The work is done in registers, in halves of heads, [t, G, H/2], because
    rotation combines the two halves of a head.

    Owns: the queries and the slots of its tokens. Several programs may write slot 0, all of them zeros.

    Masked: tokens past T, and the padding of G and H to powers of two.
    """
    qkv, cos, sin, slots_ref, *weights, _, _, queries, keys, values = refs
    tokens = pl.program_id(0) * static.block_tokens + jnp.arange(static.block_tokens)
    block = _Block(tokens, tokens < static.num_tokens)
    query_heads = jnp.arange(pl.next_power_of_2(static.group))
    query_weight, key_weight = weights or (None, None)
    query = _turned(static, block, query_heads, qkv, cos, sin, query_weight)
    for half, part in enumerate(query):
        lanes, is_lane = _lanes(static.head_dim // 2)
        index = (tokens[:, None, None], query_heads[None, :, None], (lanes + half * static.head_dim // 2)[None, None])
        mask = block.is_token[:, None, None] & (query_heads < static.group)[None, :, None] & is_lane[None, None]
        plgpu.store(queries.at[index], part, mask=mask)

    nowhere = (
        keys.shape[0] * static.page_size
    )  # not slot 0: in interpret mode a place must not stand there twice, even masked
    slots = plgpu.load(slots_ref.at[tokens], mask=block.is_token, other=nowhere)
    value, is_finite = _value(static, block, qkv)
    key = _turned(static, block, jnp.full(1, static.group), qkv, cos, sin, key_weight)
    is_kept = (slots > 0)[:, None]
    for half, part in enumerate(key):
        kept = jnp.where(is_kept, jnp.where(is_finite, part[:, 0], jnp.nan), 0)
        _write(static, block, keys, slots, half * static.head_dim // 2, static.head_dim // 2, kept)
    _write(static, block, values, slots, 0, static.head_dim, jnp.where(is_kept & is_finite, value, 0))


def _turned(
    static: _Static,
    block: _Block,
    heads: Int[Array, " h"],
    qkv: jax.Ref,
    cos: jax.Ref,
    sin: jax.Ref,
    weight: jax.Ref | None,
) -> tuple[Float[Array, "t h half"], Float[Array, "t h half"]]:
    """Both halves of these heads of the joint projection, rotated, and normed if there is a weight."""
    half = static.head_dim // 2
    lanes, is_lane = _lanes(half)
    index = (block.tokens[:, None, None], heads[None, :, None])
    mask = block.is_token[:, None, None] & (heads < static.group + 2)[None, :, None] & is_lane[None, None]
    first, second = (
        plgpu.load(qkv.at[(*index, (lanes + offset)[None, None])], mask=mask, other=0).astype(jnp.float32)
        for offset in (0, half)
    )
    if weight is not None and not static.is_late:
        first, second = _normed(static, first, second, weight, qkv.dtype)
    angle = (block.tokens[:, None], lanes[None])
    is_angle = block.is_token[:, None] & is_lane[None]
    c, s = (plgpu.load(ref.at[angle], mask=is_angle, other=0)[:, None] for ref in (cos, sin))
    turned = (first * c - second * s).astype(qkv.dtype), (second * c + first * s).astype(qkv.dtype)
    if weight is None or not static.is_late:
        return turned
    first, second = (part.astype(jnp.float32) for part in turned)
    first, second = _normed(static, first, second, weight, qkv.dtype)
    return first.astype(qkv.dtype), second.astype(qkv.dtype)


def _normed(
    static: _Static,
    first: Float[Array, "t h half"],
    second: Float[Array, "t h half"],
    weight: jax.Ref,
    dtype: jnp.dtype,
) -> tuple[Float[Array, "t h half"], Float[Array, "t h half"]]:
    """Both halves of heads, normed and rounded where the reference rounds, in float32."""
    half = static.head_dim // 2
    lanes, is_lane = _lanes(half)
    squares = sum(jnp.sum(jnp.square(part), axis=-1, keepdims=True) for part in (first, second))
    scale = lax.rsqrt(squares / static.head_dim + static.norm_eps)
    weights = [plgpu.load(weight.at[lanes + offset], mask=is_lane, other=0) for offset in (0, half)]
    first, second = (
        ((part * scale).astype(weight.dtype) * factor[None, None]).astype(dtype).astype(jnp.float32)
        for part, factor in zip((first, second), weights, strict=True)
    )
    return first, second


def _value(static: _Static, block: _Block, qkv: jax.Ref) -> tuple[Float[Array, "t H"], Bool[Array, "t 1"]]:
    """The value of each token, normed if values are, and whether all of it is finite."""
    lanes, is_lane = _lanes(static.head_dim)
    index = (block.tokens[:, None], jnp.full((1, 1), static.group + 1), lanes[None])
    value = plgpu.load(qkv.at[index], mask=block.is_token[:, None] & is_lane[None], other=0)
    wide = value.astype(jnp.float32)
    is_bad = ~(jnp.abs(wide) < jnp.inf)
    if static.norms_values:
        squares = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
        value = (wide * lax.rsqrt(squares / static.head_dim + static.norm_eps)).astype(value.dtype)
    return value, jnp.sum(is_bad.astype(jnp.int32), axis=-1, keepdims=True) == 0


def _write(
    static: _Static, block: _Block, pool: jax.Ref, slots: Int[Array, " t"], first: int, length: int, new: Array
) -> None:
    """Stores `length` numbers of each token's row of the pool, from dimension `first` on."""
    lanes, is_lane = _lanes(length)
    index = ((slots // static.page_size)[:, None], (slots % static.page_size)[:, None], (lanes + first)[None])
    plgpu.store(pool.at[index], to_pool_dtype(new, pool.dtype), mask=block.is_token[:, None] & is_lane[None])


def _lanes(length: int) -> tuple[Int[Array, " lanes"], Bool[Array, " lanes"]]:
    """Indices from 0 to `length`, padded to a power of two, and which of them are not padding."""
    lanes = jnp.arange(pl.next_power_of_2(length))
    return lanes, lanes < length


def _head_of(x: Array | jax.ShapeDtypeStruct, axis: int) -> pl.BlockSpec:
    """The whole array, with only the program's head on the axis of key-value heads."""
    shape = tuple(None if i == axis else size for i, size in enumerate(x.shape))
    return pl.BlockSpec(shape, lambda _, head: tuple(head if i == axis else 0 for i in range(len(shape))))
