"""The entries to attention over the paged KV pool; each picks an implementation. Letters: `jsg/models/inputs.py`."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas import reference
from jsg.kernels_pallas.inputs import AttentionInputs


def write_kv(
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    slots: Int[Array, " T"],
    new_keys: Float[Array, "T K H"],
    new_values: Float[Array, "T K H"],
) -> tuple[Float[Array, "P page_size K H"], Float[Array, "P page_size K H"]]:
    """The pools with the new tokens at `slots` (page * page_size + offset); in place when the pools are donated.

    The pool of values stays finite, because attention multiplies masked values by zero and 0 * NaN is NaN. A value that
    is not finite becomes zero and its key NaN: every token that sees it has NaN, and no other. Slot 0, the dump, which
    masked positions are read from, always takes zeros.
    """
    is_kept = (slots > 0)[:, None, None]
    is_finite = jnp.all(jnp.isfinite(new_values), axis=-1, keepdims=True)
    new_keys = jnp.where(is_kept, jnp.where(is_finite, new_keys, jnp.nan), 0)
    new_values = jnp.where(is_kept & is_finite, new_values, 0)
    return _write(keys, slots, new_keys), _write(values, slots, new_values)


def _write(
    pool: Float[Array, "P page_size K H"], slots: Int[Array, " T"], new: Float[Array, "T K H"]
) -> Float[Array, "P page_size K H"]:
    page_size = pool.shape[1]
    if page_size == 1:
        return pool.at[slots, 0].set(new.astype(pool.dtype))
    return pool.at[slots // page_size, slots % page_size].set(new.astype(pool.dtype))


def paged_attention(
    queries: Float[Array, "T N H"],
    keys: Float[Array, "P page_size K H"],
    values: Float[Array, "P page_size K H"],
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "T N H"]:
    """Causal attention of packed new tokens over the pages of their own requests.

    Args:
        queries: Rotated queries; query head n reads key-value head n // (N // K).
        keys: Keys of the pool; the new tokens' own are already written.
        values: Values of the pool, likewise.
        inputs: Who sees what.
        scale: Multiplies queries · keys.
        window: A token sees the last `window` positions, its own included; None for all.
        softcap: Scores become softcap * tanh(score / softcap); None for none.
        implementation: "reference", or None for the best that works here.

    Returns:
        Attention of each packed token in the queries' dtype; zero for padding tokens.

    Raises:
        NotImplementedError: The implementation cannot do this case.
    """
    if implementation not in (None, "reference"):
        raise NotImplementedError(f"paged_attention has no implementation {implementation!r}; there is 'reference'")
    out = reference.paged_attention(queries, keys, values, inputs, scale=scale, window=window, softcap=softcap)
    return jnp.asarray(out, queries.dtype)
