"""Rotation of queries and keys, and the write into the KV pool, in plain `jnp`. Letters: `jsg/models/inputs.py`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.inputs import HeadNorms, LayerCache
from jsg.kernels_pallas.reference_rows import rms_norm


def rotate_and_write(
    qkv: Float[Array, "T K joint"],
    cos: Float[Array, "T half"],
    sin: Float[Array, "T half"],
    slots: Int[Array, " T"],
    cache: LayerCache,
    norms: HeadNorms | None,
) -> tuple[Float[Array, "T N H"], LayerCache]:
    """See `ops.rotate_and_write`."""
    query, key, value = rotated(qkv, cos, sin, norms)
    return query, write_kv(cache, slots, key, value)


def rotated(
    qkv: Float[Array, "T K joint"], cos: Float[Array, "T half"], sin: Float[Array, "T half"], norms: HeadNorms | None
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Rotated queries, rotated keys, and values."""
    head_dim = 2 * cos.shape[1]
    query, key, value = jnp.split(qkv, [-2 * head_dim, -head_dim], axis=-1)
    query = query.reshape(len(query), -1, head_dim)  # [T, K, G·H] to [T, N, H]: head n reads kv head n // G
    if norms is not None and not norms.is_late:
        query, key = _normed(query, key, norms)
    if norms is not None and norms.norms_values:
        value = rms_norm(value, jnp.ones(head_dim, jnp.float32), norms.eps)
    query, key = rotate(query, cos, sin), rotate(key, cos, sin)
    if norms is not None and norms.is_late:
        query, key = _normed(query, key, norms)
    return query, key, value


def _normed(
    query: Float[Array, "T N H"], key: Float[Array, "T K H"], norms: HeadNorms
) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"]]:
    return rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)


def rotate(
    x: Float[Array, "T heads H"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads H"]:
    """Rotates dimension pairs (i, i + H/2) of every head, in float32. The result has the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def write_kv(
    cache: LayerCache, slots: Int[Array, " T"], new_keys: Float[Array, "T K H"], new_values: Float[Array, "T K H"]
) -> LayerCache:
    """The pool with the new tokens at `slots`. Numbers that are not finite: see `ops.rotate_and_write`."""
    new_keys, new_values = storable(slots, new_keys, new_values)
    if len(cache) == 1:
        (pool,) = cache
        page_size, new = pool.shape[3], by_head(pool, new_keys, new_values)
        return (pool.at[slots // page_size, :, :, slots % page_size].set(new),)
    keys, values = cache
    return _written(keys, slots, new_keys), _written(values, slots, new_values)


def storable(
    slots: Int[Array, " T"], new_keys: Float[Array, "T K H"], new_values: Float[Array, "T K H"]
) -> tuple[Float[Array, "T K H"], Float[Array, "T K H"]]:
    """Keys and values without those of slot 0, and with those that are not finite as in `ops.rotate_and_write`."""
    is_kept = (slots > 0)[:, None, None]
    is_finite = jnp.all(jnp.isfinite(new_values), axis=-1, keepdims=True)
    new_keys = jnp.where(is_kept, jnp.where(is_finite, new_keys, jnp.nan), 0)
    return new_keys, jnp.where(is_kept & is_finite, new_values, 0)


def write_latents(cache: LayerCache, slots: Int[Array, " T"], rows: Float[Array, "T K H"]) -> LayerCache:
    """See `ops.write_latents`."""
    is_kept, is_finite = (slots > 0)[:, None, None], jnp.all(jnp.isfinite(rows), axis=-1, keepdims=True)
    marked = jnp.where(jnp.arange(rows.shape[-1]) == rows.shape[-1] - 1, jnp.nan, 0).astype(rows.dtype)
    return (_written(cache[0], slots, jnp.where(is_kept, jnp.where(is_finite, rows, marked), 0)),)


def keys_and_values(
    cache: LayerCache,
) -> tuple[Float[Array, "P page_size K H"], Float[Array, "P page_size K H"]]:
    """The two arrays of a layer, or copies of them if both are in one array."""
    if len(cache) == 2:
        return cache
    (pool,) = cache
    keys, values = (pool[:, :, 0], pool[:, :, 1]) if pool.shape[2] == 2 else jnp.split(pool[:, :, 0], 2, axis=-1)
    return keys.swapaxes(1, 2), values.swapaxes(1, 2)


def by_head(
    pool: Float[Array, "P K parts page_size width"], new_keys: Float[Array, "T K H"], new_values: Float[Array, "T K H"]
) -> Float[Array, "T K parts width"]:
    """New tokens as a pool by head holds them (see `KVPool.layers`), in its type."""
    new = jnp.stack([new_keys, new_values], axis=2).reshape(len(new_keys), pool.shape[1], pool.shape[2], -1)
    return to_pool_dtype(new, pool.dtype)


def _written(
    pool: Float[Array, "P page_size heads H"], slots: Int[Array, " T"], new: Float[Array, "T heads H"]
) -> Float[Array, "P page_size heads H"]:
    page_size, new = pool.shape[1], to_pool_dtype(new, pool.dtype)
    if page_size == 1:
        return pool.at[slots, 0].set(new)
    return pool.at[slots // page_size, slots % page_size].set(new)


def to_pool_dtype(new: Float[Array, "*dims"], dtype: jax.typing.DTypeLike) -> Float[Array, "*dims"]:
    """Rounds to the pool's type. A number that is too large for 8-bit floats becomes the largest of them."""
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        # Triton's minimum and maximum of NaN and a number are the number, but a key must stay NaN.
        new = jnp.where(jnp.isnan(new), new, jnp.clip(new, -largest, largest))
    return new.astype(dtype)
