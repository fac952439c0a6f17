"""Queries, keys and values out of the joint projection, as a Pallas kernel for TPUs. Letters: `jsg/models/inputs.py`.

The halves of a head are half a tile of memory. XLA takes them apart and together again in float32, which for a prompt
was a quarter of the time of a layer's products by its own estimate (compiled for v6e). In vector memory (VMEM) one
rotation of the lanes exchanges them. It ran in interpret mode and was compiled. No TPU has run it.
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

LANES = 128
TOKENS, AT_ONCE = 128, 16
"""The most tokens of a program, and of one turn of its loop."""


def rotated(
    qkv: Float[Array, "T K joint"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    norms: HeadNorms | None,
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """See `reference_write.rotated`.

    Raises:
        NotImplementedError: Heads that are no whole lanes.
    """
    (num_tokens, kv_heads, joint), head_dim = qkv.shape, 2 * cos.shape[1]
    if head_dim % LANES and not interpret:
        raise NotImplementedError(f"the TPU kernel wants heads of a multiple of {LANES} numbers, but got {head_dim}")
    tokens, num_heads = math.gcd(num_tokens, TOKENS), (kv_heads * (joint // head_dim - 2), kv_heads, kv_heads)
    at_once = math.gcd(tokens, AT_ONCE)
    angles = jnp.concatenate([cos, cos, -sin, sin], axis=1)
    weights = [] if norms is None else [norms.query[None], norms.key[None]]
    return pl.pallas_call(
        functools.partial(rotated_kernel, at_once, norms and norms[2:]),
        grid=(num_tokens // tokens,),
        in_specs=[
            pl.BlockSpec((tokens, kv_heads, joint), lambda i: (i, 0, 0)),
            pl.BlockSpec((tokens, 2 * head_dim), lambda i: (i, 0)),
            *[pl.BlockSpec((1, head_dim), lambda i: (0, 0))] * len(weights),
        ],
        out_specs=[pl.BlockSpec((tokens, heads, head_dim), lambda i: (i, 0, 0)) for heads in num_heads],
        out_shape=[jax.ShapeDtypeStruct((num_tokens, heads, head_dim), qkv.dtype) for heads in num_heads],
        scratch_shapes=[pltpu.VMEM((at_once, num_heads[0], head_dim), jnp.float32)],
        cost_estimate=pl.CostEstimate(
            flops=4 * qkv.size, bytes_accessed=2 * qkv.nbytes + angles.nbytes, transcendentals=0
        ),
        interpret=interpret,
    )(qkv, angles, *weights)


def rotated_kernel(
    at_once: int, norms: tuple[float, bool, bool] | None, qkv: jax.Ref, angles: jax.Ref, *refs: jax.Ref
) -> None:
    """One program: some tokens, `at_once` at a time.

    Grid: (blocks of tokens,). Blocks: the joint projection [tokens, K, joint], the cosines and sines of whole heads
    side by side, weights of norms if there are any, and the results, in VMEM. Scratch: queries in float32, because only
    rows of 32 bits can be stored with a stride: head n is row n of the result, and of the projection row n // G.
    """
    *weights, queries, keys, values, wide = refs
    head_dim, kv_heads = keys.shape[2], keys.shape[1]
    num_groups = queries.shape[1] // kv_heads
    eps, is_late, norms_values = norms or (0.0, False, False)

    def some(part: Int[Array, ""], _: None) -> None:
        own = pl.ds(pl.multiple_of(part * at_once, at_once), at_once)
        cos, sin = (angles[own, half * head_dim : (half + 1) * head_dim][:, None] for half in (0, 1))

        def head(index: int, weight: jax.Ref | None) -> Float[Array, "t K H"]:
            x = qkv[own, :, index * head_dim : (index + 1) * head_dim]
            if weight is not None and not is_late:
                x = rms_norm(x, weight[0], eps)
            numbers = x.astype(jnp.float32)
            x = (numbers * cos + pltpu.roll(numbers, head_dim // 2, 2) * sin).astype(x.dtype)
            return rms_norm(x, weight[0], eps) if weight is not None and is_late else x

        of_queries, of_keys = weights or (None, None)
        for group in range(num_groups):
            wide[:, pl.ds(group, kv_heads, stride=num_groups)] = head(group, of_queries).astype(jnp.float32)
        queries[own] = wide[...].astype(queries.dtype)
        keys[own] = head(num_groups, of_keys)
        value = qkv[own, :, (num_groups + 1) * head_dim :]
        values[own] = rms_norm(value, jnp.ones(head_dim, jnp.float32), eps) if norms_values else value

    lax.fori_loop(0, len(qkv) // at_once, some, None)
