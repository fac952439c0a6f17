"""Rotates queries and keys, and makes keys and values storable: a Pallas kernel for TPUs. Letters: `models/inputs.py`.

The halves of a head are half a tile of memory. XLA takes them apart and together again in float32, and lays heads out
anew several times: for a prompt, a quarter of the time of a layer's products by its own estimate (compiled for v6e). In
vector memory (VMEM) one rotation of the lanes exchanges the halves. It ran in interpret mode and was compiled. No TPU
has run it.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.inputs import HeadNorms
from jsg.kernels_pallas.reference_rows import rms_norm

TOKENS, AT_ONCE = 128, 16
"""The most tokens of a program, and of one turn of its loop."""


def rotated(
    qkv: Float[Array, "T K joint"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    norms: HeadNorms | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K 2 H"]]:
    """Rotated queries, and each rotated key with its value. Heads are 128 wide, but for interpret mode.

    A value that is not finite is zero, and its key NaN, as in `ops.rotate_and_write`.
    """
    (num_tokens, kv_heads, joint), head_dim = qkv.shape, 2 * cos.shape[1]
    tokens, num_rows = math.gcd(num_tokens, TOKENS), (kv_heads * (joint // head_dim - 2), 2 * kv_heads)
    at_once = math.gcd(tokens, AT_ONCE)
    angles = jnp.concatenate([cos, cos, -sin, sin], axis=1)
    weights = [] if norms is None else [norms.query[None], norms.key[None]]
    queries, new = pl.pallas_call(
        functools.partial(rotated_kernel, at_once, norms and norms[2:]),
        grid=(num_tokens // tokens,),
        in_specs=[
            pl.BlockSpec((kv_heads, tokens, joint), lambda i: (0, i, 0)),
            pl.BlockSpec((tokens, 2 * head_dim), lambda i: (i, 0)),
            *[pl.BlockSpec((1, head_dim), lambda i: (0, 0))] * len(weights),
        ],
        out_specs=[pl.BlockSpec((tokens * rows, head_dim), lambda i: (i, 0)) for rows in num_rows],
        out_shape=[jax.ShapeDtypeStruct((num_tokens * rows, head_dim), qkv.dtype) for rows in num_rows],
        scratch_shapes=[pltpu.VMEM((at_once * rows, head_dim), jnp.float32) for rows in num_rows],
        cost_estimate=pl.CostEstimate(
            flops=4 * qkv.size, bytes_accessed=2 * qkv.nbytes + angles.nbytes, transcendentals=0
        ),
        interpret=interpret,
        name="rotated",
    )(qkv.swapaxes(0, 1), angles, *weights)  # in a TPU's memory a product lies so
    return queries.reshape(num_tokens, -1, head_dim), new.reshape(num_tokens, kv_heads, 2, head_dim)


def rotated_kernel(
    at_once: int, norms: tuple[float, bool, bool] | None, qkv: jax.Ref, angles: jax.Ref, *refs: jax.Ref
) -> None:
    """One program: some tokens, `at_once` at a time.

    Grid: (blocks of tokens,). Blocks: the joint projection [K, tokens, joint], the cosines and sines of whole heads
    side by side, weights of norms if there are any, and the results [tokens · rows, H], in VMEM. Scratch: results in
    float32, because only rows of 32 bits can be stored with a stride.
    """
    *weights, queries, new, wide_queries, wide_new = refs
    (kv_heads, num_tokens, joint), head_dim = qkv.shape, new.shape[1]
    num_groups, (eps, is_late, norms_values) = joint // head_dim - 2, norms or (0.0, False, False)
    of_queries, of_keys = weights or (None, None)

    def some(part: Int[Array, ""], _: None) -> None:
        own = pl.ds(pl.multiple_of(part * at_once, at_once), at_once)
        cos, sin = (angles[own, half * head_dim : (half + 1) * head_dim] for half in (0, 1))

        def turned(x: Float[Array, "t H"], weight: jax.Ref | None) -> Float[Array, "t H"]:
            if weight is not None and not is_late:
                x = rms_norm(x, weight[0], eps)
            numbers = x.astype(jnp.float32)
            x = (numbers * cos + pltpu.roll(numbers, head_dim // 2, 1) * sin).astype(x.dtype)
            return rms_norm(x, weight[0], eps) if weight is not None and is_late else x

        def put(wide: jax.Ref, row: int, x: Float[Array, "t H"]) -> None:
            wide[pl.ds(row, at_once, stride=len(wide) // at_once)] = x.astype(jnp.float32)

        for head in range(kv_heads):
            *group, key, value = (qkv[head, own, i * head_dim : (i + 1) * head_dim] for i in range(num_groups + 2))
            for i, query in enumerate(group):
                put(wide_queries, head * num_groups + i, turned(query, of_queries))
            value = rms_norm(value, jnp.ones(head_dim, jnp.float32), eps) if norms_values else value
            is_infinite = jnp.where(jnp.abs(value.astype(jnp.float32)) < jnp.inf, 0.0, 1.0)
            is_finite = jnp.max(is_infinite, axis=1, keepdims=True) == 0
            put(wide_new, 2 * head, jnp.where(is_finite, turned(key, of_keys).astype(jnp.float32), jnp.nan))
            put(wide_new, 2 * head + 1, jnp.where(is_finite, value.astype(jnp.float32), 0.0))
        for wide, out in ((wide_queries, queries), (wide_new, new)):
            out[pl.ds(pl.multiple_of(part * len(wide), len(wide)), len(wide))] = wide[...].astype(out.dtype)

    lax.fori_loop(0, num_tokens // at_once, some, None)
